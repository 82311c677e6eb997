"""The training loop."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.checkpoint.manifest import tied_and_buffers
from shoal.config import Run
from shoal.errors import UserError
from shoal.observe.memory import memory_gib
from shoal.processes.desync import check_replicas, check_samples
from shoal.processes.watchdog import Watchdog
from shoal.seeding import mix
from shoal.strategies import DistributedStrategy, from_config
from shoal.training.built import EVALUATED, Built
from shoal.training.diagnose import first_bad_module
from shoal.training.meter import flops_per_sample
from shoal.training.optimizers import set_learning_rate
from shoal.training.report import Report
from shoal.training.resume import check_start, check_world, load_best, open_run_folder
from shoal.training.signals import StopFlag
from shoal.types import MicroBatch

FOR_FILES_ALONE = {"train/epoch", "train/data_seconds", "train/memory_gib", "train/skipped_steps"}
"""Metrics that would only make the console's line longer."""


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


def train(run: Run) -> Outcome:
    """Trains a run to its end, going on from its last good checkpoint."""
    strategy = from_config(run.config)
    check_world(run, strategy.world)
    check_start(run, strategy.world_size)
    with StopFlag() as stop, ExitStack() as folder:
        with stop.at_once():
            lease = folder.enter_context(open_run_folder(run, strategy))
            recipe = run.recipe_type(run.recipe_config)
            strategy.world.once_per_node(recipe.prepare_data)
        with open_watchdog(run, strategy) as watchdog, strategy, ExitStack() as resources:
            return Trainer(run, strategy, recipe, stop, resources, watchdog, lease).fit()


def open_watchdog(run: Run, strategy: DistributedStrategy) -> Watchdog:
    distributed = run.config.distributed
    log = Path(run.config.output_dir) / "logs" / f"rank_{strategy.rank}.log" if strategy.world_size > 1 else None
    return Watchdog(strategy.world, distributed.timeout, distributed.init_timeout, log)


