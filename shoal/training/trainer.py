"""The training loop."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.checkpoint import CheckpointManager
from shoal.checkpoint.base import Base
from shoal.checkpoint.foreign import about_names
from shoal.checkpoint.lease import Lease
from shoal.config import Run
from shoal.config.schema import ConsoleMode, ProfileConfig, TrainingConfig
from shoal.data import BatchSchedule, Loader
from shoal.errors import UserError
from shoal.observe.console import Console
from shoal.observe.flops import copy_on_meta
from shoal.observe.loggers import Loggers, open_loggers
from shoal.observe.memory import memory_gib
from shoal.observe.patient import PatientFile
from shoal.observe.profile import Profiler
from shoal.parallel.desync import check_replicas, check_samples
from shoal.parallel.watchdog import Watchdog
from shoal.parallel.weights import build
from shoal.seeding import mix
from shoal.strategies import DistributedStrategy, from_config
from shoal.training.diagnose import first_bad_module
from shoal.training.meter import Meter, flops_per_sample
from shoal.training.optimizer import build_optimizer, set_learning_rate
from shoal.training.report import Report
from shoal.training.schedule import Schedule, build_schedule, say_jump
from shoal.training.start import Progress, check_room, check_start, check_world, load_best, open_run_folder, restore
from shoal.training.stop import StopFlag, Stopped
from shoal.types import MicroBatch, Weights

FOR_FILES_ALONE = {"train/epoch", "train/data_seconds", "train/memory_gib", "train/skipped_steps"}
"""Metrics that would only make the console's line longer."""

EVALUATED = ("eval/loss",)
"""The metrics that an evaluation gives, by which a checkpoint may be the best."""


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


