"""The checkpoints of a run: opened at its start, written while it trains, and the best one found at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
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
from shoal.training.hooks import HookState
from shoal.training.optimizers import is_by_recipe
from shoal.training.recipe_source import recipe_source
from shoal.training.resume import Progress, load_checkpoint, optimizer_change, restore, state_for
from shoal.training.session import Session
from shoal.types import TrainState

_PER_TENSOR_BYTES = 1000
"""About what one tensor adds to headers and manifest."""


class Checkpoints:
    """Where a session's state is read from and written to."""

    def __init__(
        self,
        run: Run,
        session: Session,
        run_lock: RunLock,
        warn: Callable[[str], None],
        skip_to: int | None = None,
    ):
        """`skip_to` is the position to go on from if this process goes back to its last checkpoint."""
        self.run, self.session, self.warn = run, session, warn
        config, strategy = run.config.checkpoint, session.strategy
        self._recipe_source = recipe_source(run.recipe_type)
        self._data_digests = session.recipe.data_digests()
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
        self.progress: Progress = restore(run, session, self.manager, self.base, warn, skip_to is not None)
        if skip_to is not None:
            skipped = (*self.progress.skipped_samples, (self.progress.samples, skip_to))
            self.progress = replace(self.progress, samples=skip_to, skipped_samples=skipped)
        self.manager.saved_step = self.progress.step
        self.left_out = self.base.unchanged(session.state().model) if self.base.tensors else {}
        """The frozen tensors that checkpoints refer to instead of storing them."""
        self.expected_bytes = self._expect_bytes()
        """The size of a checkpoint over all ranks."""
        if lack := self.manager.missing_space(self.expected_bytes):
            warn(f"{lack}; make room, or the run will not be saved")
        if config.keep_best and not (run.config.training.eval_steps or run.config.training.eval_epochs):
            warn(
                f"checkpoint.keep_best = {config.keep_best}, but without training.eval_steps or eval_epochs only the "
                "end is evaluated"
            )
        self.saved_at = time.monotonic()
        self.schedule_state: Callable[[], Mapping[str, Any]] | None = None
        """Returns what a schedule that follows evaluations has noted, if the run has one."""
        self.logged: Callable[[], Mapping[str, float]] | None = None
        """Returns what steps of the user's own have logged since the last line of the log."""

    def _expect_bytes(self) -> int:
        """Estimates the size from what the ranks hold; an optimizer that has not stepped yet has nothing to look at."""
        stored = [one.nbytes for name, one in self.session.strategy.held().items() if name not in self.left_out]
        options, (trained, _) = self.session.optimizer.defaults, self.session.parameter_counts
        slots = 2 if "betas" in options else 1 if options.get("momentum") else 0
        exchange = self.session.strategy.engaged.exchange
        slots += exchange.num_stored_copies(slots) if exchange is not None else 0
        return sum(stored) + slots * 4 * trained + _PER_TENSOR_BYTES * (1 + slots) * len(stored)

    def is_late(self) -> bool:
        """Returns whether the last save was longer ago than `checkpoint.every_minutes`."""
        minutes = self.run.config.checkpoint.every_minutes
        return minutes is not None and time.monotonic() > self.saved_at + 60 * minutes

    def reserve(self, hooks: HookState) -> None:
        """Begins to allocate the memory of saves in the background, if the run saves before its end.

        After the first step, because optimizers have no state before.
        """
        config = self.run.config.checkpoint
        if config.every or config.every_epochs or config.every_minutes or config.keep_every or config.keep_best:
            self.manager.reserve(self._state(hooks)[0])

    def _state(self, hooks: HookState) -> tuple[TrainState, dict[str, Any]]:
        """Returns what a checkpoint stores, and what its manifest says of the frozen tensors that it does not."""
        state, base = self.base.without_base(self.session.state())
        state.callbacks.update(hooks.tensors)  # type: ignore[arg-type]  # none of them is on disk
        return state, base

    def save(
        self,
        progress: Mapping[str, Any],
        evaluation: Mapping[str, float] | None,
        hooks: HookState,
        evaluated: str | None,
    ) -> None:
        """Writes the state; in the background it returns when the state is copied, and `wait` hears how it went.

        `evaluated` is where the checkpoint has the weights that were evaluated, such as `ema/average`, if not in the
        model.
        """
        trainer = {**progress, **hooks.as_json()}
        if self.schedule_state:
            trainer["schedule"] = self.schedule_state()
        if self.logged and (logged := self.logged()):
            trainer["logged"] = dict(logged)
        if evaluation is not None:
            trainer["metrics"] = {name: value for name, value in evaluation.items() if isfinite(value)}
            if evaluated is not None:
                trainer["evaluated_weights"] = evaluated
        about = {
            "layout": self.session.strategy.layout.as_dict(),
            "batches": [[phase.first_epoch, phase.global_batch_size] for phase in self.progress.batches.phases],
            "config": self.run.tree(),
            **({"optimizer": self.session.optimizer_name} if is_by_recipe(self.session.optimizer) else {}),
            "recipe_source": self._recipe_source,
            **({"data": self._data_digests} if self._data_digests else {}),
            **tied_and_buffers(self.session.model),
        }
        state, base = self._state(hooks)
        self._check_finite(state, progress["step"])
        with self._warns_if_unsaved():
            self.manager.save_state(state, trainer, about | base)
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
            self.warn(f"old checkpoints could not be removed: {error}; the next save tries again")

    @contextmanager
    def _warns_if_unsaved(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            failed, good = self.manager.last_attempted_step, self.manager.saved_step
            self.warn(f"step {failed} could not be saved: {error}; the last checkpoint is {good}")

    def find_best(self, load: bool, current_step: int, evaluated: str | None) -> tuple[int, float] | None:
        """Returns the best step and its value; loads its weights if asked to and they are not in the model already.

        `evaluated` is where a checkpoint has the weights that were evaluated, such as `ema/average`, if not in the
        model. Of weights that are to be loaded, a damaged checkpoint is passed over.
        """
        for step, value in self.manager.best():
            if not load or (step == current_step and evaluated is None):
                return step, value
            damage = ""
            try:
                checkpoint = open_checkpoint(self.manager.path_of(step))
                change = optimizer_change(checkpoint, self.run, self.session)
                state = state_for(checkpoint, self.session.strategy.held(), change, self.session.strategy.rank)
            except DamagedCheckpoint as error:
                damage = str(error)
            if not self.session.strategy.any_rank(bool(damage)):
                averages = state.callbacks.items() if evaluated else ()
                prefix = f"{evaluated}/"
                state.model.update({key.removeprefix(prefix): t for key, t in averages if key.startswith(prefix)})
                load_checkpoint(self.session, checkpoint, state, self.base)
                return step, value
            where = damage or "on another rank"
            self.warn(f"the best checkpoint, of step {step}, is damaged and passed over: {where}")
        return None


def _is_finite(tensor: Tensor) -> bool:
    """Returns whether no element is infinite or NaN, without memory for an answer about each."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1 or not tensor.numel():  # aminmax takes no float8
        return True
    return bool(torch.stack(tensor.aminmax()).isfinite().all())
