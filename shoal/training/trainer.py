"""The training loop."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.checkpoint import CheckpointManager
from shoal.config import Run
from shoal.config.schema import ConsoleMode, ProfileConfig
from shoal.data import BatchSchedule, Loader
from shoal.errors import UserError
from shoal.observe.console import Console
from shoal.observe.flops import copy_on_meta
from shoal.observe.loggers import Loggers, open_loggers
from shoal.observe.memory import memory_gib
from shoal.observe.profile import Profiler
from shoal.parallel.desync import check_replicas, check_samples
from shoal.parallel.weights import build
from shoal.seeding import mix
from shoal.strategies import DistributedStrategy, from_config
from shoal.training.diagnose import first_bad_module
from shoal.training.meter import Meter, flops_per_sample
from shoal.training.optimizer import build_optimizer, set_learning_rate
from shoal.training.report import Report
from shoal.training.schedule import Schedule, build_schedule
from shoal.training.start import Progress, check_world, open_run_folder, restore
from shoal.training.stop import StopFlag
from shoal.types import MicroBatch, Weights

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


def train(run: Run) -> Outcome:
    """Trains a run to its end, going on from its last good checkpoint."""
    strategy = from_config(run.config)
    check_world(run, strategy.world)
    open_run_folder(run, strategy)
    recipe = run.recipe_type(run.recipe_config)
    strategy.world.once_per_node(recipe.prepare_data)
    with strategy, StopFlag() as stop, ExitStack() as resources:
        return Trainer(run, strategy, recipe, stop, resources).fit()


class Trainer:
    """One run: what was built for it, and the loop over it."""

    epoch_size: int | None
    shapes: nn.Module | None
    """The model without memory, to count its FLOPs on."""
    model: nn.Module
    optimizer: Optimizer
    weights: Weights
    progress: Progress
    batches: BatchSchedule
    loader: Loader
    eval_loader: Loader | None = None
    schedule: Schedule
    meter: Meter
    profiler: Profiler
    loggers: Loggers
    console: Console

    step: int
    first_step: int
    total_steps: int
    saved_step: int
    evaluated_step: int | None = None
    flops_per_sample: float | None = None
    preview: str | None = None
    stopped_by: int = 0

    def __init__(self, run: Run, strategy: DistributedStrategy, recipe: Any, stop: StopFlag, resources: ExitStack):
        self.run, self.config, self.strategy, self.recipe, self.stop = run, run.config, strategy, recipe, stop
        self.output_dir = Path(self.config.output_dir)
        self._open_data()
        self._build_model()
        self._restore()
        self._open_loaders(resources)
        self._open_observers(resources)

    def fit(self) -> Outcome:
        training, every = self.config.training, self.config.logging.every
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
                if self.due(self.config.checkpoint.every):
                    self.save()
                if self.due(self.config.distributed.desync_steps):
                    self.check_sync(micro_batches)
                if self.due(training.gc_steps):
                    gc.collect(1)
                if self.stopping():
                    break
        return self.finish()

    def take_step(self, micro_batches: Sequence[MicroBatch]) -> None:
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

    def stopping(self) -> bool:
        """Whether any rank was asked to stop, which all of them then do after the same step."""
        self.stopped_by = self.strategy.highest(self.stop.signal)  # the flag is this rank's own, set at any moment
        return self.stopped_by > 0

    def check_sync(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Stops the run if ranks that should be replicas drifted apart, or took each other's samples."""
        if group := self.strategy.replicas():
            check_replicas(dict(self.model.named_parameters()), group)
        if self.strategy.data_size > 1:
            check_samples(micro_batches, self.loader.last_step())

    def due(self, every: int | None) -> bool:
        return every is not None and self.step % every == 0

    def log(self, micro_batches: Sequence[MicroBatch]) -> None:
        """The one place where a step waits for the device."""
        metrics = self.meter.read(self.loader, self.flops_per_sample)
        metrics["train/learning_rate"] = self.optimizer.param_groups[0]["lr"]
        metrics["train/memory_gib"] = memory_gib(self.strategy.device)
        if self.epoch_size:
            metrics["train/epoch"] = self.loader.position / self.epoch_size
        self._publish(metrics)
        if self.meter.skipped_in_a_row >= self.config.training.max_skipped_steps:
            culprit = first_bad_module(self.strategy, self.model, micro_batches[0], self.recipe)
            saved = f"the last checkpoint is of step {self.saved_step}" if self.saved_step else "nothing is saved"
            raise UserError(
                f"the last {self.meter.skipped_in_a_row} updates were skipped because their gradient was not finite "
                f"(training.max_skipped_steps = {self.config.training.max_skipped_steps}); the first bad value is "
                f"{culprit}; {saved}"
            )

    def evaluate(self) -> None:
        if self.eval_loader is None:
            return
        self.model.eval()
        total = count = torch.zeros((), device=self.strategy.device)
        for micro_batches in self.eval_loader:
            output = self.strategy.evaluate(self.model, micro_batches, self.recipe)
            total, count = total + output.total, count + output.count
            if self.stopping():
                break
        else:
            self._publish({"eval/loss": (total / count).item()})
            torch.manual_seed(mix(self.config.experiment.seed, "preview", self.step))
            # Eagerly: generating goes through many shapes once each, and compiling for them costs more.
            with torch.no_grad(), self.strategy.autocast(), torch.compiler.set_stance("force_eager"):
                self.preview = self.recipe.preview(self.model)
            if self.preview is not None:
                self.loggers.text(self.step, "preview", self.preview)
            self.evaluated_step = self.step
        self.model.train()
        self.meter.restart_clock(self.loader)

    def save(self) -> None:
        layout = {
            "strategy": self.strategy.name,
            "world_size": self.strategy.world_size,
            "data_size": self.strategy.data_size,
        }
        progress = {"step": self.step, "samples": self.loader.position, "skipped_steps": self.meter.skipped_steps()}
        batches = [[phase.first_epoch, phase.global_batch_size] for phase in self.batches.phases]
        about = {"layout": layout, "batches": batches, "config": self.run.tree()}
        try:
            self.manager.save(self.strategy.state(self.model, self.optimizer), progress, about)
            self.saved_step = self.step
        except OSError as error:
            self.console.line(
                f"warning: step {self.step} could not be saved: {error}; the last checkpoint is {self.saved_step}"
            )
        self.meter.restart_clock(self.loader)

    def finish(self) -> Outcome:
        if not self.stopped_by and self.step not in (self.first_step, self.evaluated_step):
            self.evaluate()
        if self.saved_step != self.step:
            self.save()
        if self.saved_step != self.step:
            raise UserError(
                f"step {self.step} could not be saved in {self.output_dir}; make room there and run it again"
            )
        return Outcome(
            self.output_dir, self.first_step, self.step, self.total_steps, self.metrics, self.preview, self.stopped_by
        )

    def _publish(self, metrics: dict[str, float]) -> None:
        self.metrics |= metrics
        self.loggers.log(self.step, metrics)
        self.console.metrics(self.step, {name: metrics[name] for name in metrics if name not in FOR_FILES_ALONE})

    def _open_data(self) -> None:
        training = self.config.training
        self.train_data, self.eval_data = self.recipe.train_data(), self.recipe.eval_data()
        self.epoch_size = len(self.train_data) if hasattr(self.train_data, "__len__") else None
        if training.num_epochs and self.epoch_size is None:
            raise UserError(
                "training.num_epochs needs data with a length, but the recipe gives a stream; use max_steps"
            )
        if training.eval_steps and self.eval_data is None:
            raise UserError(f"training.eval_steps = {training.eval_steps}, but the recipe has no evaluation data")

    def _build_model(self) -> None:
        model, self.weights = build(self.recipe.build_model, self.recipe.weights(), self.config.experiment.seed)
        self.shapes = copy_on_meta(model)
        self.model, self.optimizer = self.strategy.prepare(
            model,
            lambda model: build_optimizer(self.config.training, self.recipe.param_groups(model)),
            self.recipe.parallel_plan(model),
            self.weights,
        )

    def _restore(self) -> None:
        self.warnings: list[str] = []
        keep, is_main = self.config.checkpoint.keep_last, self.strategy.is_main_process
        self.manager = CheckpointManager(self.output_dir, keep, is_main)
        warn = self.warnings.append
        self.progress = restore(self.run, self.manager, self.strategy, self.model, self.optimizer, warn)
        self.batches = self.progress.batches
        self.step = self.first_step = self.saved_step = self.progress.step

    def _open_loaders(self, resources: ExitStack) -> None:
        training, samples = self.config.training, self.progress.samples
        end = None
        if training.num_epochs and self.epoch_size:
            end = training.num_epochs * self.epoch_size
            self.total_steps = self.step + self.batches.steps_between(samples, end, self.epoch_size)
        else:
            assert training.max_steps
            self.total_steps = training.max_steps
        self.schedule = build_schedule(training, self.total_steps)
        options = self.config.dataset.model_dump() | {
            "seed": self.config.experiment.seed,
            "data_rank": self.strategy.data_rank,
            "data_size": self.strategy.data_size,
        }
        if options["pin_memory"] is None:
            options["pin_memory"] = self.strategy.device.type == "cuda"
        elif options["pin_memory"] and self.strategy.device.type == "cpu":
            raise UserError("dataset.pin_memory = true needs a GPU to copy to, but the run is on the CPU; leave it out")
        self.loader = Loader(self.train_data, self.recipe.collate, self.batches, position=samples, end=end, **options)
        resources.enter_context(closing(self.loader))
        if self.eval_data is not None:
            batch_size = self.batches.phases[0].batch_size
            whole = batch_size * self.strategy.data_size
            limit = len(self.eval_data) if hasattr(self.eval_data, "__len__") else None
            if training.eval_batches:
                limit = min(limit or training.eval_batches * whole, training.eval_batches * whole)
            batches = BatchSchedule.constant(whole, batch_size)
            self.eval_loader = Loader(self.eval_data, self.recipe.collate, batches, end=limit, shuffle=False, **options)
            resources.enter_context(closing(self.eval_loader))

    def _open_observers(self, resources: ExitStack) -> None:
        config = self.config
        self.metrics: dict[str, float] = {}
        device, skipped_steps = self.strategy.device, self.progress.skipped_steps
        self.meter = Meter(device, self.recipe.unit, config.training, self.loader, skipped_steps)
        profile: ProfileConfig | None = None
        mode: ConsoleMode = "off"
        loggers = Loggers()
        if self.strategy.is_main_process:  # the others stay silent
            profile, mode = config.logging.profile, config.logging.console
            name, settings = config.experiment.name, self.run.tree()
            loggers = open_loggers(config.logging, self.output_dir, name, settings, self.step)
        self.loggers = resources.enter_context(closing(loggers))
        self.profiler = resources.enter_context(closing(Profiler(profile, self.output_dir)))
        log: TextIO | None = None
        if self.strategy.is_main_process and self.strategy.world_size > 1:  # the others write theirs whole
            log = resources.enter_context((self.output_dir / "logs" / "rank_0.log").open("a"))
        self.console = resources.enter_context(Console(mode, self.step, self.total_steps, copy=log))
        for warning in self.warnings:
            self.console.line(f"warning: {warning}")


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
