"""The commands. Thin: torch is imported only by those that need it."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import shoal
from shoal import checkpoint_commands
from shoal.errors import UserError

if TYPE_CHECKING:
    from shoal.config import Run
    from shoal.training import Outcome

app = typer.Typer(
    help="Distributed training on PyTorch: write what to train, set how it is spread.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(checkpoint_commands.app, name="checkpoint")

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file of the run.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Values that win over the file's, e.g. training.max_steps=50."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"shoal {shoal.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
    local_rank: Annotated[int | None, typer.Option("--local_rank", "--local-rank", hidden=True)] = None,
) -> None:
    """Some launchers say the local rank here, too: DeepSpeed's before every command. The environment has it already."""


@app.command()
def train(config: ConfigFile, overrides: Overrides = None, debug: Debug = False) -> None:
    """Train a run to its end; it goes on from its last good checkpoint by itself."""
    from shoal.config import load_run
    from shoal.launch.local import start, wants_processes
    from shoal.launch.worker import among_others
    from shoal.parallel.world import World
    from shoal.training import train as train_run
    from shoal.training.start import check_start
    from shoal.training.stop import Stopped

    run = load_run(config, overrides or ())
    if wants_processes(run):
        check_start(run, run.config.launch.processes)
        raise typer.Exit(start(run, sys.argv[1:]))
    world = World.from_environment()
    check = partial(check_start, run, world.size)
    with among_others(run, world, check) if world.size > 1 else nullcontext():
        try:
            outcome = train_run(run)
            stopped_by = outcome.stopped_by
            if world.rank == 0:
                _tell(outcome, run, config, overrides or [])
        except Stopped as stopped:
            stopped_by = stopped.signal
            if world.rank == 0:
                print(f"stopped by {stopped.signal.name} before the first step; there was nothing to save", flush=True)
            if not stopped.agreed:
                raise
    if stopped_by:
        raise typer.Exit(128 + stopped_by)


@app.command("config")
def show_config(config: ConfigFile, overrides: Overrides = None, debug: Debug = False) -> None:
    """Print the resolved run, each value with where it came from."""
    from shoal.config import derive_batches, load_run
    from shoal.config.batch import derived_values
    from shoal.config.mesh import check_layout

    run = load_run(config, overrides or ())
    ranks = check_layout(run.config, run.recipe_type(run.recipe_config), run.config.launch.processes)
    print(run.to_yaml(derived_values(derive_batches(run.config.training, ranks)[0], ranks)), end="")


@app.command()
def verify(
    config: ConfigFile,
    overrides: Overrides = None,
    procs: Annotated[int, typer.Option(help="Processes for the layouts that need several.")] = 2,
    strategies: Annotated[
        str, typer.Option(help="Which layouts, with commas between; `own` is the config's; all unless given.")
    ] = "",
    steps: Annotated[int, typer.Option(help="Steps to train in each.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    debug: Debug = False,
) -> None:
    """Prove that the layouts compute the same training, and do their work, on this config."""
    import json

    from shoal.config import load_run
    from shoal.verify import print_verdict, prove

    layouts = [name for name in strategies.split(",") if name] or None
    told = (lambda verdict: None) if as_json else print_verdict
    warn = partial(print, file=sys.stderr if as_json else sys.stdout)
    verdicts = prove(load_run(config, overrides or ()), procs, layouts, steps, told=told, warn=warn)
    if as_json:
        print(json.dumps([verdict.as_dict() for verdict in verdicts], indent=1))
    if not all(verdict.passed for verdict in verdicts):
        raise typer.Exit(1)


@app.command()
def chaos(
    config: ConfigFile,
    overrides: Overrides = None,
    kills: Annotated[int, typer.Option(help="How often to kill a process of the run.", min=1)] = 5,
    seed: Annotated[int, typer.Option(help="Decides victims and moments, as far as a clock can.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
    debug: Debug = False,
) -> None:
    """Kill the run at random, again and again, and prove that its end is that of an undisturbed one."""
    import json
    import tempfile

    from shoal.config import load_run
    from shoal.verify.chaos import chaos as wreak

    run = load_run(config, overrides or ())
    parent = Path(run.config.output_dir).parent
    parent.mkdir(parents=True, exist_ok=True)
    told = (lambda line: None) if as_json else (lambda line: print(line, flush=True))
    folder = Path(tempfile.mkdtemp(prefix=f"{run.config.experiment.name}-chaos-", dir=parent))
    verdict = wreak(config, overrides or [], run, folder / "runs", kills, seed, told)
    if verdict.passed:
        shutil.rmtree(folder)
    if as_json:
        print(json.dumps(verdict.as_dict(), indent=1))
    elif verdict.passed:
        how = "bit-equal" if verdict.allowed is None else f"within {verdict.allowed:.1e}, as two undisturbed runs are"
        print(f"survived {len(verdict.kills)} kills; the end is {how}, and so is the log")
    else:
        print("NOT the same after all:", *verdict.problems[:10], f"the runs are in {folder}", sep="\n  ")
    if not verdict.passed:
        raise typer.Exit(1)


def _tell(outcome: Outcome, run: Run, config: Path, overrides: list[str]) -> None:
    """The last words of a run: how it went and what can be done with it."""
    again = [_command("shoal"), "train", str(config)]
    if outcome.stopped_by:
        name = signal.Signals(outcome.stopped_by).name
        print(f"stopped by {name} at step {outcome.step} of {outcome.total_steps}; saved")
        print("go on with  ", shlex.join([*again, *overrides]), flush=True)
        return
    if outcome.preview:
        print(f"\na sample\n{'─' * 60}\n{outcome.preview}\n{'─' * 60}")
    if outcome.first_step == outcome.step:
        print(f"already finished at step {outcome.step}")
    else:
        losses = (f"{name} {value:.4f}" for name, value in outcome.metrics.items() if name.endswith("/loss"))
        print(f"finished at step {outcome.step}, {', '.join(losses)}")
    print("run folder  ", outcome.output_dir)
    if outcome.first_step < outcome.step < outcome.total_steps:
        print(f"the data ended before step {outcome.total_steps}")
    else:
        epochs = run.config.training.num_epochs
        key, value = ("num_epochs", 2 * epochs) if epochs else ("max_steps", 2 * outcome.step)
        others = [override for override in overrides if not override.startswith(f"training.{key}=")]
        print("go further  ", shlex.join([*again, *others, f"training.{key}={value}"]))
    print("look at it  ", shlex.join([_command("tensorboard"), "--logdir", str(outcome.output_dir)]))


def _command(name: str) -> str:
    """A command as this user can type it: by name if it is on the path, else where it lies."""
    beside = Path(sys.executable).parent / name
    found = shutil.which(name)
    if not beside.exists() or (found and Path(found).resolve() == beside.resolve()):
        return name
    return os.path.relpath(beside)


def main() -> None:
    try:
        app()
    except (UserError, PermissionError) as error:
        if "--debug" in sys.argv:
            raise
        print(f"shoal: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("shoal: interrupted", file=sys.stderr)
        sys.exit(130)
