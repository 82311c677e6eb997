"""`shoal verify`: checks that all layouts compute the same training."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Annotated

import typer

from shoal.cli.arguments import ConfigFile, Debug, Overrides


def verify(
    config: ConfigFile,
    overrides: Overrides = None,
    procs: Annotated[int, typer.Option(help="Number of processes to check layouts on.")] = 2,
    strategies: Annotated[
        str,
        typer.Option(help="Layouts to check, such as ddp,fsdp; 'own' is that of the config. Default: all that fit."),
    ] = "",
    steps: Annotated[int, typer.Option(help="Number of steps to train in each layout.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print JSON instead of a table.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", metavar="", help="Print every check of every layout.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Check that your model trains the same under every layout (ddp, fsdp, tensor parallel, ...).

    Trains a few steps on one process and in every layout on several, and compares losses, gradients, weights and the
    work that each rank did. Dropout is off meanwhile. It runs on CPUs too, and leaves no run folder.

    Exit codes: 0 if all agree, 1 if a layout computes something else, 2 for a mistake in the config or a layout in
    --strategies that refuses the model, 3 if a layout does other work than promised or cannot be compared.
    """
    from shoal.config import load_run
    from shoal.verify import Table, Verdict, exit_code, print_verdict, prove
    from shoal.verify.verdicts import Waiting

    layouts = [name for name in strategies.split(",") if name] or None
    table, waiting = Table(), Waiting()

    def say(verdict: Verdict) -> None:
        waiting.hide()
        if verbose:
            print_verdict(verdict)
        else:
            table.add(verdict)

    on_verdict = (lambda verdict: None) if as_json else say
    on_warning = partial(print, file=sys.stderr if as_json else sys.stdout)
    run = load_run(config, overrides or ())
    try:
        verdicts = prove(
            run, procs, layouts, steps, on_verdict=on_verdict, on_warning=on_warning, on_start=waiting.show
        )
    finally:
        waiting.hide()
    if as_json:
        print(json.dumps([verdict.as_dict() for verdict in verdicts], indent=1))
    elif not verbose:
        table.explain()
    if code := exit_code(verdicts, asked_by_name=bool(layouts)):
        raise typer.Exit(code)
