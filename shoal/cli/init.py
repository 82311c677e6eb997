"""`shoal init`: writes a folder with a recipe, a config and a test to start a project from."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.arguments import Debug
from shoal.errors import UserError, printable

TEMPLATE = Path(__file__).parent.parent / "project_template"
FILES = ("recipe.py", "run.yaml", "test_recipe.py", "README.md")
_TEMPLATE_NAME = "my_project"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,99}")


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="NAME", help="The folder to write. Its name becomes the name of the run.")
    ],
    debug: Debug = False,
) -> None:
    """Start a project: write a folder with a small recipe to replace by your own, a config and a test."""
    write_project(folder)
    for file in FILES:
        print(printable(str(folder / file)))
    print("next        ", printable(f"{shlex.join(['cd', str(folder)])} && shoal train run.yaml"))


def write_project(folder: Path) -> None:
    """Writes the files of the template into a folder that is empty or does not exist."""
    name = folder.resolve().name
    if not _NAME.fullmatch(name):
        raise UserError(
            f"NAME = {name!r:.200}: this cannot name a project; use up to 100 letters, digits, - and _, a letter first"
        )
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"NAME = {str(folder)!r}: this exists and is not an empty folder; choose another name")
        folder.mkdir(parents=True, exist_ok=True)
        for file in FILES:
            (folder / file).write_text((TEMPLATE / file).read_text().replace(_TEMPLATE_NAME, name))
    except OSError as error:
        raise UserError(f"NAME = {str(folder)!r}: it cannot be written: {error.strerror}; choose another") from None
