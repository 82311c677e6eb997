"""The arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="The config file of the run, such as run.yaml.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Values to use instead of those in the file, such as training.max_steps=50."
    ),
]
BasePath = Annotated[
    Path | None,
    typer.Option("--base", metavar="PATH", help="The file or folder with the frozen weights, if they were moved."),
]
Debug = Annotated[bool, typer.Option("--debug", metavar="", help="Show the traceback of an error.")]
