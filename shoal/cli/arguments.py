"""The arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file of the run.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Values that win over the file's, e.g. training.max_steps=50."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
