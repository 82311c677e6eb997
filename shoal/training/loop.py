"""The cadence around training steps: when to log, evaluate, save, compare replicas, and stop.

What a step computes is its body's business: a recipe's (`trainer.py`), or a user's own.
"""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from shoal.config import Run
from shoal.errors import UserError, one_line
from shoal.observe.memory import memory_gib
from shoal.processes.desync import check_samples
from shoal.processes.group import start_max
from shoal.processes.watchdog import Watchdog
from shoal.training.checkpoints import Checkpoints
from shoal.training.hooks import Hooks
from shoal.training.loaders import Loaders
from shoal.training.observers import FOR_FILES_ALONE, VARYING_METRICS, Observers
from shoal.training.session import Session
from shoal.training.signals import StopFlag
from shoal.training.stragglers import MEASURED_STEPS
from shoal.types import MicroBatch, StepInfo, StepOutput

_REQUEST = 1 << 40
"""Added to what ranks agree on after a step if hooks have asked for something; above the number of any signal."""
_NEVER = sys.maxsize
"""The interval, in steps, of what is not asked for."""


@dataclass(frozen=True)
class GoBack:
    """A run has to go on from its last checkpoint, without the samples since it."""

    skip_to: int
    """The position of the first sample to go on with."""


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
    stop_reason: str | None = None
    """Why a hook has ended the run, if one has."""
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

    def log(self, in_files: bool) -> dict[str, float]:
        """Returns what a line of the log shows besides the meter's numbers; `in_files` if not on the console alone."""


