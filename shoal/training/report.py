"""The report at step 1: what is in force, where each setting came from, and a check that it really engaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

import shoal
from shoal.config.batch import accumulation
from shoal.config.run import DEFAULT, source_of
from shoal.errors import UserError
from shoal.torch_private import compiled_graphs
from shoal.transform.activation_checkpointing import num_recomputed
from shoal.transform.precision import HalfWitness

if TYPE_CHECKING:
    from shoal.training.loop import Shell


SECTIONS = {
    "ddp": ("ddp",),
    "fsdp": ("fsdp", "mesh"),
    "mesh": ("fsdp", "mesh"),
    "tensor": ("mesh",),
    "pipeline": ("mesh",),
    "deepspeed": ("deepspeed",),
    "zero_stage": ("deepspeed",),
    "offload": ("deepspeed",),
}
"""Sections and keys of `distributed`, and the strategies that use them."""


class Report:
    """Watches the first step, and describes the run afterwards."""

    flops_per_sample: float | None = None

    def __init__(self, shell: Shell):
        self.shell, self.engaged = shell, shell.strategy.engaged
        self.training = shell.config.training
        self._witness = HalfWitness(self.training.mixed_precision)
        self._recomputed_before = num_recomputed()
        self._graphs_before = compiled_graphs() if self.training.compile else 0

    def watch(self) -> AbstractContextManager[None]:
        if self.training.mixed_precision != "fp32" and not self.training.compile:  # it cannot look into compiled code
            return self._witness
        return nullcontext()

    def check(self) -> None:
        """Stops the run if something that was asked for had no effect."""
        if self.training.compile and compiled_graphs() == self._graphs_before:
            raise UserError(
                "training.compile = true, but torch.compile compiled nothing of this model (see TORCH_LOGS=dynamo); "
                "set it to false or change the model"
            )
        recomputed = num_recomputed() > self._recomputed_before
        if self.engaged.checkpointed_modules and not self.training.compile and not recomputed:
            mode = self.training.activation_checkpointing.mode
            raise UserError(
                f"training.activation_checkpointing = {mode}, but nothing was computed again in the first step's "
                "backward; set it to none or look for what keeps the model's blocks from being called"
            )
        head = self.engaged.chunked_head
        if head is not None and not head.num_scored:
            raise UserError(
                f"{head.cause}, but the model never called the plan's head in the first step; {head.advice}, or mend "
                "the recipe's parallel_plan"
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
        setters = dict.fromkeys(source_of(key, self.shell.run.sources) for key in keys)
        named = [setter for setter in setters if setter != DEFAULT]
        return f"  ({', '.join(named)})" if named else ""

    def _rows(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """Yields the name of each row, what is in force, and the keys that decide it."""
        shell, training, config = self.shell, self.training, self.shell.config
        session, strategy, engaged, checkpoints = shell.session, shell.strategy, self.engaged, shell.checkpoints
        yield "shoal", f"{shoal.__version__}, torch {torch.__version__}", ()
        yield "run folder", str(shell.output_dir), ("experiment.output_dir", "experiment.name")
        device = _device_name(strategy.device)
        yield "strategy", f"{engaged.description} on {device}", ("distributed.strategy", "training.device")
        trained, frozen = session.parameter_counts
        sizes = f"{trained:,} parameters" + (f", {frozen:,} frozen" if frozen else "")
        kind = type(session.model).__name__.removeprefix("FSDP")  # fully_shard gives the model a class of its own
        yield "model", f"{kind}, {sizes}", ("recipe",)
        yield self._weights()
        yield (
            "data",
            f"{shell.loaders.epoch_size:,} samples an epoch" if shell.loaders.epoch_size else "a stream",
            ("dataset.name",),
        )
        first, *later = checkpoints.progress.batches.phases
        times = accumulation(first, strategy.data_size)
        product = f"{first.batch_size} × {times} accumulated × {strategy.data_size} data-parallel"
        changes = "".join(f", {phase.global_batch_size} from epoch {phase.first_epoch}" for phase in later)
        batch_keys = ("training.global_batch_size", "training.batch_size", "training.gradient_accumulation")
        yield "batch", f"{first.global_batch_size} = {product}{changes}", batch_keys
        yield (
            "steps",
            f"{shell.total_steps:,}, from {shell.first_step:,}",
            ("training.max_steps", "training.num_epochs"),
        )
        schedule = f"learning rate {training.learning_rate:g}, {training.lr_scheduler.name}"
        schedule_keys = ("training.optimizer.name", "training.learning_rate", "training.lr_scheduler.name")
        yield "optimizer", f"{training.optimizer.name} (fused), {schedule}", schedule_keys
        precision = training.mixed_precision + (", tf32 matmuls" if training.tf32 else "")
        yield "precision", precision, ("training.mixed_precision", "training.tf32")
        if engaged.float8_layers:
            yield "fp8", f"{engaged.float8_layers} linear layers", ("training.mixed_precision",)
        if names := engaged.checkpointed_modules:
            mode = training.activation_checkpointing.mode
            yield "recomputed", f"{len(names)} modules, {mode}", ("training.activation_checkpointing.mode",)
        if training.loss_chunks > 1:
            yield "loss", f"in {training.loss_chunks} chunks", ("training.loss_chunks",)
        if training.compile:
            yield "compile", f"{engaged.compiled_modules} modules", ("training.compile",)
        if config.experiment.deterministic:
            yield "deterministic", "yes", ("experiment.deterministic",)
        saving = f"every {config.checkpoint.every} steps and" if config.checkpoint.every else "only"
        c = config.checkpoint
        saving += f" at the end, the last {c.keep_last} kept"
        saving += f", the best {c.keep_best} by {c.metric} ({c.mode})" if c.keep_best else ""
        saving += f", every {c.keep_every}th for good" if c.keep_every else ""
        saving += f", after {c.every_minutes:g} minutes" if c.every_minutes else ""
        if checkpoints.manager.background:
            staged = checkpoints.expected_bytes / strategy.world_size / 2**30
            saving += f", written in the background from {staged:.2f} GiB of host memory"
        yield "checkpoints", saving, ("checkpoint.every", "checkpoint.async_save")
        if references := checkpoints.left_out:
            files = ", ".join(sorted({str(reference.source.path) for reference in references.values()}))
            yield "base", f"{len(references)} frozen tensors are not copied, but stay in {files}", ()
        yield "start", checkpoints.progress.started_from, ("checkpoint.resume",)
        idle = [key for key in ("dataset.persistent_workers", "dataset.prefetch") if key in shell.run.sources]
        if idle and not config.dataset.num_workers:
            yield "not in force", f"{', '.join(idle)}: dataset.num_workers is 0", tuple(idle)
        unasked = [key for key in ("checkpoint.metric", "checkpoint.mode") if key in shell.run.sources]
        if unasked and not c.keep_best:
            yield "not in force", f"{', '.join(unasked)}: checkpoint.keep_best is 0", tuple(unasked)
        if config.checkpoint.init_from and shell.first_step:
            why = "the run goes on with its own weights"
            yield "not in force", f"checkpoint.init_from: {why}", ("checkpoint.init_from",)
        for key, why in engaged.not_in_force.items():
            yield "not in force", f"{key}: {why}", (key,)
        for section, users in SECTIONS.items():
            under = (f"distributed.{section}", f"distributed.{section}.")
            keys = tuple(key for key in shell.run.sources if key == under[0] or key.startswith(under[1]))
            if keys and strategy.name not in users:
                yield "not in force", f"distributed.{section}: the strategy is {strategy.name}", keys

    def _weights(self) -> tuple[str, str, tuple[str, ...]]:
        weights = self.shell.session.weights
        if origin := self.shell.checkpoints.progress.weights_from:
            origin, key = f"from {origin}", "checkpoint.resume" if self.shell.first_step else "checkpoint.init_from"
        else:
            read = f"read from {len(weights.files)} files"
            origin = {"init": "drawn by name", "files": read, "built": "as built"}[weights.kind]
            key = "experiment.seed"
        held = "this process held the whole model once" if weights.kind == "built" else ""
        return "weights", "; ".join(filter(None, (origin, held, weights.reason))), (key,)


def _device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
