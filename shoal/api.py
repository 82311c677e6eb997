"""Training from Python: `shoal.train` and `shoal.Run`, for a script or a notebook."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import nn

from shoal.config import run as config_run
from shoal.config.from_python import ConfigLike, run_from_python
from shoal.errors import UserError
from shoal.launch.ends import log_path
from shoal.launch.mistakes import RecipeFailure, with_hints
from shoal.launch.spawn import run_function
from shoal.processes.detect import detect, is_worker
from shoal.training.load import load
from shoal.training.loop import Outcome, Shell
from shoal.training.own_loop import Evaluation, OwnRun
from shoal.training.own_steps import Step
from shoal.training.preflight import check_start
from shoal.training.refused_start import StartTraces
from shoal.training.signals import StopFlag
from shoal.training.trainer import train as train_run


def train(config: ConfigLike = None, /, *, recipe: Any = None, **sections: Any) -> Outcome:
    """Trains a run to its end, as `shoal train` does; it resumes from its last good checkpoint, if there is one.

    `config` is a config file or a dict of sections; `sections` are merged over it, such as `training={"max_steps": 5}`
    or `**{"training.max_steps": 5}`. `recipe` is a recipe's name, class or object. If the config asks for several
    processes of this machine, they are started, and the model that is returned comes from the last checkpoint; without
    restarts if one dies, which only the command `shoal train` has. Under torchrun every process calls this.
    """
    run = run_from_python(config, recipe, sections, "shoal.train(...)")
    with with_hints():
        return train_in_processes(run, train_run) if starts_processes(run) else train_run(run)


class Run(OwnRun):
    """A run whose steps you write yourself, with all that surrounds the steps of `shoal.train`.

    The arguments are those of `shoal.train`. Use it as `with shoal.Run(...) as run:` around `for step in run.steps():`,
    or call `run.train(body)` with a function `body(run, step)`.
    """

    def __init__(self, config: ConfigLike = None, /, *, recipe: Any = None, **sections: Any):
        super().__init__(run_from_python(config, recipe, sections, "shoal.Run(...)"))

    def train(self, body: Callable[[Any, Step], None] | None = None) -> Outcome:
        """Calls `body(run, step)` for every step that is left; without a body, the one that `training.body` names.

        A function that can be imported is recorded in the run folder, so that `shoal train` can go on with the run. If
        the config asks for several processes of this machine, they are started, as by `shoal.train`.
        """
        if not starts_processes(self.settings):
            return super().train(body)
        self._set_body(body)
        self.outcome = train_in_processes(self.settings, _train_own_steps, self.evaluation)
        return self.outcome

    def _open(self) -> Shell:
        if self._shell is None and starts_processes(self.settings):
            processes = self.settings.config.launch.procs_per_node
            raise UserError(
                f"launch.procs_per_node = {processes}: the loop of a script cannot start processes; start the script "
                f"by `torchrun --nproc_per_node={processes}`, or use run.train(body)"
            )
        return super()._open()


def _train_own_steps(settings: config_run.Run, evaluation: Evaluation | None) -> Outcome:
    run = OwnRun(settings)
    run.evaluation = evaluation
    return run.train()


def starts_processes(run: config_run.Run) -> bool:
    """Returns whether the config asks for several processes and this process is none of them."""
    launch = run.config.launch
    os.environ |= launch.env
    if launch.processes == 1 or is_worker() or detect().size > 1:
        return False
    if launch.max_nodes > 1:
        raise UserError(
            f"launch.nodes = {launch.nodes}: Python starts processes on this machine only; use torchrun or "
            "`shoal train` on every machine"
        )
    return True


def train_in_processes(run: config_run.Run, train: Callable[..., Outcome], *args: Any) -> Outcome:
    """Calls `train(run, *args)` in the processes that the config asks for, and returns the outcome of rank 0."""
    processes = run.config.launch.procs_per_node
    check_start(run, processes, processes, was_restarted=False)
    traces = StartTraces(Path(run.config.output_dir))
    try:
        with _signals_passed_on():
            outcome: Outcome = run_function(_train_as_rank, (run, train, args), processes, "auto")[0]
    except UserError as error:
        if not isinstance(error, RecipeFailure):  # its traceback is in the logs
            traces.take_back()
        raise
    loads_best = run.config.checkpoint.load_best_model_at_end and not outcome.stopped_by
    path = outcome.best_checkpoint if loads_best else outcome.last_checkpoint
    assert path is not None
    average = "evaluated" if loads_best else "none"
    return replace(outcome, model=load(path, recipe=run.make_recipe(), average=average))


def _train_as_rank(run: config_run.Run, train: Callable[..., Outcome], args: tuple[Any, ...]) -> Outcome:
    """Trains as one of several processes; only rank 0 writes to the terminal."""
    world = detect()
    if world.rank > 0:
        path = log_path(run, world.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    outcome = train(run, *args)
    sys.stdout.flush()
    return replace(outcome, model=cast(nn.Module, None))  # it stays in this process; the checkpoint has it


@contextmanager
def _signals_passed_on() -> Iterator[None]:
    """Passes signals on to the processes that train, which save and end. A second one ends this process, and them."""

    class PassOn(StopFlag):
        def _handle(self, number: int, frame: Any) -> None:
            for process in multiprocessing.active_children():
                if process.pid is not None and not self.signal:
                    os.kill(process.pid, signal.Signals(number))
            super()._handle(number, frame)

    with PassOn():
        yield
