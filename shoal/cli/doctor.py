"""`shoal doctor`: examines the machine and its network before a run uses them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.arguments import Debug, Overrides
from shoal.cli.train import set_variables
from shoal.errors import UserError


def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", help="The config file of the run to examine for.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    procs: Annotated[
        int | None, typer.Option(metavar="N", help="Measure the network between N processes of this machine.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print JSON instead of text.")] = False,
    debug: Debug = False,
) -> None:
    """Find out what will break or be slow, before a run does.

    Looks at versions, GPUs, compilers, limits, disk, names and ports; with a config, for what that run needs. Started
    by torchrun or srun it examines all machines and measures the network between them. Changes nothing.

    Exit codes: 0, or 1 if something will break, or 2 for a mistake in the config or the command.
    """
    if procs is not None and procs < 2:
        raise UserError(f"--procs {procs}: the network is measured between at least 2 processes; use 2 or more")
    words = [*([str(config)] if config else []), *(overrides or ())]
    if config is not None:
        set_variables(config, overrides or ())
    from shoal.config import load_run
    from shoal.doctor.diagnosis import diagnose_here
    from shoal.doctor.text import format_text
    from shoal.doctor.together import diagnose_together, find_world
    from shoal.launch.mistakes import explained

    with explained():
        run = load_run(config, overrides or ()) if config else None
    world = find_world(run)
    if procs is not None and world.size > 1:
        raise UserError(
            f"--procs {procs}: the run has {world.size} processes or machines already ({world.environment}); leave "
            "--procs out, or set launch.procs_per_node"
        )
    if run is not None and world.starts and world.size > 1:
        from shoal.launch.launcher import start

        flags = [flag for flag in ("--json", "--debug") if flag in sys.argv]
        raise typer.Exit(start(run, world, ["doctor", *words, *flags]))
    name, on_terminal = str(config) if config else None, sys.stderr.isatty()
    if world.size > 1:
        diagnosis = diagnose_together(run, name, world)
    else:
        diagnosis = diagnose_here(run, name, world, procs, _show_check if on_terminal else lambda check: None)
        if on_terminal:
            _show_check("")
    if diagnosis is None:  # rank 0 has it
        return
    print(json.dumps(diagnosis.as_dict(), indent=1) if as_json else format_text(diagnosis), flush=True)
    if diagnosis.exit_code:
        raise typer.Exit(diagnosis.exit_code)


def _show_check(name: str) -> None:
    """Shows on a terminal what is being examined, on a line that the next one overwrites; an empty name clears it."""
    text = f"examining: {name}" if name else ""
    print(f"\r{text}\033[K\r", end="", file=sys.stderr, flush=True)
