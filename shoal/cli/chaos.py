"""`shoal chaos`: kills processes of a run at random and checks that the run ends as an undisturbed one."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.arguments import ConfigFile, Debug, Overrides


def chaos(
    config: ConfigFile,
    overrides: Overrides = None,
    kills: Annotated[int, typer.Option(help="Number of processes to kill, one after another.", min=1)] = 5,
    seed: Annotated[
        int, typer.Option(help="Seed for choosing processes and moments (which also depend on the clock).")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print JSON instead of lines.")] = False,
    debug: Debug = False,
) -> None:
    """Check that a run survives kills: train it twice, once with random kills, and compare the ends.

    Both runs are written to a temporary folder beside the run's, which is removed if they agree. Exit codes: 0 if they
    do, 1 if not, 2 for a mistake in the config.
    """
    from shoal.config import load_run
    from shoal.verify.chaos import chaos as run_chaos

    run = load_run(config, overrides or ())
    parent = Path(run.config.output_dir).parent
    parent.mkdir(parents=True, exist_ok=True)
    on_line = (lambda line: None) if as_json else (lambda line: print(line, flush=True))
    folder = Path(tempfile.mkdtemp(prefix=f"{run.config.experiment.name}-chaos-", dir=parent))
    verdict = run_chaos(config, overrides or [], run, folder / "runs", kills, seed, on_line)
    if verdict.passed:
        shutil.rmtree(folder)
    if as_json:
        print(json.dumps(verdict.as_dict(), indent=1))
    elif verdict.passed:
        how = "bit for bit" if verdict.allowed is None else f"within the allowed difference of {verdict.allowed:.1e}"
        print(f"same result after {len(verdict.kills)} kills as without interruption: checkpoint and logs agree {how}")
    else:
        print("NOT the same result as without interruption:", *verdict.problems[:10], f"see {folder}", sep="\n  ")
    raise typer.Exit(0 if verdict.passed else 1)
