"""The cadence around training steps: when to log, evaluate, save, compare replicas, and stop.

What a step computes is its body's business: a recipe's (`trainer.py`), or a user's own.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol

from torch import nn

from shoal.config import Run
from shoal.errors import UserError
from shoal.observe.memory import memory_gib
from shoal.processes.desync import check_samples
from shoal.processes.watchdog import Watchdog
from shoal.training.checkpoints import Checkpoints
from shoal.training.loaders import Loaders
from shoal.training.observers import FOR_FILES_ALONE, Observers
from shoal.training.session import Session
from shoal.training.signals import StopFlag
from shoal.types import MicroBatch, StepInfo, StepOutput


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    output_dir: Path
    first_step: int
    step: int
    total_steps: int
    metrics: dict[str, float]
    preview: str | None
    stopped_by: int
    """The number of the signal that ended it early, or 0."""
    model: nn.Module = field(repr=False)
    """As the last step left it, or with the best step's weights if `load_best_model_at_end` asked for them."""
    best_step: int | None = None
    """With `keep_best`: which of the steps that were saved was evaluated best."""
    last_checkpoint: Path | None = None
    """The folder of the last step's checkpoint."""
    best_checkpoint: Path | None = None
    """The folder of the best step's checkpoint, if `best_step` is known."""


class Body(Protocol):
    """What happens in a step and in an evaluation."""

    preview: str | None

    def take_step(self, micro_batches: Sequence[MicroBatch], step: int) -> tuple[StepOutput, StepInfo]:
        """Updates the model. The first step of this process also shows what is in force."""

    def evaluate(self, shell: Shell) -> dict[str, float] | None:
        """Returns the metrics of an evaluation; None if it was cut short."""

    def explain_skips(self, micro_batches: Sequence[MicroBatch]) -> str:
        """Returns where the first value that is not finite comes from."""

    def log(self) -> dict[str, float]:
        """Returns what a line of the log shows besides the meter's numbers."""


