"""What a run is made of, opened one after another before its first step."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.checkpoint import CheckpointManager
from shoal.checkpoint.frozen_base import Base
from shoal.checkpoint.run_lock import Lease
from shoal.config import Run
from shoal.config.schema import ConsoleMode, ProfileConfig, TrainingConfig
from shoal.data import BatchSchedule, Loader
from shoal.errors import UserError
from shoal.observe.console import Console
from shoal.observe.flops import copy_on_meta
from shoal.observe.loggers import Loggers, open_loggers
from shoal.observe.patient_file import PatientFile
from shoal.observe.profiler import Profiler
from shoal.processes.watchdog import Watchdog
from shoal.strategies import DistributedStrategy
from shoal.training.meter import Meter
from shoal.training.optimizers import build_optimizer
from shoal.training.resume import Progress, check_room, restore
from shoal.training.schedules import Schedule, build_schedule, say_jump
from shoal.training.signals import StopFlag, Stopped
from shoal.types import Weights
from shoal.weights import build

EVALUATED = ("eval/loss",)
"""The metrics that an evaluation gives, by which a checkpoint may be the best."""


class Built:
    """A run that is ready for its first step, or for the one after the checkpoint it goes on from."""

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

    def due(self, *intervals: int | None) -> bool:
        for every in intervals:  # noqa: SIM110  a generator is a call for each
            if every is not None and self.step % every == 0:
                return True
        return False

    def owes_evaluation(self) -> bool:
        """Whether a signal came before the run that saved the first step could evaluate it."""
        due = self.due(self.config.training.eval_steps) or self.step >= self.total_steps
        return due and 0 < self.step == self.first_step and not self.progress.evaluated

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