class Trainer:
    """One run: what was built for it, and the loop over it."""

    epoch_size: int | None
    shapes: nn.Module | None
    """The model without memory, to count its FLOPs on."""
    num_parameters: tuple[int, int]
    """Trained and frozen, of the whole model."""
    model: nn.Module
    optimizer: Optimizer
    weights: Weights
    base: Base
    progress: Progress
    checkpoint_bytes: int
    """What one takes on the disk, over all ranks."""
    refers_to: dict[str, Any]
    """What one says of frozen weights that it does not hold."""
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
    save_soon: bool = False
    """The evaluation was among the best, or the last save is too many minutes ago."""
    evaluated_step: int | None = None
    evaluation: dict[str, float]
    """What `evaluated_step` was worth."""
    flops_per_sample: float | None = None
    preview: str | None = None
    stopped_by: int = 0

    def __init__(
        self,
        run: Run,
        strategy: DistributedStrategy,
        recipe: Any,
        stop: StopFlag,
        resources: ExitStack,
        watchdog: Watchdog,
        lease: Lease,
    ):
        self.run, self.config, self.strategy, self.recipe, self.stop = run, run.config, strategy, recipe, stop
        self.watchdog, self.lease = watchdog, lease
        self.output_dir = Path(self.config.output_dir)
        watchdog.at("opening the data", 0)
        self._open_data()
        self._leave_if_told()
        watchdog.at("building the model", 0)
        self._build_model()
        self._leave_if_told()
        watchdog.at("restoring", 0)
        self._restore()
        watchdog.at("opening loaders and loggers", self.step)
        self._open_loaders(resources)
        self._open_observers(resources)
        self._leave_if_told()

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

    def owes_evaluation(self) -> bool:
        """Whether a signal came before the run that saved the first step could evaluate it."""
        due = self.due(self.config.training.eval_steps) or self.step >= self.total_steps
        return due and 0 < self.step == self.first_step and not self.progress.evaluated

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

    def due(self, *intervals: int | None) -> bool:
        for every in intervals:  # noqa: SIM110  a generator is a call for each
            if every is not None and self.step % every == 0:
                return True
        return False

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
        about = {"layout": layout, "batches": batches, "config": config, **about_names(self.model)}
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

    def _leave_if_told(self) -> None:
        """Before the first step there is nothing to save, and a large model takes a while to get there."""
        if number := self.strategy.highest(self.stop.signal):
            raise Stopped(number, agreed=True)

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
        keep_best, metric = self.config.checkpoint.keep_best, self.config.checkpoint.metric
        if keep_best and self.eval_data is None:
            raise UserError(
                f"checkpoint.keep_best = {keep_best}, but the recipe has no evaluation data to tell the best by; "
                "set it to 0 or give the recipe eval_data"
            )
        if keep_best and metric not in EVALUATED:
            raise UserError(f"checkpoint.metric = {metric!r}, but an evaluation gives {', '.join(EVALUATED)}; use that")

    def _build_model(self) -> None:
        model, self.weights = build(self.recipe.build_model, self.recipe.weights(), self.config.experiment.seed)
        self.shapes = copy_on_meta(model)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.num_parameters = trained, sum(p.numel() for p in model.parameters()) - trained
        self.model, self.optimizer = self.strategy.prepare(
            model,
            lambda model: build_optimizer(self.config.training, self.recipe.param_groups(model)),
            self.recipe.parallel_plan(model),
            self.weights,
        )

    def _restore(self) -> None:
        self.warnings: list[str] = []
        config, warn = self.config.checkpoint, self.warnings.append
        self.manager = CheckpointManager(
            self.output_dir,
            config.keep_last,
            keep_best=config.keep_best,
            metric=config.metric,
            mode=config.mode,
            keep_every=config.keep_every,
            is_main_process=self.strategy.is_main_process,
            may_write=self.lease.check,
            background=self.strategy.device.type == "cuda" if config.async_save is None else config.async_save,
        )
        self.manager.clean()
        here = self.strategy.state(self.model, self.optimizer).model if self.weights.files else {}
        self.base = Base(self.model, self.weights, here)
        self.progress = restore(self.run, self.manager, self.strategy, self.model, self.optimizer, self.base, warn)
        state, self.refers_to = self.base.leave_out(self.strategy.state(self.model, self.optimizer))
        self.checkpoint_bytes = check_room(self.manager, self.strategy, state, self.optimizer, warn)
        if config.keep_best and not self.config.training.eval_steps:
            warn(
                f"checkpoint.keep_best = {config.keep_best}, but without training.eval_steps only the end is evaluated"
            )
        self.saved_at = time.monotonic()
        self.batches = self.progress.batches
        self.step = self.first_step = self.manager.saved_step = self.progress.step

    def _open_loaders(self, resources: ExitStack) -> None:
        training, samples = self.config.training, self.progress.samples
        end = training.num_epochs * self.epoch_size if training.num_epochs and self.epoch_size else None
        self.total_steps = self._count_steps(training)
        self.schedule = build_schedule(training, self.total_steps)
        then = self.progress.made_with
        if then and self.step < self.total_steps and (then.max_steps or self.epoch_size):
            jump = say_jump(then, training, (self._count_steps(then), self.total_steps), self.step)
            if jump:
                self.warnings.append(f"going on from {self.progress.started_from}, {jump}")
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

    def _count_steps(self, training: TrainingConfig) -> int:
        """Of the whole run, from its beginning to its end."""
        if training.num_epochs and self.epoch_size:
            end = training.num_epochs * self.epoch_size
            return self.step + self.batches.steps_between(self.progress.samples, end, self.epoch_size)
        assert training.max_steps
        return training.max_steps

    def _open_observers(self, resources: ExitStack) -> None:
        config = self.config
        self.metrics: dict[str, float] = {}
        skipped_steps = self.progress.skipped_steps
        self.meter = Meter(self.strategy, self.recipe.unit, config.training, self.loader, skipped_steps)
        profile: ProfileConfig | None = None
        mode: ConsoleMode = "off"
        loggers = Loggers()
        if self.strategy.is_main_process:  # the others stay silent
            profile, mode = config.logging.profile, config.logging.console
            name, settings = config.experiment.name, self.run.tree()
            again = self.owes_evaluation()
            loggers = open_loggers(config.logging, self.output_dir, name, settings, self.step, again)
        self.loggers = resources.enter_context(closing(loggers))
        self.profiler = resources.enter_context(closing(Profiler(profile, self.output_dir)))
        log: PatientFile | None = None
        if self.strategy.is_main_process and self.strategy.world_size > 1:  # the others write theirs whole
            log = resources.enter_context(closing(PatientFile(self.output_dir / "logs" / "rank_0.log")))
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
