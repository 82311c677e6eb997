"""The step-1 report: what is in force, who set it, and proof that what was asked for really engaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

import shoal
from shoal.config.resolve import DEFAULT, source_of
from shoal.config.schema import AdamW
from shoal.errors import UserError
from shoal.parallel.precision import Bf16Witness
from shoal.torch_private import compiled_graphs

if TYPE_CHECKING:
    from shoal.training.trainer import Trainer


class Report:
    """Watches the first step, then tells."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.training = trainer.config.training
        self._witness = Bf16Witness()
        self._graphs_before = compiled_graphs() if self.training.compile else 0

    def watch(self) -> AbstractContextManager[None]:
        # Hooks on saved tensors would keep torch.compile from seeing the whole graph.
        if self.training.mixed_precision == "bf16" and not self.training.compile:
            return self._witness.watch()
        return nullcontext()

    def check(self) -> None:
        """Refuses to go on if something asked for had no effect."""
        if self.training.compile and compiled_graphs() == self._graphs_before:
            raise UserError(
                "training.compile = true, but torch.compile compiled nothing of this model (see TORCH_LOGS=dynamo); "
                "set it to false or change the model"
            )
        if self.training.mixed_precision == "bf16" and not self.training.compile and not self._witness.seen:
            raise UserError(
                "training.mixed_precision = bf16, but nothing in the first step was computed in bf16; use fp32, "
                "or look for code in the model that turns autocast off"
            )

    def __str__(self) -> str:
        rows = [*self._rows()]
        width = max(len(name) for name, _, _ in rows)
        return "\n".join(f"{name:<{width}}  {what}{self._by(keys)}" for name, what, keys in rows)

    def _by(self, keys: tuple[str, ...]) -> str:
        setters = dict.fromkeys(source_of(key, self.trainer.run.sources) for key in keys)
        named = [setter for setter in setters if setter != DEFAULT]
        return f"  ({', '.join(named)})" if named else ""

    def _rows(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        t, training, config = self.trainer, self.training, self.trainer.config
        parameters = [p for p in t.model.parameters()]
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        frozen = sum(p.numel() for p in parameters) - trained
        phase = t.batches.phases[0]
        accumulation = -(-phase.global_batch_size // (phase.batch_size * t.strategy.data_size))

        yield "shoal", f"{shoal.__version__}, torch {torch.__version__}", ()
        yield "run folder", str(t.output_dir), ("experiment.output_dir", "experiment.name")
        yield "strategy", f"{t.strategy.name} on {_device_name(t.strategy.device)}", ("distributed.strategy", "training.device")
        yield "model", f"{type(t.model).__name__}, {trained:,} parameters" + (f", {frozen:,} frozen" if frozen else ""), ("recipe",)
        if t.weights.kind == "init":
            yield "weights", "drawn by name", ("experiment.seed",)
        else:
            why = f" ({t.weights.reason})" if t.weights.reason else ""
            yield "weights", f"as built{why}; this process held the whole model once", ("experiment.seed",)
        yield "data", f"{t.epoch_size:,} samples an epoch" if t.epoch_size else "a stream", ("dataset.name",)
        yield (
            "batch",
            f"{phase.global_batch_size} = {phase.batch_size} × {accumulation} accumulated × {t.strategy.data_size} data-parallel"
            + (f", changing at epochs {[p.first_epoch for p in t.batches.phases[1:]]}" if len(t.batches.phases) > 1 else ""),
            ("training.global_batch_size", "training.batch_size", "training.gradient_accumulation"),
        )
        yield "steps", f"{t.total_steps:,}, from {t.first_step:,}", ("training.max_steps", "training.num_epochs")
        optimizer = training.optimizer
        detail = f"betas {optimizer.betas}" if isinstance(optimizer, AdamW) else f"momentum {optimizer.momentum}"
        yield (
            "optimizer",
            f"{optimizer.name} (fused, {detail}), learning rate {training.learning_rate:g}, {training.lr_scheduler.name}",
            ("training.optimizer.name", "training.learning_rate", "training.lr_scheduler.name"),
        )
        matmuls = ", tf32 matmuls" if training.tf32 else ""
        yield "precision", f"{training.mixed_precision}{matmuls}", ("training.mixed_precision", "training.tf32")
        if training.compile:
            yield "compile", f"{t.strategy.compiled_modules} modules", ("training.compile",)
        if config.experiment.deterministic:
            yield "deterministic", "yes", ("experiment.deterministic",)
        saving = f"every {config.checkpoint.every} steps and" if config.checkpoint.every else "only"
        yield "checkpoints", f"{saving} at the end, the last {config.checkpoint.keep_last} kept", ("checkpoint.every",)
        yield "start", t.progress["from"], ("checkpoint.resume",)
        idle = [f"dataset.{key}" for key in ("persistent_workers", "prefetch") if f"dataset.{key}" in t.run.sources]
        if idle and not config.dataset.num_workers:
            yield "not in force", f"{', '.join(idle)}: dataset.num_workers is 0", tuple(idle)


def _device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