class Shell:
    """Runs the steps of a session from where it stands to the end of the run."""

    observers: Observers
    warn: Callable[[str], None]
    taken: tuple[StepOutput, StepInfo]
    """The results of the last step."""
    goes_back: GoBack | None = None
    """Set when the steps end because the run has to go on from its last checkpoint."""

    def __init__(
        self,
        run: Run,
        session: Session,
        checkpoints: Checkpoints,
        loaders: Loaders,
        stop: StopFlag,
        watchdog: Watchdog,
        hooks: Hooks,
    ):
        self.hooks = hooks
        self.run, self.config, self.session, self.strategy = run, run.config, session, session.strategy
        self.checkpoints, self.loaders = checkpoints, loaders
        self.stop, self.watchdog = stop, watchdog
        self.output_dir = Path(run.config.output_dir)
        self.step = self.first_step = checkpoints.progress.step
        self.total_steps = loaders.total_steps
        self.stopped_by = 0
        self._samples = checkpoints.progress.samples
        """The samples of the steps that are finished; the loader has given out those of the next one."""
        self._step_start = checkpoints.progress.step_start
        """The position of the first sample of the last step."""
        self.metrics: dict[str, float] = hooks.run.metrics
        self._save_soon = False
        """True if the next step should be saved: the evaluation was among the best, or the last save is long ago."""
        self._evaluated_step: int | None = None
        self._evaluation: dict[str, float] = {}
        """The metrics of `_evaluated_step`."""

    def fit(self, body: Body) -> Outcome | GoBack:
        """Takes all steps that are left, and returns how the run ended or where it has to go on."""
        self.start(body)
        with self.stopping_at_interrupt(), closing(self.steps(body)) as steps:
            for micro_batches in steps:
                self.taken = body.take_step(micro_batches, self.step)
        return self.goes_back or self.finish(body)

    def start(self, body: Body) -> None:
        """Does what comes before the first step."""
        self._start_hooks()
        if self.owes_evaluation():
            stop_reason = self.hooks.run.stop_reason
            self.evaluate(body)
            self.agree_to_stop()  # what hooks ask for is in force from the next step on, as if nothing had happened
            self._keep_stop(stop_reason)
            if self._evaluated_step == self.step:
                self.save()

    def steps(self, body: Body) -> Generator[Sequence[MicroBatch], None, None]:
        """Yields the micro-batches of each step, and does what is due after it.

        Whoever iterates computes the step, and puts its results into `taken`.
        """
        training, saving = self.config.training, self.config.checkpoint
        eval_epochs, save_epochs = training.eval_epochs, saving.every_epochs
        log_every, eval_every, save_every, keep_every, compare_every, collect_every = (
            interval or _NEVER  # not a method that is asked six times a step
            for interval in (
                self.config.logging.every,
                training.eval_steps,
                saving.every,
                saving.keep_every,
                self.config.distributed.desync_steps,
                training.gc_steps,
            )
        )
        watchdog, loader, advance = self.watchdog, self.loaders.train, self.observers.console.advance
        measure_next = self.observers.meter.measure_next
        hooks, handle, before_step = self.hooks, self.hooks.run, bool(self.hooks.calls["before_step"])
        asks = before_step or hooks.calls["before_update"] or hooks.calls["after_step"]
        agrees_ahead = self.strategy.world_size > 1 and not asks
        watchdog.at("waiting for data", self.step + 1)
        with _collector_paused():
            for micro_batches in islice(loader, self._steps_left()):
                watchdog.at("forward, backward and update", self.step + 1)
                self.observers.profiler.step(self.step + 1)
                measure_next(self.step % log_every >= log_every - MEASURED_STEPS)
                if before_step:
                    hooks.call("before_step")
                agreeing = self._start_agreeing() if agrees_ahead else None
                yield micro_batches
                self.count_step()
                advance(self.step)
                watchdog.started = True
                if self.step % log_every == 0 or self.step in (self.first_step + 1, self.total_steps):
                    self.log(body, micro_batches)
                    agreeing = None if hooks.has_any else agreeing
                    if self.step == self.first_step + 1 and self.checkpoints.manager.background:
                        self.checkpoints.reserve(hooks.state())
                    if handle.requested_return is not None:
                        self.goes_back = self._go_back(handle.requested_return)
                        return
                if self.step % eval_every == 0 or (eval_epochs and self.ends_epoch(eval_epochs)):
                    self.evaluate(body)
                    agreeing = None if hooks.has_any else agreeing
                ends = self.agree_to_stop(agreeing) or handle.stop_reason is not None or self.step == self.total_steps
                is_due = self._save_soon or self.step % save_every == 0 or self.step % keep_every == 0
                is_due = is_due or bool(save_epochs and self.ends_epoch(save_epochs))
                if is_due and not ends:
                    self.save()  # the last step is saved by `finish`, when it is evaluated too
                if self.step % compare_every == 0:
                    self.check_sync(micro_batches)
                if self.step % collect_every == 0:
                    gc.collect(1)
                if self.stopped_by or handle.stop_reason is not None:  # also what a hook asks for before a save
                    break
                watchdog.at("waiting for data", self.step + 1)

    def count_step(self) -> None:
        """Counts the step whose results are in `taken`."""
        output, info = self.taken
        handle, self.hooks.has_ended = self.hooks.run, False
        self.step, self._step_start, self._samples = self.step + 1, self._samples, self.loaders.train.position
        self.observers.meter.add(output, info)
        handle.step, handle.output, handle.info = self.step, output, info
        if self.hooks.calls["after_step"]:
            self.hooks.call("after_step")

    @contextmanager
    def stopping_at_interrupt(self) -> Iterator[None]:
        """Ends the run as Ctrl-C does if a recipe raises KeyboardInterrupt; the step under way is not counted.

        Of several ranks the others are in the middle of the step and would wait for this one, so the run fails.
        """
        try:
            yield
        except KeyboardInterrupt as interrupt:
            if self.stop.signal:  # a second Ctrl-C: it may have come in the middle of an update
                raise
            if self.strategy.world_size == 1:
                self.stopped_by = signal.SIGINT
                return
            last = self.checkpoints.manager.saved_step
            raise UserError(
                f"KeyboardInterrupt in step {self.step + 1}: of {self.strategy.world_size} processes the others wait "
                "for the one that raised it, so that nothing can be saved; call run.stop(reason) in a hook, or send "
                "SIGINT, which all of them obey; "
                + (f"the last checkpoint is of step {last}" if last else "there is no checkpoint")
            ) from interrupt

    def _go_back(self, reason: str) -> GoBack:
        self._wait_for_disk()
        last, position = self.checkpoints.manager.saved_step or 0, self.loaders.train.position
        self.checkpoints.warn(
            f"{one_line(reason)}: the run goes back from step {self.step} to step {last}, and leaves out the samples "
            f"that it has seen since, up to position {position}"
        )
        return GoBack(position)

    def _start_hooks(self) -> None:
        if self.hooks.calls["on_start"]:
            self.hooks.call("on_start")
            self.agree_to_stop()

    def _steps_left(self) -> int:
        """Returns how many steps this process has to take.

        A run that a hook has ended takes no more, nor one whose evaluation before the first step was cut short: it owes
        that evaluation to the checkpoint that it went on from.
        """
        is_stopped = self.hooks.run.stop_reason is not None or (self.stopped_by and self.step > 0)
        return 0 if is_stopped else max(0, self.total_steps - self.step)

    def owes_evaluation(self) -> bool:
        """Returns whether the checkpoint that this run resumed from was due for an evaluation that never ran."""
        has_ended = self.step >= self.total_steps or self.hooks.run.stop_reason is not None
        due = self.evaluation_is_due() or has_ended
        return due and 0 < self.step == self.first_step and not self.checkpoints.progress.evaluated

    def evaluation_is_due(self) -> bool:
        """Returns whether the last step is one to evaluate after. The end of a run is evaluated besides."""
        training = self.config.training
        return self.step % (training.eval_steps or _NEVER) == 0 or self.ends_epoch(training.eval_epochs)

    def _keep_stop(self, reason: str | None) -> None:
        """Takes back that a hook asked to stop, if it did so in an evaluation that is due only because the run ends: a
        run with more steps has none there."""
        if self.step >= self.total_steps and not self.evaluation_is_due():
            self.hooks.run.stop_reason = reason

    def ends_epoch(self, every: int | None) -> bool:
        """Returns whether one of every `every` epochs has ended in the last step; with None, no epoch counts."""
        if every is None or self.loaders.epoch_size is None:
            return False
        size = every * self.loaders.epoch_size
        return self._samples // size > self._step_start // size

    def agree_to_stop(self, agreeing: Callable[[], int] | None = None) -> bool:
        """Returns whether any rank was asked to stop, which all of them then do after the same step.

        `agreeing` is what `_start_agreeing` has returned before the step, so that the exchange took place during it.
        Without it ranks exchange what they have to say now, and wait for each other.
        """
        self.watchdog.at("agreeing whether to stop", self.step)
        agreed = self.strategy.max_over_ranks(self._to_agree_on()) if agreeing is None else agreeing()
        if agreed >= _REQUEST:  # all that the ranks have to say, because the sum is that of one of them
            stopped_by, late = self.hooks.agree((self.stop.signal, int(self.checkpoints.is_late())))
        else:
            stopped_by, late = divmod(agreed, 2)
        # A signal that has cut an evaluation short stays in force: an exchange that began before it does not know it.
        self.stopped_by = self.stopped_by or stopped_by
        self._save_soon |= late == 1
        return self.stopped_by > 0

    def _start_agreeing(self) -> Callable[[], int]:
        """Sends what this rank has to say while the step computes. A signal during the step is told with the next."""
        return start_max(self._to_agree_on())

    def _to_agree_on(self) -> int:
        """Returns 2 × signal + (a save is due), so that one exchange decides both; a run that stops always saves.

        Ranks get signals at different moments, and their clocks differ.
        """
        own = 2 * self.stop.signal + self.checkpoints.is_late()
        return _REQUEST + own if self.hooks.run.has_request else own

    def check_sync(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Stops the run if ranks that should be replicas drifted apart, or took each other's samples."""
        self.watchdog.at("comparing replicas", self.step)
        self.strategy.check_sync(dict(self.session.model.named_parameters()))
        if self.strategy.data_size > 1:
            check_samples(micro_batches if self.strategy.is_data_leader else (), self.loaders.train.last_step())

    def log(self, body: Body, micro_batches: Sequence[MicroBatch]) -> None:
        """Reads the numbers of the last steps from the device, for which the host waits."""
        self.watchdog.at("reading metrics", self.step)
        # Files have the lines of a run that was never interrupted; people also want to see that it goes on.
        in_files = self.step % self.config.logging.every == 0 or self.step in (1, self.total_steps)
        metrics = {**self.observers.meter.read(self.loaders.train, restart=in_files), **body.log(in_files)}
        metrics["train/memory_gib"] = memory_gib(self.strategy.device)
        if self.loaders.epoch_size:
            metrics["train/epoch"] = self.loaders.train.position / self.loaders.epoch_size
        if self.hooks.run.logged:
            metrics |= self.hooks.take_logged(metrics, keep=not in_files)
        self._publish(metrics, in_files)
        if (straggler := self.observers.meter.straggler) is not None:
            self.warn(straggler)
        if (compiled := self.strategy.engaged.compiled) and (eager := compiled.find_eager_calls()):
            self.warn(f"step {self.step}: {eager}")
        if in_files and self.hooks.calls["after_log"]:
            self._call_after_log(metrics)
        if self.hooks.run.histograms:
            for name, histogram in self.hooks.take_histograms().items():
                self.observers.loggers.histogram(self.step, name, histogram)
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

    def _call_after_log(self, metrics: dict[str, float]) -> None:
        """Calls the hook, and refuses ranks that do not agree whether to go back."""
        handle = self.hooks.run
        handle.may_go_back = True
        self.hooks.call("after_log", dict(metrics))
        handle.may_go_back = False
        goes = int(handle.requested_return is not None)
        if self.strategy.max_over_ranks(goes) != -self.strategy.max_over_ranks(-goes):
            raise UserError(
                "go_back: some ranks called it and others did not; decide by what is equal on all ranks, such as the "
                "metrics that after_log gets"
            )

    def evaluate(self, body: Body) -> None:
        if not self.loaders.evaluation:
            return
        self.watchdog.at("evaluation", self.step)
        with self.hooks.evaluating():
            evaluation = body.evaluate(self)
        if evaluation is not None:
            self._publish(evaluation)
            if body.preview is not None:
                self.observers.loggers.text(self.step, "preview", body.preview)
                if self.session.recipe.preview_on_console and self.step < self.total_steps:  # the last one ends the run
                    self.observers.console.line(body.preview)
            self._evaluation, self._evaluated_step = evaluation, self.step
            self._save_soon |= self.checkpoints.manager.would_be_among_best(self.step, evaluation)
            self.hooks.call("after_evaluation", dict(evaluation))
        self.observers.meter.restart_clock(self.loaders.train)

    def save(self) -> None:
        """Saves the state; in the background it returns when the state is copied aside."""
        self._wait_for_disk()
        self.watchdog.at("saving", self.step)
        if self.hooks.calls["before_save"]:
            self.hooks.call("before_save")
            if self.strategy.any_rank(self.hooks.run.has_request):
                self.hooks.agree((0, 0))  # or the checkpoint would not have what they ask for
        progress: dict[str, Any] = {
            "step": self.step,
            "samples": self._samples,
            "step_start": self._step_start,
            "skipped_steps": self.observers.meter.skipped_steps(),
            "since_log": self.observers.meter.since_log().as_json(),
        }
        if in_a_row := self.observers.meter.skipped_in_a_row:
            progress["skipped_in_a_row"] = in_a_row
        if self.hooks.has_any:
            metrics = self.metrics.items()
            progress["last_metrics"] = {name: value for name, value in metrics if not name.endswith(VARYING_METRICS)}
        if skipped := self.checkpoints.progress.skipped_samples:
            progress["skipped_samples"] = [*map(list, skipped)]
        evaluation = self._evaluation if self._evaluated_step == self.step else None
        self.checkpoints.save(progress, evaluation, self.hooks.state(), self.hooks.evaluated_weights())
        self._save_soon = False
        self.observers.meter.restart_clock(self.loaders.train)

    def _wait_for_disk(self) -> None:
        self.watchdog.at("waiting for the disk", self.step)
        self.checkpoints.wait()

    def _publish(self, metrics: dict[str, float], in_files: bool = True) -> None:
        if in_files or not self.hooks.has_any:  # hooks see what they would if the run had never been interrupted
            self.metrics |= metrics
        if in_files:
            self.observers.loggers.log(self.step, metrics)
        short = {name: value for name, value in metrics.items() if name not in FOR_FILES_ALONE}
        if skipped := metrics.get("train/skipped_steps"):
            short["train/skipped_steps"] = skipped
        self.observers.console.metrics(self.step, short)

    def finish(self, body: Body) -> Outcome:
        """Evaluates and saves the last step, and returns how the run ended."""
        # Where a stream ends is known only when it has ended, so its last evaluation may be owed until here.
        is_owed = self.loaders.epoch_size is None and self.step > 0 and not self.checkpoints.progress.evaluated
        is_new = self.step != self.first_step or is_owed
        if not self.stopped_by and is_new and self.step != self._evaluated_step:
            stop_reason = self.hooks.run.stop_reason
            self.evaluate(body)
            if self.hooks.has_any and self.strategy.any_rank(self.hooks.run.has_request):
                self.hooks.agree((0, 0))
                self._keep_stop(stop_reason)
            self._save_soon |= self._evaluated_step == self.step  # it may be saved without its value
        self._end_hooks()
        self._wait_for_disk()
        manager = self.checkpoints.manager
        if manager.saved_step != self.step or self._save_soon:
            self.save()
        self._wait_for_disk()
        if manager.saved_step != self.step:
            raise UserError(
                f"step {self.step} could not be saved in {self.output_dir}; make room there and run it again"
            )
        best = self._find_best() if self.config.checkpoint.keep_best else None
        self.strategy.average(self.session.model)
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
            self.hooks.run.stop_reason,
            manager.path_of(self.step) if self.step else None,
            None if best is None else manager.path_of(best),
        )

    def _end_hooks(self) -> None:
        """Calls `on_end`, unless a signal came or it was called at this step before."""
        hooks = self.hooks
        if hooks.calls["on_end"] and not self.stopped_by and not hooks.has_ended:
            self.watchdog.at("ending", self.step)
            hooks.call("on_end")
            hooks.has_ended = self._save_soon = True
        if hooks.run.stop_reason is not None:
            line = f"the run ends at step {self.step} of {self.total_steps}: {one_line(hooks.run.stop_reason)}"
            self.observers.console.line(line)

    def _find_best(self) -> int | None:
        """Says which step was best, and loads it if asked to."""
        config = self.config.checkpoint
        loads, evaluated = config.load_best_model_at_end and not self.stopped_by, self.hooks.evaluated_weights()
        if (best := self.checkpoints.find_best(loads, self.step, evaluated)) is None:
            return None
        step, value = best
        path, loaded = self.checkpoints.manager.path_of(step), "; its weights are in the model" if loads else ""
        whose = f" of {evaluated}" if evaluated else ""
        self.observers.console.line(f"best: step {step}, {config.metric} {value:.6g}{whose}, {path}{loaded}")
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
