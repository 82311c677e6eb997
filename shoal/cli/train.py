"""`shoal train`: trains a run, and starts its processes if the config asks for several."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shoal.cli.arguments import ConfigFile, Debug, Overrides
from shoal.errors import UserError, one_line, printable

if TYPE_CHECKING:
    from shoal.config import Run
    from shoal.training import Outcome


Fresh = Annotated[
    bool,
    typer.Option("--fresh", metavar="", help="Start anew: the run folder is renamed before, and nothing is deleted."),
]


def train(config: ConfigFile, overrides: Overrides = None, fresh: Fresh = False, debug: Debug = False) -> None:
    """Train a run to its end, on as many processes as the config says.

    A run that was interrupted resumes from its last good checkpoint. Ctrl-C saves a checkpoint and stops. Several
    processes are started by this command (launch.procs_per_node=8), or by torchrun, Slurm or DeepSpeed's launcher.
    """
    train_config(config, overrides or [], ["train", str(config)], fresh)


def train_config(config: Path, overrides: list[str], command: list[str], fresh: bool = False) -> None:
    """Trains a run to its end; `command` is what the user typed after `shoal`, without the overrides."""
    set_variables(config, overrides)
    from shoal.config import load_run
    from shoal.launch.mistakes import RecipeFailure, explained, keep_traceback
    from shoal.processes.detect import detect

    with explained():
        run = load_run(config, overrides)
    if fresh:
        _start_fresh(run)
    world = detect(launch=run.config.launch)
    if world.starts and run.config.distributed.strategy == "ddp_spawn":
        stopped_by = _train_in_children(run, command, overrides)
        raise typer.Exit(128 + stopped_by if stopped_by else 0)
    if world.starts:  # this process starts the others and does not train itself, so it does not need all of shoal
        from shoal.launch.launcher import start
        from shoal.training.preflight import check_before_launch

        check_before_launch(run, world)
        debug = ["--debug"] if "--debug" in sys.argv else []
        raise typer.Exit(start(run, world, [*command, *debug, *overrides]))

    from shoal.launch.ends import log_path
    from shoal.launch.worker import as_worker
    from shoal.training import train as train_run
    from shoal.training.preflight import check_start
    from shoal.training.signals import Stopped

    check = partial(check_start, run, world.size, world.local_size, world.was_restarted)
    with as_worker(run, world, check) if world.size > 1 else nullcontext(2) as terminal:
        try:
            with explained(run):
                outcome = train_run(run, world, terminal)
            stopped_by = outcome.stopped_by
            if world.rank == 0:
                _print_outcome(outcome, run, [_command("shoal"), *command], overrides)
        except RecipeFailure as failure:
            if world.size > 1:
                raise  # `as_worker` shows it and writes the log
            keep_traceback(log_path(run, 0), failure)
            raise RecipeFailure(f"{failure}; --debug shows the traceback") from failure.__cause__
        except Stopped as stopped:
            stopped_by = stopped.signal
            if world.rank == 0:
                _print_stopped(stopped.signal, run, [_command("shoal"), *command, *overrides])
            if not stopped.agreed:
                raise
    if stopped_by:
        raise typer.Exit(128 + stopped_by)


def _train_in_children(run: Run, command: list[str], overrides: list[str]) -> int:
    """Trains in processes that this one starts without a launcher; returns the signal that stopped the run, or 0."""
    from shoal.api import starts_processes, train_in_processes

    starts_processes(run)  # refuses several machines
    outcome = train_in_processes(run, _train_explained)
    _print_outcome(outcome, run, [_command("shoal"), *command], overrides)
    return outcome.stopped_by


def _train_explained(run: Run) -> Outcome:
    """Trains as one of several processes. An error in the user's code becomes one line."""
    from shoal.launch.mistakes import explained
    from shoal.training import train as train_run

    with explained(run):
        return train_run(run)


def set_variables(config: Path, overrides: Sequence[str]) -> None:
    """Sets the environment variables of the section `launch.env`, before any library reads them.

    The config is checked later, which imports the recipe and with it torch.
    """
    from shoal.config.overrides import read_with_overrides
    from shoal.config.schema import LaunchConfig
    from shoal.config.validation import validate
    from shoal.launch.workers import QUIET_LAUNCHER
    from shoal.processes.detect import is_worker

    tree, sources, _ = read_with_overrides(config, overrides)
    launch = tree.get("launch")
    if not isinstance(launch, dict):
        return
    if launch.get("nodes", 1) != 1 and not is_worker():
        os.environ.setdefault(*QUIET_LAUNCHER)
    if "env" in launch:
        tree = {"launch": {"env": launch["env"]}}
        os.environ |= validate(dict[Literal["launch"], LaunchConfig], tree, sources)["launch"].env


