"""Training a recipe: opening a run, and what a step of it computes. The cadence around steps is in `loop.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from shoal.callbacks.early_stopping import EarlyStopping
from shoal.callbacks.run_handle import RunHandle
from shoal.checkpoint.run_lock import RunLock
from shoal.config import Run
from shoal.config.schema_optimizers import Plateau
from shoal.errors import UserError
from shoal.processes.board import once_per_node
from shoal.processes.detect import detect
from shoal.processes.watchdog import Watchdog, group_timeout_seconds
from shoal.processes.world import World
from shoal.seeding import mix, seed_generators
from shoal.strategies import DistributedStrategy, Loop, from_config
from shoal.training.checkpoints import Checkpoints
from shoal.training.diagnose import first_bad_module
from shoal.training.evaluation import Evaluation
from shoal.training.forward_writes import check_forward_writes
from shoal.training.hooks import Hooks
from shoal.training.loaders import Data, Loaders, count_steps, open_data, open_loaders, unknown_metric
from shoal.training.loop import Outcome, Shell
from shoal.training.loss_check import check_loss
from shoal.training.meter import flops_per_sample
from shoal.training.modes import evaluation_mode
from shoal.training.objectives import combine, evaluate_turns
from shoal.training.observers import Warnings, open_observers
from shoal.training.optimizers import set_learning_rate
from shoal.training.preflight import check_start, check_world, open_run_folder, update_config
from shoal.training.preview import make_preview
from shoal.training.preview_budget import PreviewBudget
from shoal.training.report import Report
from shoal.training.resume import Progress
from shoal.training.schedules import PlateauSchedule, build_schedule, say_jump, schedule_is_by_recipe
from shoal.training.session import Session, assemble
from shoal.training.signals import StopFlag, Stopped
from shoal.training.unused import find_unused
from shoal.types import MicroBatch, StepInfo, StepOutput


def train(run: Run, world: World | None = None, terminal: int = 2) -> Outcome:
    """Trains a run to its end, resuming from its last good checkpoint.

    `terminal` is the file descriptor on which the user is told of a hang.
    """
    if run.body is not None:
        from shoal.training.own_loop import OwnRun

        return OwnRun(run, world, terminal).train()
    with open_run(run, world, terminal) as open_at:
        skip_to: int | None = None
        while True:
            with ExitStack() as resources:
                shell = open_at(resources, skip_to)
                body = RecipeBody(shell)
                body.check_followed_metrics(shell)
                ended = shell.fit(body)
            if isinstance(ended, Outcome):
                return ended
            skip_to = ended.skip_to


OpenShell = Callable[[ExitStack, int | None], Shell]
"""(resources, skip_to) → the run where it stands; its loaders and loggers are closed with `resources`."""


@contextmanager
def open_run(run: Run, world: World | None = None, terminal: int = 2) -> Iterator[OpenShell]:
    """Opens the folder and the processes of a run, and closes them at the end of the context."""
    world, distributed = world or detect(launch=run.config.launch), run.config.distributed
    check_world(run, world)
    strategy = from_config(run.config, world, group_timeout_seconds(distributed.timeout, distributed.init_timeout))
    check_start(run, world.size, world.local_size, world.was_restarted)
    with StopFlag() as stop, ExitStack() as folder:
        with stop.at_once():
            run_lock = folder.enter_context(open_run_folder(run, strategy))
            recipe = run.make_recipe()
            seed_generators(mix(run.config.experiment.seed, "prepare_data"))  # alike on all machines
            once_per_node(world, recipe.prepare_data)
        log = Path(run.config.output_dir) / "logs" / f"rank_{world.rank}.log" if world.size > 1 else None
        watchdog = Watchdog(world, distributed.timeout, distributed.init_timeout, log, terminal)
        with watchdog, strategy:
            yield lambda resources, skip_to: open_shell(
                run, strategy, recipe, stop, watchdog, run_lock, resources, skip_to
            )


def open_shell(
    run: Run,
    strategy: DistributedStrategy,
    recipe: Any,
    stop: StopFlag,
    watchdog: Watchdog,
    run_lock: RunLock,
    resources: ExitStack,
    skip_to: int | None = None,
) -> Shell:
    """Opens all that a run is made of, one after another.

    `skip_to` is the position of the first sample to train on, if the run goes back to its last checkpoint.
    """
    config = run.config
    warn = Warnings(Path(config.output_dir) / "logs" / "rank_0.log" if strategy.is_main_process else None)
    resources.callback(warn.close)
    for note in strategy.world.notes:
        warn(note)

    def opening(what: str, step: int = 0) -> None:
        """Ends the run if any rank got a signal: there is nothing to save yet. Then tells the watchdog the phase."""
        if number := strategy.max_over_ranks(stop.signal):
            raise Stopped(number, agreed=True)
        watchdog.at(what, step)

    watchdog.at("opening the data", 0)
    data = open_data(recipe, config)
    for text in recipe.data_warnings():
        warn(text)
    opening("building the model")
    loop = Loop(strategy) if config.training.body else None
    session = assemble(recipe, strategy, config.training, config.experiment.seed, loop=loop)
    opening("restoring")
    checkpoints = Checkpoints(run, session, run_lock, warn, skip_to)
    progress = checkpoints.progress
    watchdog.at("opening loaders and loggers", progress.step)
    loaders = open_loaders(session, config, data, progress, resources)
    _warn_of_jump(run, recipe, progress, loaders.total_steps, loaders.epoch_size, warn)
    hooks = _open_hooks(run, session, data, checkpoints, loaders, warn)
    hooks.run.keep_alive = lambda: watchdog.at("ending", hooks.run.step)
    shell = Shell(run, session, checkpoints, loaders, stop, watchdog, hooks)
    shell.observers = open_observers(run, session, loaders, progress, not progress.evaluated, resources)
    shell.warn = warn
    warn.show_on(shell.observers.console)
    opening("opening loaders and loggers", progress.step)
    if progress.step < loaders.total_steps:
        update_config(run, strategy)
    return shell


def _open_hooks(
    run: Run,
    session: Session,
    data: Data,
    checkpoints: Checkpoints,
    loaders: Loaders,
    warn: Callable[[str], None],
) -> Hooks:
    """Builds the callbacks, and gives them and the recipe their state of the checkpoint."""
    progress, config = checkpoints.progress, run.config
    handle = RunHandle(
        config=config,
        recipe=session.recipe,
        strategy=session.strategy,
        model=session.model,
        optimizer=session.optimizer,
        output_dir=Path(config.output_dir),
        step=progress.step,
        total_steps=loaders.total_steps,
        metrics=dict(progress.last_metrics),
        training_data=lambda: session.loader(data.train, progress.batches, end=data.epoch_size),
        epoch_size=data.epoch_size,
    )
    hooks = Hooks(session.recipe, run.callbacks, handle)
    if progress.step:
        hooks.load_state(progress.hooks, progress.started_from, warn)
    # Whoever changes the callbacks, or names a checkpoint, wants a run to go on that a hook has ended.
    if progress.hooks.section != config.callbacks or config.checkpoint.resume != "auto":
        handle.stop_reason = None
    return hooks


def _warn_of_jump(
    run: Run, recipe: Any, progress: Progress, total_steps: int, epoch_size: int | None, warn: Callable[[str], None]
) -> None:
    """Warns if changed keys make the learning rate jump where the run goes on."""
    then, now = progress.made_with, run.config.training
    if schedule_is_by_recipe(recipe, total_steps):
        return
    if then and progress.step < total_steps and (then.max_steps or epoch_size):
        totals = count_steps(then, epoch_size, progress, run.config.dataset.drop_last), total_steps
        if jump := say_jump(then, now, totals, progress.step):
            warn(f"going on from {progress.started_from}, {jump}")


def _followed_metrics(shell: Shell) -> dict[str, str]:
    """Returns the metrics of evaluations that something in the config follows, by their keys."""
    saving, schedule = shell.config.checkpoint, shell.config.training.lr_scheduler
    by_key = {"checkpoint.metric": saving.metric} if saving.keep_best else {}
    if isinstance(schedule, Plateau):
        by_key["training.lr_scheduler.metric"] = schedule.metric
    callbacks = {name: member for name, member in shell.hooks.members.items() if isinstance(member, EarlyStopping)}
    return {**by_key, **{f"callbacks.{name}.metric": callback.config.metric for name, callback in callbacks.items()}}


class RecipeBody:
    """Takes the steps of a recipe, and evaluates it."""

    preview: str | None = None
    clipping: str | None = None
    """How the last gradient was clipped, if a body of the user's own decides that."""

    def __init__(self, shell: Shell):
        session: Session = shell.session
        self.session, self.strategy, self.recipe = session, session.strategy, session.recipe
        self.model, self.turns = session.model, session.turns
        self.schedule = build_schedule(shell.config.training, shell.total_steps, session.recipe)
        if isinstance(self.schedule, PlateauSchedule):
            self._follow_evaluations(shell, self.schedule)
        self._seed = session.seed
        self._report: Report | None = Report(shell)
        self._hooks = shell.hooks
        self._preview_budget = PreviewBudget()
        self._rates = self._rates_in_groups()
        """The learning rates after the last step."""
        self.before_update: Callable[[], None] | None = None
        """Is called between the backward and the update."""
        if shell.hooks.calls["before_update"]:
            self.before_update = partial(shell.hooks.call, "before_update")

    def _follow_evaluations(self, shell: Shell, schedule: PlateauSchedule) -> None:
        """Gives the schedule what it had noted when the checkpoint was saved, and lets it be saved again."""
        if (noted := shell.checkpoints.progress.schedule) is not None:
            schedule.load_state(noted)
        shell.checkpoints.schedule_state = schedule.state

    def take_step(self, micro_batches: Sequence[MicroBatch], step: int) -> tuple[StepOutput, StepInfo]:
        if self._report is not None:
            with self.first_step(micro_batches, step):
                return self.take_step(micro_batches, step)
        if self._hooks.has_any and (changed := self._changed_rate()) is not None:
            raise UserError(
                f"a hook has set the learning rate of a parameter group to {changed:g}, but the schedule sets it in "
                "every step; use run.scale_learning_rate(factor), training.lr_scheduler, or the recipe's schedule"
            )
        rate, outputs, infos = self.schedule(step) * self._hooks.run.learning_rate_scale, [], []
        for turn in self.turns:
            set_learning_rate(turn.optimizer, rate)
            outputs.append(
                self.strategy.forward_backward(self.model, micro_batches, turn.objective, step, turn.parameters)
            )
            if self.before_update is not None:
                self.before_update()
            infos.append(self.strategy.step(turn.optimizer, turn.max_norm))
        if self._hooks.has_any:
            self._rates = self._rates_in_groups()
        return combine(outputs, infos)

    def _rates_in_groups(self) -> list[float]:
        return [group["lr"] for turn in self.turns for group in turn.optimizer.param_groups]

    def _changed_rate(self) -> float | None:
        """Returns a learning rate that is not the one that the last step has left, if there is one."""
        now = self._rates_in_groups()
        return next((rate for rate, before in zip(now, self._rates, strict=True) if rate != before), None)

    @contextmanager
    def first_step(self, micro_batches: Sequence[MicroBatch], step: int) -> Iterator[None]:
        """Watches in a first step whether what was asked for engages, and then shows what is in force."""
        assert self._report is not None
        report, self._report = self._report, None
        observers = report.shell.observers
        self._check_first_batch(report, micro_batches[0], step)
        self.session.meta_model = None
        before_update, unused_by_update = self.before_update, list[list[str]]()

        def look_for_unused() -> None:
            unused_by_update.append(find_unused(self.strategy, self.model))
            if before_update is not None:
                before_update()

        self.before_update = look_for_unused
        with report.first_step.watch():
            yield
        self.before_update = before_update
        report.unused = [name for name in unused_by_update[0] if all(name in unused for unused in unused_by_update)]
        report.clipping = self.clipping or report.clipping
        report.first_step.check()
        if self.strategy.is_main_process:
            report.write(report.shell.output_dir / "report.txt")
        observers.console.line(str(report))

    def _check_first_batch(self, report: Report, micro: MicroBatch, step: int) -> None:
        """Checks what the recipe computes for a micro-batch of the first step."""
        model, shell = self.session.meta_model, report.shell
        check_forward_writes(model, micro, self.recipe, self._seed, self.strategy, shell.warn)
        flops = flops_per_sample(model, micro, self.recipe, self._seed, self.strategy.device)
        shell.observers.meter.flops_per_sample = flops
        if step == 0 and self.turns[0].parameters is None:
            report.loss = check_loss(self.strategy, self.model, micro, self.recipe, shell.warn)

    def log(self, in_files: bool) -> dict[str, float]:
        exchange = self.strategy.engaged.exchange
        sent = exchange.wire.numbers() if exchange is not None else {}
        return {"train/learning_rate": self.session.optimizer.param_groups[0]["lr"], **sent}

    def explain_skips(self, micro_batches: Sequence[MicroBatch]) -> str:
        reasons = [first_bad_module(self.strategy, self.model, micro_batches[0], turn.objective) for turn in self.turns]
        return "; ".join(f"{t.name}: {why}" if t.name else why for t, why in zip(self.turns, reasons, strict=True))

    def evaluate(self, shell: Shell) -> dict[str, float] | None:
        with evaluation_mode(self.model), self.strategy.average(self.model):
            metrics = self._evaluate(shell)
        if metrics is not None and isinstance(self.schedule, PlateauSchedule) and shell.evaluation_is_due():
            self.schedule.observe(metrics)
        return metrics

    def _evaluate(self, shell: Shell) -> dict[str, float] | None:
        self.strategy.sync_buffers(self.model)  # or every rank would evaluate another model
        metrics: dict[str, float] = {}
        with self._preview_budget.evaluating():
            for prefix, loader in shell.loaders.evaluation.items():
                if (values := self._evaluate_set(loader, shell)) is None:
                    return None
                metrics |= {f"{prefix}{name}": value for name, value in values.items()}
        self.preview = None
        if shell.step >= shell.total_steps or not self._preview_budget.is_spent(self.strategy.any_rank):
            with self._preview_budget.previewing():
                self.preview = make_preview(self.strategy, self.recipe, self.model, self._seed, shell.step)
        return metrics

    def _evaluate_set(self, batches: Iterable[Sequence[MicroBatch]], shell: Shell) -> dict[str, float] | None:
        """Returns the metrics of a set of data; None if the run has to stop."""
        evaluation = Evaluation(self.session)
        with self.session.metric_objects.set_aside():
            for micro_batches in batches:
                evaluation.add(evaluate_turns(self.strategy, self.model, micro_batches, self.turns))
                if shell.agree_to_stop():
                    return None
                shell.watchdog.at("evaluation", shell.step)
            return evaluation.values()

    def check_followed_metrics(self, shell: Shell) -> None:
        """Refuses a metric in the config that no evaluation will give, before hours of training.

        Only the recipe knows the names of its metrics, so the first batch of each set is evaluated for them.
        """
        sets = shell.loaders.evaluation
        followed = {
            key: metric for key, metric in _followed_metrics(shell).items() if not self._always_gives(metric, sets)
        }
        if not followed or not sets:
            return
        shell.watchdog.at("looking for metrics", shell.step)
        names: list[str] = []
        with evaluation_mode(self.model):
            for prefix, loader in sets.items():
                if (values := self._evaluate_set(islice(loader, 1), shell)) is None:
                    return
                names += [f"{prefix}{name}" for name in values]
        for key, metric in followed.items():
            if metric not in names:
                raise unknown_metric(key, metric, names)

    def _always_gives(self, metric: str, prefixes: Iterable[str]) -> bool:
        """Returns whether every evaluation has this metric, whatever the recipe is."""
        return metric in (f"{prefix}loss" for prefix in prefixes)