class Shell:
    """Runs the steps of a session from where it stands to the end of the run."""

    observers: Observers
    taken: tuple[StepOutput, StepInfo]
    """The results of the last step."""

    def __init__(
        self,
        run: Run,
        session: Session,
        checkpoints: Checkpoints,
        loaders: Loaders,
        stop: StopFlag,
        watchdog: Watchdog,
    ):
        self.run, self.config, self.session, self.strategy = run, run.config, session, session.strategy
        self.checkpoints, self.loaders = checkpoints, loaders
        self.stop, self.watchdog = stop, watchdog
        self.output_dir = Path(run.config.output_dir)
        self.step = self.first_step = checkpoints.progress.step
        self.total_steps = loaders.total_steps
        self.stopped_by = 0
        self.metrics: dict[str, float] = {}
        self._save_soon = False
        """True if the next step should be saved: the evaluation was among the best, or the last save is long ago."""
        self._evaluated_step: int | None = None
        self._evaluation: dict[str, float] = {}
        """The metrics of `_evaluated_step`."""

    def fit(self, body: Body) -> Outcome:
        """Takes all steps that are left, and returns how the run ended."""
        for micro_batches in self.steps(body):
            self.taken = body.take_step(micro_batches, self.step)
        return self.finish(body)

    def steps(self, body: Body) -> Iterator[Sequence[MicroBatch]]:
        """Yields the micro-batches of each step, and does what is due after it.

        Whoever iterates computes the step, and puts its results into `taken`.
        """
        training, saving, every = self.config.training, self.config.checkpoint, self.config.logging.every
        watchdog, loader, advance = self.watchdog, self.loaders.train, self.observers.console.advance
        if self.owes_evaluation():
            self.evaluate(body)
        watchdog.at("waiting for data", self.step + 1)
        with _collector_paused():
            for micro_batches in islice(loader, max(0, self.total_steps - self.step)):
                watchdog.at("forward, backward and update", self.step + 1)
                self.observers.profiler.step(self.step + 1)
                yield micro_batches
                self.step += 1
                self.observers.meter.add(*self.taken)
                advance(self.step)
                watchdog.started = True
                if self._due(every) or self.step in (self.first_step + 1, self.total_steps):
                    self.log(body, micro_batches)
                if self._due(training.eval_steps):
                    self.evaluate(body)
                if (self._save_soon or self._due(saving.every, saving.keep_every)) and self.step != self.total_steps:
                    self.save()  # the last step is saved by `finish`, when it is evaluated too
                if self._due(self.config.distributed.desync_steps):
                    self.check_sync(micro_batches)
                if self._due(training.gc_steps):
                    gc.collect(1)
                if self.agree_to_stop():
                    break
                watchdog.at("waiting for data", self.step + 1)

    def _due(self, *intervals: int | None) -> bool:
        for every in intervals:  # noqa: SIM110  a generator is a call for each
            if every is not None and self.step % every == 0:
                return True
        return False

    def owes_evaluation(self) -> bool:
        """Returns whether the checkpoint that this run resumed from was due for an evaluation that never ran."""
        due = self._due(self.config.training.eval_steps) or self.step >= self.total_steps
        return due and 0 < self.step == self.first_step and not self.checkpoints.progress.evaluated

    def agree_to_stop(self) -> bool:
        """Returns whether any rank was asked to stop, which all of them then do after the same step.

        Ranks get signals at different moments, and their clocks differ. The number is 2 × signal + (a save is due), so
        that one exchange decides both; a run that stops always saves.
        """
        self.watchdog.at("agreeing whether to stop", self.step)
        agreed = self.strategy.max_over_ranks(2 * self.stop.signal + self.checkpoints.is_late())
        self.stopped_by = agreed // 2
        self._save_soon |= agreed % 2 == 1
        return self.stopped_by > 0

    def check_sync(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Stops the run if ranks that should be replicas drifted apart, or took each other's samples."""
        self.watchdog.at("comparing replicas", self.step)
        self.strategy.check_sync(dict(self.session.model.named_parameters()))
        if self.strategy.data_size > 1:
            check_samples(micro_batches if self.strategy.is_data_leader else (), self.loaders.train.last_step())

    def log(self, body: Body, micro_batches: Sequence[MicroBatch]) -> None:
        """Reads the numbers of the last steps from the device, for which the host waits."""
        self.watchdog.at("reading metrics", self.step)
        metrics = {**self.observers.meter.read(self.loaders.train), **body.log()}
        metrics["train/memory_gib"] = memory_gib(self.strategy.device)
        if self.loaders.epoch_size:
            metrics["train/epoch"] = self.loaders.train.position / self.loaders.epoch_size
        # Files have the lines of a run that was never interrupted; people also want to see that it goes on.
        self._publish(metrics, in_files=self._due(self.config.logging.every) or self.step in (1, self.total_steps))
        skipped, limit = self.observers.meter.skipped_in_a_row, self.config.training.max_skipped_steps
        if skipped >= limit:
            culprit = body.explain_skips(micro_batches)
            self._wait_for_disk()
            last = self.checkpoints.manager.saved_step
            raise UserError(
                f"the last {skipped} updates were skipped because their gradient was not finite "
                f"(training.max_skipped_steps = {limit}); {culprit}; "
                + (f"the last checkpoint is of step {last}" if last else "nothing is saved")
            )

    def evaluate(self, body: Body) -> None:
        if self.loaders.evaluation is None:
            return
        self.watchdog.at("evaluation", self.step)
        if (evaluation := body.evaluate(self)) is not None:
            self._publish(evaluation)
            if body.preview is not None:
                self.observers.loggers.text(self.step, "preview", body.preview)
            self._evaluation, self._evaluated_step = evaluation, self.step
            self._save_soon |= self.checkpoints.manager.would_be_among_best(self.step, evaluation)
        self.observers.meter.restart_clock(self.loaders.train)

    def save(self) -> None:
        """Saves the state; in the background it returns when the state is copied aside."""
        self._wait_for_disk()
        self.watchdog.at("saving", self.step)
        progress = {
            "step": self.step,
            "samples": self.loaders.train.position,
            "skipped_steps": self.observers.meter.skipped_steps(),
        }
        self.checkpoints.save(progress, self._evaluation if self._evaluated_step == self.step else None)
        self._save_soon = False
        self.observers.meter.restart_clock(self.loaders.train)

    def _wait_for_disk(self) -> None:
        self.watchdog.at("waiting for the disk", self.step)
        self.checkpoints.wait()

    def _publish(self, metrics: dict[str, float], in_files: bool = True) -> None:
        self.metrics |= metrics
        if in_files:
            self.observers.loggers.log(self.step, metrics)
        short = {name: value for name, value in metrics.items() if name not in FOR_FILES_ALONE}
        self.observers.console.metrics(self.step, short)

    def finish(self, body: Body) -> Outcome:
        """Evaluates and saves the last step, and returns how the run ended."""
        if not self.stopped_by and self.step not in (self.first_step, self._evaluated_step):
            self.evaluate(body)
        self._wait_for_disk()
        manager = self.checkpoints.manager
        if manager.saved_step != self.step or self._save_soon:  # it may be saved without its value when data ends
            self.save()
        self._wait_for_disk()
        if manager.saved_step != self.step:
            raise UserError(
                f"step {self.step} could not be saved in {self.output_dir}; make room there and run it again"
            )
        best = self._find_best() if self.config.checkpoint.keep_best else None
        self.watchdog.at("leaving", self.step)
        return Outcome(
            self.output_dir,
            self.first_step,
            self.step,
            self.total_steps,
            self.metrics,
            body.preview,
            self.stopped_by,
            self.session.model,
            best,
            manager.path_of(self.step) if self.step else None,
            None if best is None else manager.path_of(best),
        )

    def _find_best(self) -> int | None:
        """Says which step was best, and loads it if asked to."""
        config = self.config.checkpoint
        loads = config.load_best_model_at_end and not self.stopped_by
        if (best := self.checkpoints.find_best(loads, self.step)) is None:
            return None
        step, value = best
        path, loaded = self.checkpoints.manager.path_of(step), "; its weights are in the model" if loads else ""
        self.observers.console.line(f"best: step {step}, {config.metric} {value:.6g}, {path}{loaded}")
        return step


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Python's garbage collector pauses a step whenever it likes; the loop calls it instead."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
