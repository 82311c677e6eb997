"""The commands. Thin: torch is imported only by those that need it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import shoal
from shoal.cli import checkpoint
from shoal.cli.chaos import chaos
from shoal.cli.config import show_config
from shoal.cli.train import train
from shoal.cli.verify import verify
from shoal.errors import UserError

app = typer.Typer(
    help="Distributed training on PyTorch: write what to train, set how it is spread.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command()(train)
app.command("config")(show_config)
app.command()(verify)
app.command()(chaos)
app.add_typer(checkpoint.app, name="checkpoint")


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
