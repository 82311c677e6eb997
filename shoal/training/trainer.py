"""Training a recipe: opening a run, and what a step of it computes. The cadence around steps is in `loop.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from shoal.checkpoint.run_lock import RunLock
from shoal.config import Run
from shoal.processes.board import once_per_node
from shoal.processes.detect import detect
from shoal.processes.watchdog import Watchdog, group_timeout_seconds
from shoal.processes.world import World
from shoal.seeding import mix, seed_generators
from shoal.strategies import DistributedStrategy, from_config
from shoal.training.checkpoints import Checkpoints
from shoal.training.diagnose import first_bad_module
from shoal.training.loaders import EVAL_LOSS, count_steps, open_data, open_loaders
from shoal.training.loop import Outcome, Shell
from shoal.training.meter import flops_per_sample
from shoal.training.modes import evaluation_mode
from shoal.training.objectives import combine
from shoal.training.observers import Warnings, open_observers
from shoal.training.optimizers import set_learning_rate
from shoal.training.preflight import check_start, check_world, open_run_folder
from shoal.training.report import Report
from shoal.training.resume import Progress
from shoal.training.schedules import build_schedule, say_jump
from shoal.training.session import Session, assemble
from shoal.training.signals import StopFlag, Stopped
from shoal.types import MicroBatch, StepInfo, StepOutput


def train(run: Run, world: World | None = None, terminal: int = 2) -> Outcome:
    """Trains a run to its end, resuming from its last good checkpoint.

    `terminal` is the file descriptor on which the user is told of a hang.
    """
    world, distributed = world or detect(), run.config.distributed
    strategy = from_config(run.config, world, group_timeout_seconds(distributed.timeout, distributed.init_timeout))
    check_world(run, world)
    check_start(run, world.size, world.local_size, world.was_restarted)
    with StopFlag() as stop, ExitStack() as folder:
        with stop.at_once():
            run_lock = folder.enter_context(open_run_folder(run, strategy))
            recipe = run.recipe_type(run.recipe_config)
            seed_generators(mix(run.config.experiment.seed, "prepare_data"))  # alike on all machines
            once_per_node(world, recipe.prepare_data)
        log = Path(run.config.output_dir) / "logs" / f"rank_{world.rank}.log" if world.size > 1 else None
        watchdog = Watchdog(world, distributed.timeout, distributed.init_timeout, log, terminal)
        with watchdog, strategy, ExitStack() as resources:
            shell = open_shell(run, strategy, recipe, stop, watchdog, run_lock, resources)
            return shell.fit(RecipeBody(shell))


def open_shell(
    run: Run,
    strategy: DistributedStrategy,
    recipe: object,
    stop: StopFlag,
    watchdog: Watchdog,
    run_lock: RunLock,
    resources: ExitStack,
) -> Shell:
    """Opens all that a run is made of, one after another."""
    config = run.config
    warn = Warnings(Path(config.output_dir) / "logs" / "rank_0.log" if strategy.is_main_process else None)
    resources.callback(warn.close)

    def opening(what: str, step: int = 0) -> None:
        """Ends the run if any rank got a signal: there is nothing to save yet. Then tells the watchdog the phase."""
        if number := strategy.max_over_ranks(stop.signal):
            raise Stopped(number, agreed=True)
        watchdog.at(what, step)

    watchdog.at("opening the data", 0)
    data = open_data(recipe, config)
    opening("building the model")
    session = assemble(recipe, strategy, config.training, config.experiment.seed)
    opening("restoring")
    checkpoints = Checkpoints(run, session, run_lock, warn)
    progress = checkpoints.progress
    watchdog.at("opening loaders and loggers", progress.step)
    loaders = open_loaders(session, config, data, progress, resources)
    _warn_of_jump(run, progress, loaders.total_steps, loaders.epoch_size, warn)
    shell = Shell(run, session, checkpoints, loaders, stop, watchdog)
    shell.observers = open_observers(run, session, loaders, progress, shell.owes_evaluation(), resources)
    warn.show_on(shell.observers.console)
    opening("opening loaders and loggers", progress.step)
    return shell


def _warn_of_jump(
    run: Run, progress: Progress, total_steps: int, epoch_size: int | None, warn: Callable[[str], None]
) -> None:
    """Warns if changed keys make the learning rate jump where the run goes on."""
    then, now = progress.made_with, run.config.training
    if then and progress.step < total_steps and (then.max_steps or epoch_size):
        totals = count_steps(then, epoch_size, progress, run.config.dataset.drop_last), total_steps
        if jump := say_jump(then, now, totals, progress.step):
            warn(f"going on from {progress.started_from}, {jump}")


class RecipeBody:
    """Takes the steps of a recipe, and evaluates it."""

    preview: str | None = None

    def __init__(self, shell: Shell):
        session: Session = shell.session
        self.session, self.strategy, self.recipe = session, session.strategy, session.recipe
        self.model, self.optimizer, self.turns = session.model, session.optimizer, session.turns
        self.schedule = build_schedule(shell.config.training, shell.total_steps)
        self._seed = session.seed
        self._outputs: list[StepOutput] = []
        """What each turn of the last step computed."""
        self._report: Report | None = Report(shell)

    def take_step(self, micro_batches: Sequence[MicroBatch], step: int) -> tuple[StepOutput, StepInfo]:
        if self._report is not None:
            return self._take_first_step(micro_batches, step, self._report)
        outputs, infos = [], []
        for turn in self.turns:
            set_learning_rate(turn.optimizer, self.schedule(step))
            outputs.append(
                self.strategy.forward_backward(self.model, micro_batches, turn.objective, step, turn.parameters)
            )
            infos.append(self.strategy.step(turn.optimizer, turn.max_norm))
        self._outputs = outputs
        return combine(outputs, infos)

    def _take_first_step(
        self, micro_batches: Sequence[MicroBatch], step: int, report: Report
    ) -> tuple[StepOutput, StepInfo]:
        """Takes a step, watches whether what was asked for engages, and shows what is in force."""
        self._report, session, observers = None, self.session, report.shell.observers
        observers.meter.flops_per_sample = flops_per_sample(
            session.meta_model, micro_batches[0], self.recipe, self._seed, self.strategy.device
        )
        session.meta_model = None
        with report.watch():
            taken = self.take_step(micro_batches, step)
        report.check()
        if self.strategy.is_main_process:
            (report.shell.output_dir / "report.txt").write_text(f"{report}\n")
        observers.console.line(str(report))
        return taken

    def log(self) -> dict[str, float]:
        rates = {"train/learning_rate": self.optimizer.param_groups[0]["lr"]}
        for turn, output in zip(self.turns, self._outputs, strict=True):
            if turn.name:
                rates[f"train/{turn.name}_loss"] = output.loss.item()
        return rates

    def explain_skips(self, micro_batches: Sequence[MicroBatch]) -> str:
        reasons = [first_bad_module(self.strategy, self.model, micro_batches[0], turn.objective) for turn in self.turns]
        return "; ".join(f"{t.name}: {why}" if t.name else why for t, why in zip(self.turns, reasons, strict=True))

    def evaluate(self, shell: Shell) -> dict[str, float] | None:
        with evaluation_mode(self.model):
            return self._evaluate(shell)

    def _evaluate(self, shell: Shell) -> dict[str, float] | None:
        assert shell.loaders.evaluation is not None
        self.strategy.sync_buffers(self.model)  # or every rank would evaluate another model
        totals = count = torch.zeros(len(self.turns), device=self.strategy.device)
        metrics: dict[str, float] | None = None
        for micro_batches in shell.loaders.evaluation:
            outputs = [self.strategy.evaluate(self.model, micro_batches, turn.objective) for turn in self.turns]
            totals = totals + torch.stack([output.total for output in outputs])
            count = count + torch.stack([output.count for output in outputs])
            if shell.agree_to_stop():
                break
            shell.watchdog.at("evaluation", shell.step)
        else:
            losses = (totals / count).tolist()
            metrics = {EVAL_LOSS: sum(losses)}
            metrics |= {f"eval/{t.name}_loss": loss for t, loss in zip(self.turns, losses, strict=True) if t.name}
            self._preview(shell.step)
        return metrics

    def _preview(self, step: int) -> None:
        """Asks the recipe for something to look at.

        Eagerly: generating goes through many shapes once each, and compiling for them costs more.
        """
        seed = mix(self._seed, "preview", step)
        seed_generators(seed)
        torch.manual_seed(seed)  # on every device
        with (
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            self.strategy.whole_model(self.model) as model,
        ):
            self.preview = None if model is None else self.recipe.preview(model)
