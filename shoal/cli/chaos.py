"""`shoal chaos`: kills a run at random and proves that its end does not change."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.arguments import ConfigFile, Debug, Overrides


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

    from shoal.config import load_run
    from shoal.verify.chaos import chaos as wreak

    run = load_run(config, overrides or ())
    parent = Path(run.config.output_dir).parent
    parent.mkdir(parents=True, exist_ok=True)
    on_line = (lambda line: None) if as_json else (lambda line: print(line, flush=True))
    folder = Path(tempfile.mkdtemp(prefix=f"{run.config.experiment.name}-chaos-", dir=parent))
    verdict = wreak(config, overrides or [], run, folder / "runs", kills, seed, on_line)
    if verdict.passed:
        shutil.rmtree(folder)
    if as_json:
        print(json.dumps(verdict.as_dict(), indent=1))
    elif verdict.passed:
        how = "bit for bit" if verdict.allowed is None else f"within the allowed difference of {verdict.allowed:.1e}"
        print(f"same result after {len(verdict.kills)} kills as without interruption: checkpoint and logs agree {how}")
    else:
        print("NOT the same result as without interruption:", *verdict.problems[:10], f"see {folder}", sep="\n  ")
    if not verdict.passed:
        raise typer.Exit(1)