class Trainer(Built):
    """The loop over what was built for a run."""

    save_soon: bool = False
    """The evaluation was among the best, or the last save is too many minutes ago."""
    evaluated_step: int | None = None
    evaluation: dict[str, float]
    """What `evaluated_step` was worth."""
    flops_per_sample: float | None = None
    preview: str | None = None
    stopped_by: int = 0

    def fit(self) -> Outcome:
        training, saving, every = self.config.training, self.config.checkpoint, self.config.logging.every
        if self.owes_evaluation():
            self.evaluate()
        self.watchdog.at("waiting for data", self.step + 1)
        with collector_paused():
            for micro_batches in islice(self.loader, max(0, self.total_steps - self.step)):
                if self.step == self.first_step:
                    self.take_first_step(micro_batches)
                else:
                    self.take_step(micro_batches)
                if self.due(every) or self.step in (self.first_step + 1, self.total_steps):
                    self.log(micro_batches)
                if self.due(training.eval_steps):
                    self.evaluate()
                if (self.save_soon or self.due(saving.every, saving.keep_every)) and self.step != self.total_steps:
                    self.save()  # the last step is saved by `finish`, when it is evaluated too
                if self.due(self.config.distributed.desync_steps):
                    self.check_sync(micro_batches)
                if self.due(training.gc_steps):
                    gc.collect(1)
                if self.stopping():
                    break
                self.watchdog.at("waiting for data", self.step + 1)
        outcome = self.finish()
        self.watchdog.at("leaving", self.step)
        return outcome

    def take_step(self, micro_batches: Sequence[MicroBatch]) -> None:
        self.watchdog.at("forward, backward and update", self.step + 1)
        self.profiler.step(self.step + 1)
        set_learning_rate(self.optimizer, self.schedule(self.step))
        output = self.strategy.forward_backward(self.model, micro_batches, self.recipe, self.step)
        info = self.strategy.step(self.optimizer, self.config.training.max_grad_norm)
        self.step += 1
        self.meter.add(output, info)
        self.console.advance(self.step)

    def take_first_step(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Takes a step and shows that what was asked for is in force."""
        self.flops_per_sample = flops_per_sample(self.strategy, self.shapes, micro_batches[0], self.recipe)
        self.shapes = None
        report = Report(self)
        with report.watch():
            self.take_step(micro_batches)
        report.check()
        if self.strategy.is_main_process:
            (self.output_dir / "report.txt").write_text(f"{report}\n")
        self.console.line(str(report))
        self.watchdog.started = True

    def stopping(self) -> bool:
        """Whether any rank was asked to stop, which all of them then do after the same step.

        The flag is this rank's own, set at any moment, and so is its clock. One number tells both: who stops saves too.
        """
        self.watchdog.at("agreeing whether to stop", self.step)
        minutes = self.config.checkpoint.every_minutes
        late = minutes is not None and time.monotonic() > self.saved_at + 60 * minutes
        agreed = self.strategy.highest(2 * self.stop.signal + late)
        self.stopped_by = agreed // 2
        self.save_soon |= agreed % 2 == 1
        return self.stopped_by > 0

    def check_sync(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Stops the run if ranks that should be replicas drifted apart, or took each other's samples."""
        self.watchdog.at("comparing replicas", self.step)
        if group := self.strategy.replicas():
            check_replicas(dict(self.model.named_parameters()), group)
        self.strategy.check_sync()
        if self.strategy.data_size > 1:
            check_samples(micro_batches if self.strategy.leads else (), self.loader.last_step())

    def log(self, micro_batches: Sequence[MicroBatch]) -> None:
        """The one place where a step waits for the device."""
        self.watchdog.at("reading metrics", self.step)
        metrics = self.meter.read(self.loader, self.flops_per_sample)
        metrics["train/learning_rate"] = self.optimizer.param_groups[0]["lr"]
        metrics["train/memory_gib"] = memory_gib(self.strategy.device)
        if self.epoch_size:
            metrics["train/epoch"] = self.loader.position / self.epoch_size
        # Files have the lines of a run that was never interrupted; people also want to see that it goes on.
        in_files = self.due(self.config.logging.every) or self.step in (1, self.total_steps)
        self._publish(metrics, in_files)
        if self.meter.skipped_in_a_row >= self.config.training.max_skipped_steps:
            culprit = first_bad_module(self.strategy, self.model, micro_batches[0], self.recipe)
            self.settle()
            last = self.manager.saved_step
            saved = f"the last checkpoint is of step {last}" if last else "nothing is saved"
            raise UserError(
                f"the last {self.meter.skipped_in_a_row} updates were skipped because their gradient was not finite "
                f"(training.max_skipped_steps = {self.config.training.max_skipped_steps}); the first bad value is "
                f"{culprit}; {saved}"
            )

    def evaluate(self) -> None:
        if self.eval_loader is None:
            return
        self.watchdog.at("evaluation", self.step)
        self.model.eval()
        self.strategy.sync_buffers(self.model)  # or every rank would evaluate another model
        total = count = torch.zeros((), device=self.strategy.device)
        for micro_batches in self.eval_loader:
            output = self.strategy.evaluate(self.model, micro_batches, self.recipe)
            total, count = total + output.total, count + output.count
            if self.stopping():
                break
            self.watchdog.at("evaluation", self.step)
        else:
            self.evaluation = dict(zip(EVALUATED, ((total / count).item(),), strict=True))
            self._publish(self.evaluation)
            torch.manual_seed(mix(self.config.experiment.seed, "preview", self.step))
            # Eagerly: generating goes through many shapes once each, and compiling for them costs more.
            eagerly = torch.compiler.set_stance("force_eager")
            with torch.no_grad(), self.strategy.autocast(), eagerly, self.strategy.device:
                self.preview = self.strategy.preview(self.model, self.recipe)
            if self.preview is not None:
                self.loggers.text(self.step, "preview", self.preview)
            self.evaluated_step = self.step
            self.save_soon |= self.manager.gets_into_best(self.step, self.evaluation)
        self.model.train()
        self.meter.restart_clock(self.loader)

    def save(self) -> None:
        """In the background it returns when the state is copied aside; `settle` hears how it went."""
        self.settle()
        self.watchdog.at("saving", self.step)
        progress: dict[str, Any] = {"step": self.step, "samples": self.loader.position}
        progress["skipped_steps"] = self.meter.skipped_steps()
        if self.evaluated_step == self.step:
            progress["metrics"] = {name: value for name, value in self.evaluation.items() if isfinite(value)}
        batches = [[phase.first_epoch, phase.global_batch_size] for phase in self.batches.phases]
        layout, config = self.strategy.layout(), self.run.tree()
        about = {"layout": layout, "batches": batches, "config": config, **tied_and_buffers(self.model)}
        state, base = self.base.leave_out(self.strategy.state(self.model, self.optimizer))
        try:
            self.manager.save(state, progress, about | base)
        except OSError as error:
            self._warn_of_save(error)
        self.saved_at, self.save_soon = time.monotonic(), False
        self.meter.restart_clock(self.loader)

    def settle(self) -> None:
        """Waits until nothing is being written."""
        self.watchdog.at("waiting for the disk", self.step)
        try:
            self.manager.wait()
        except OSError as error:
            self._warn_of_save(error)

    def _warn_of_save(self, error: OSError) -> None:
        failed, good = self.manager.saving_step, self.manager.saved_step
        self.console.line(f"warning: step {failed} could not be saved: {error}; the last checkpoint is {good}")

    def finish(self) -> Outcome:
        if not self.stopped_by and self.step not in (self.first_step, self.evaluated_step):
            self.evaluate()
        self.settle()
        if self.manager.saved_step != self.step or self.save_soon:  # one may be saved without its value when data ends
            self.save()
        self.settle()
        if self.manager.saved_step != self.step:
            raise UserError(
                f"step {self.step} could not be saved in {self.output_dir}; make room there and run it again"
            )
        return Outcome(
            self.output_dir,
            self.first_step,
            self.step,
            self.total_steps,
            self.metrics,
            self.preview,
            self.stopped_by,
            self.model,
            self.find_best() if self.config.checkpoint.keep_best else None,
        )

    def find_best(self) -> int | None:
        """Says which step was best, and loads it if asked to."""
        config = self.config.checkpoint
        best = next(iter(self.manager.best()), None)
        loading = config.load_best_model_at_end and not self.stopped_by
        if loading and best and best[0] != self.step:
            warn = lambda warning: self.console.line(f"warning: {warning}")  # noqa: E731
            best = load_best(self.manager, self.strategy, self.model, self.optimizer, self.base, warn)
        if best is None:
            return None
        step, value = best
        loaded = "; its weights are in the model" if loading else ""
        self.console.line(f"best: step {step}, {config.metric} {value:.6g}, {self.manager.path_of(step)}{loaded}")
        return step

    def _publish(self, metrics: dict[str, float], in_files: bool = True) -> None:
        self.metrics |= metrics
        if in_files:
            self.loggers.log(self.step, metrics)
        self.console.metrics(self.step, {name: metrics[name] for name in metrics if name not in FOR_FILES_ALONE})


@contextmanager
def collector_paused() -> Iterator[None]:
    """Python's garbage collector pauses a step whenever it likes; the loop calls it instead."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