def _start_fresh(run: Run) -> None:
    """Renames the run folder, so that the run starts anew; not if a scheduler has restarted the same command."""
    from shoal.processes.detect import detect, detect_attempt
    from shoal.training.preflight import move_aside

    if run.config.launch.max_nodes > 1 or detect(launch=run.config.launch).size > 1:
        raise UserError(
            "--fresh: several processes or machines would rename the run folder at once; rename it by hand, or choose "
            "another experiment.output_dir"
        )
    if any(detect_attempt()):
        print("shoal: restarted by the scheduler, so --fresh is left out and the run resumes", file=sys.stderr)
    elif new := move_aside(Path(run.config.output_dir)):
        print("the earlier run is now in", printable(str(new)), flush=True)


def _print_stopped(number: signal.Signals, run: Run, command: list[str]) -> None:
    """Says that a run ended before its first step, and how to continue one that has checkpoints."""
    from shoal.checkpoint.folders import checkpoint_folders

    folders = checkpoint_folders(run.config.output_dir)
    saved = f"the last checkpoint is still {folders[-1].name}" if folders else "nothing to save"
    print(f"stopped by {number.name} before the first step; {saved}", flush=True)
    if folders:
        print("resume with ", printable(shlex.join(command)), flush=True)


def _print_outcome(outcome: Outcome, run: Run, command: list[str], overrides: list[str]) -> None:
    """Prints how the run ended and the commands to continue with."""
    from shoal.config.run import RECIPES

    if outcome.stopped_by:
        name = signal.Signals(outcome.stopped_by).name
        print(f"stopped by {name} at step {outcome.step} of {outcome.total_steps}; saved")
        print("resume with ", printable(shlex.join([*command, *overrides])), flush=True)
        return
    if outcome.preview:
        sample = printable(outcome.preview, keep="\n\t")
        print(f"\npreview\n{'─' * 60}\n{sample}\n{'─' * 60}")
    if outcome.first_step == outcome.step:
        past = (
            f", past step {outcome.total_steps}, where this config ends" if outcome.step > outcome.total_steps else ""
        )
        print(f"already finished at step {outcome.step}{past}")
    else:
        losses = (f"{name} {value:.4f}" for name, value in outcome.metrics.items() if name.endswith("/loss"))
        print(f"finished at step {outcome.step}, {', '.join(losses)}")
        if skipped := outcome.metrics.get("train/skipped_steps"):
            print(f"{skipped:g} of {outcome.step} updates were skipped because their gradient was not finite")
    print("run folder  ", printable(str(outcome.output_dir)))
    if outcome.stop_reason is not None:
        reason = one_line(outcome.stop_reason)
        print(f"ended early: {reason}; to train more, change the section callbacks or name a checkpoint.resume")
    elif outcome.first_step < outcome.step < outcome.total_steps:
        print(f"the data ended before step {outcome.total_steps}")
    elif outcome.step > outcome.total_steps:
        print("train anew   ", printable(shlex.join([*command, *overrides, "--fresh"])))
    else:
        epochs = run.config.training.num_epochs
        key, value = ("num_epochs", 2 * epochs) if epochs else ("max_steps", 2 * outcome.step)
        others = [override for override in overrides if override.partition("=")[0].strip() != f"training.{key}"]
        print("train more  ", printable(shlex.join([*command, *others, f"training.{key}={value}"])))
    if run.config.recipe in RECIPES and hasattr(run.recipe_type, "transformers_config"):
        print("talk with   ", printable(shlex.join([command[0], "chat", str(outcome.output_dir)])))
    print("plot with   ", printable(shlex.join([_command("tensorboard"), "--logdir", str(outcome.output_dir)])))


def _command(name: str) -> str:
    """Returns a command as the user can type it: its name if it is on the PATH, else its path."""
    beside = Path(sys.executable).parent / name
    found = shutil.which(name)
    if not beside.exists() or (found and Path(found).resolve() == beside.resolve()):
        return name
    return os.path.relpath(beside)
