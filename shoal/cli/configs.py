"""`shoal configs …`: the commands that list and copy the config files that come with shoal."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.app import App
from shoal.cli.arguments import Debug
from shoal.errors import printable

app = App(help="List or copy the config files that come with shoal.", no_args_is_help=True)


@app.command()
def ls(debug: Debug = False) -> None:
    """List the configs, each with what it trains."""
    from shoal.config.shipped import shipped_configs

    configs = shipped_configs()
    width = max(map(len, configs))
    for name, description in configs.items():
        print(f"{name:{width}}  {description}")


@app.command()
def cp(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name from the list of shoal configs ls.")],
    to: Annotated[
        Path,
        typer.Argument(metavar="TO", help="The folder to copy to, or a file name that ends in .yaml."),
    ] = Path("configs"),
    force: Annotated[bool, typer.Option("--force", metavar="", help="Replace files that exist.")] = False,
    debug: Debug = False,
) -> None:
    """Copy a config, with the files that it extends, to edit and train it."""
    from shoal.config.shipped import copy_config

    copies = copy_config(name, to, force)
    for path in copies:
        print(printable(str(path)))
    print("train with  ", printable(shlex.join(["shoal", "train", str(copies[0])])))
