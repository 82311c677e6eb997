"""The command `shoal`. torch is imported by the commands that need it, so that `shoal --help` is fast."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

import shoal
from shoal.cli import checkpoint, configs
from shoal.cli.app import App
from shoal.cli.chaos import chaos
from shoal.cli.chat import chat
from shoal.cli.config import show_config
from shoal.cli.data import data
from shoal.cli.demo import demo
from shoal.cli.doctor import doctor
from shoal.cli.init import init
from shoal.cli.launch import launch
from shoal.cli.train import train
from shoal.cli.translate import translate
from shoal.cli.verify import verify
from shoal.errors import UserError, one_line
from shoal.observe.quiet import quiet_imports

app = App(
    help="Distributed training on PyTorch. A recipe in Python says what to train (model, data, loss), a config file in "
    "YAML says how: steps, precision, and how it is spread over GPUs and machines.\n\nNew to shoal? Try shoal demo, "
    "then shoal init my_project.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",  # wraps paragraphs to the width of the terminal
    pretty_exceptions_enable=False,
)

app.command()(demo)
app.command()(init)
app.command()(train)
app.command()(launch)
app.command("config")(show_config)
app.command()(translate)
app.command()(data)
app.command()(doctor)
app.command()(verify)
app.command()(chaos)
app.command()(chat)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(configs.app, name="configs")


def _print_version(requested: bool) -> None:
    if requested:
        print(f"shoal {shoal.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    local_rank: Annotated[int | None, typer.Option("--local_rank", "--local-rank", hidden=True)] = None,
) -> None:
    """Accepts --local_rank, which DeepSpeed's launcher adds before the command. The environment has the value
    already."""


_SHOW_WARNING = warnings.showwarning


def _show_warning(message: Warning | str, category: type[Warning], filename: str, *rest: Any, **options: Any) -> None:
    """Shows a warning of shoal's own in one line, without the place in its code."""
    if Path(filename).is_relative_to(Path(__file__).parents[1]):
        print(f"shoal: warning: {message}", file=sys.stderr)
    else:
        _SHOW_WARNING(message, category, filename, *rest, **options)


def main() -> None:
    """Runs the command line. A UserError is printed in one line and exits with code 2."""
    quiet_imports()
    warnings.showwarning = _show_warning
    try:
        app()
    except (UserError, PermissionError) as error:
        if "--debug" in sys.argv:
            raise
        print(f"shoal: error: {one_line(error, limit=10_000)}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as end:
        # typer makes an exit code of Ctrl-C and says nothing. A run that has begun has said more.
        if isinstance(getattr(end.__context__, "__cause__", None), KeyboardInterrupt):
            print("shoal: interrupted", file=sys.stderr)
        raise
