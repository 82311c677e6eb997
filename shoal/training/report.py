"""The step-1 report: what is in force, who set it, and proof that what was asked for really engaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

import shoal
from shoal.config.batch import accumulation
from shoal.config.resolve import DEFAULT, source_of
from shoal.errors import UserError
from shoal.parallel.precision import HalfWitness
from shoal.torch_private import compiled_graphs

if TYPE_CHECKING:
    from shoal.training.trainer import Trainer


class Report:
    """Watches the first step, then tells."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.training = trainer.config.training
        self._witness = HalfWitness(self.training.mixed_precision)
        self._graphs_before = compiled_graphs() if self.training.compile else 0

    def watch(self) -> AbstractContextManager[None]:
        # Hooks on saved tensors would keep torch.compile from seeing the whole graph.
        if self.training.mixed_precision != "fp32" and not self.training.compile:
            return self._witness.watch()
        return nullcontext()

    def check(self) -> None:
        """Refuses to go on if something asked for had no effect."""
        if self.training.compile and compiled_graphs() == self._graphs_before:
            raise UserError(
                "training.compile = true, but torch.compile compiled nothing of this model (see TORCH_LOGS=dynamo); "
                "set it to false or change the model"
            )
        precision = self.training.mixed_precision
        if precision != "fp32" and not self.training.compile and not self._witness.seen:
            raise UserError(
                f"training.mixed_precision = {precision}, but nothing in the first step was computed in {precision}; "
                "use fp32, or look for code in the model that turns autocast off"
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
        """What it is called, what is in force, and the keys that say so."""
        t, training, config = self.trainer, self.training, self.trainer.config
        yield "shoal", f"{shoal.__version__}, torch {torch.__version__}", ()
        yield "run folder", str(t.output_dir), ("experiment.output_dir", "experiment.name")
        device = _device_name(t.strategy.device)
        yield "strategy", f"{t.strategy.name} on {device}", ("distributed.strategy", "training.device")
        trained = sum(p.numel() for p in t.model.parameters() if p.requires_grad)
        frozen = sum(p.numel() for p in t.model.parameters() if not p.requires_grad)
        sizes = f"{trained:,} parameters" + (f", {frozen:,} frozen" if frozen else "")
        yield "model", f"{type(t.model).__name__}, {sizes}", ("recipe",)
        built = f"as built; this process held the whole model once; {t.weights.reason}".rstrip("; ")
        yield "weights", "drawn by name" if t.weights.kind == "init" else built, ("experiment.seed",)
        yield "data", f"{t.epoch_size:,} samples an epoch" if t.epoch_size else "a stream", ("dataset.name",)
        first, *later = t.batches.phases
        times = accumulation(first, t.strategy.data_size)
        product = f"{first.batch_size} × {times} accumulated × {t.strategy.data_size} data-parallel"
        changes = "".join(f", {phase.global_batch_size} from epoch {phase.first_epoch}" for phase in later)
        batch_keys = ("training.global_batch_size", "training.batch_size", "training.gradient_accumulation")
        yield "batch", f"{first.global_batch_size} = {product}{changes}", batch_keys
        yield "steps", f"{t.total_steps:,}, from {t.first_step:,}", ("training.max_steps", "training.num_epochs")
        schedule = f"learning rate {training.learning_rate:g}, {training.lr_scheduler.name}"
        schedule_keys = ("training.optimizer.name", "training.learning_rate", "training.lr_scheduler.name")
        yield "optimizer", f"{training.optimizer.name} (fused), {schedule}", schedule_keys
        precision = training.mixed_precision + (", tf32 matmuls" if training.tf32 else "")
        yield "precision", precision, ("training.mixed_precision", "training.tf32")
        if training.compile:
            yield "compile", f"{t.strategy.compiled_modules} modules", ("training.compile",)
        if config.experiment.deterministic:
            yield "deterministic", "yes", ("experiment.deterministic",)
        saving = f"every {config.checkpoint.every} steps and" if config.checkpoint.every else "only"
        yield "checkpoints", f"{saving} at the end, the last {config.checkpoint.keep_last} kept", ("checkpoint.every",)
        yield "start", t.progress.started_from, ("checkpoint.resume",)
        idle = [key for key in ("dataset.persistent_workers", "dataset.prefetch") if key in t.run.sources]
        if idle and not config.dataset.num_workers:
            yield "not in force", f"{', '.join(idle)}: dataset.num_workers is 0", tuple(idle)


def _device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
