"""The checkpoints of a run: opened at its start, written while it trains, and the best one found at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint import CheckpointManager, DamagedCheckpoint, open_checkpoint
from shoal.checkpoint.frozen_base import FrozenBase
from shoal.checkpoint.manifest import tied_and_buffers
from shoal.checkpoint.run_lock import RunLock
from shoal.config import Run
from shoal.errors import UserError
from shoal.tensors import local_part
from shoal.training.recipe_source import recipe_source
from shoal.training.resume import Progress, load_checkpoint, restore, state_for
from shoal.training.session import Session
from shoal.types import TrainState

_PER_TENSOR_BYTES = 1000
"""About what one tensor adds to headers and manifest."""


class Checkpoints:
    """Where a session's state is read from and written to."""

    def __init__(self, run: Run, session: Session, run_lock: RunLock, warn: Callable[[str], None]):
        self.run, self.session, self._warn = run, session, warn
        config, strategy = run.config.checkpoint, session.strategy
        self._recipe_source = recipe_source(run.recipe_type)
        self.manager = CheckpointManager(
            Path(run.config.output_dir),
            config.keep_last,
            keep_best=config.keep_best,
            metric=config.metric,
            mode=config.mode,
            keep_every=config.keep_every,
            is_main_process=strategy.is_main_process,
            check_may_write=run_lock.check,
            background=strategy.device.type == "cuda" if config.async_save is None else config.async_save,
        )
        self.manager.clean()
        self.base = FrozenBase(session.model, session.weights, session.state().model if session.weights.files else {})
        self.progress: Progress = restore(run, session, self.manager, self.base, warn)
        self.manager.saved_step = self.progress.step
        self.left_out = self.base.unchanged(session.state().model) if self.base.tensors else {}
        """The frozen tensors that checkpoints refer to instead of storing them."""
        self.expected_bytes = self._expect_bytes()
        """The size of a checkpoint over all ranks."""
        if lack := self.manager.missing_space(self.expected_bytes):
            warn(f"{lack}; make room, or the run will not be saved")
        if config.keep_best and not run.config.training.eval_steps:
            warn(
                f"checkpoint.keep_best = {config.keep_best}, but without training.eval_steps only the end is evaluated"
            )
        self.saved_at = time.monotonic()

    def _expect_bytes(self) -> int:
        """Estimates the size from what the ranks hold; an optimizer that has not stepped yet has nothing to look at."""
        stored = [one.nbytes for name, one in self.session.strategy.held().items() if name not in self.left_out]
        options, (trained, _) = self.session.optimizer.defaults, self.session.parameter_counts
        slots = 2 if "betas" in options else 1 if options.get("momentum") else 0
        return sum(stored) + slots * 4 * trained + _PER_TENSOR_BYTES * (1 + slots) * len(stored)

    def is_late(self) -> bool:
        """Returns whether the last save was longer ago than `checkpoint.every_minutes`."""
        minutes = self.run.config.checkpoint.every_minutes
        return minutes is not None and time.monotonic() > self.saved_at + 60 * minutes

    def save(self, progress: Mapping[str, Any], evaluation: Mapping[str, float] | None) -> None:
        """Writes the state; in the background it returns when the state is copied, and `wait` hears how it went."""
        trainer = dict(progress)
        if evaluation is not None:
            trainer["metrics"] = {name: value for name, value in evaluation.items() if isfinite(value)}
        about = {
            "layout": self.session.strategy.layout.as_dict(),
            "batches": [[phase.first_epoch, phase.global_batch_size] for phase in self.progress.batches.phases],
            "config": self.run.tree(),
            "recipe_source": self._recipe_source,
            **tied_and_buffers(self.session.model),
        }
        state, base = self.base.without_base(self.session.state())
        self._check_finite(state, progress["step"])
        with self._warns_if_unsaved():
            self.manager.save(state, trainer, about | base)
        self.saved_at = time.monotonic()

    def _check_finite(self, state: TrainState, step: int) -> None:
        """Raises UserError if a trained parameter is not finite: no later step repairs it, and rotation would replace
        the checkpoints that are good by ones that are not."""
        trained = {name for name, p in self.session.model.named_parameters() if p.requires_grad}
        bad = [name for name in state.model if name in trained and not _is_finite(local_part(state.model[name]))]
        if self.session.strategy.any_rank(bool(bad)):
            self.wait()
            good, name = self.manager.saved_step, bad[0] if bad else "of another rank"
            raise UserError(
                f"parameter {name} is not finite after step {step}, so the run stops and the step is not saved; lower "
                f"training.learning_rate = {self.run.config.training.learning_rate:g}, or look at the data; "
                + (f"the last checkpoint is of step {good}" if good else "nothing is saved")
            )

    def wait(self) -> None:
        """Waits until nothing is being written."""
        with self._warns_if_unsaved():
            self.manager.wait()
        if error := self.manager.rotation_error:
            self.manager.rotation_error = None
            self._warn(f"old checkpoints could not be removed: {error}; the next save tries again")

    @contextmanager
    def _warns_if_unsaved(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            failed, good = self.manager.last_attempted_step, self.manager.saved_step
            self._warn(f"step {failed} could not be saved: {error}; the last checkpoint is {good}")

    def find_best(self, load: bool, current_step: int) -> tuple[int, float] | None:
        """Returns the best step and its value; loads its weights if asked to and they are not in the model already.

        Of weights that are to be loaded, a damaged checkpoint is passed over.
        """
        for step, value in self.manager.best():
            if not load or step == current_step:
                return step, value
            damage = ""
            try:
                checkpoint = open_checkpoint(self.manager.path_of(step))
                state = state_for(self.run, checkpoint, self.session.strategy.held())
            except DamagedCheckpoint as error:
                damage = str(error)
            if not self.session.strategy.any_rank(bool(damage)):
                load_checkpoint(self.session, checkpoint, state, self.base)
                return step, value
            where = damage or "on another rank"
            self._warn(f"the best checkpoint, of step {step}, is damaged and passed over: {where}")
        return None


def _is_finite(tensor: Tensor) -> bool:
    """Returns whether no element is infinite or NaN, without memory for an answer about each."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1 or not tensor.numel():  # aminmax takes no float8
        return True
    return bool(torch.stack(tensor.aminmax()).isfinite().all())
