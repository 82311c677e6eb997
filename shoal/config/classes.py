"""Imports the classes that a config names: recipes and callbacks, built in or the user's own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shoal.config.imports import add_folders, did_you_mean, import_object
from shoal.errors import UserError

OBJECT_PATH = re.compile(r"^[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*$")
"""`package.module:name`, each part a name of Python."""


def import_class(where: str, name: Any, short_names: Mapping[str, str], import_from: Path | None) -> Any:
    """Returns what `name` or `module:Class` stands for, also from the current folder or `import_from`.

    `where` is the key with its value, for messages; `short_names` are the built-in classes by name.
    """
    if not isinstance(name, str) or not (name in short_names or OBJECT_PATH.match(name)):
        choices = say_choices(short_names)
        raise UserError(f"{where} is unknown; set it to {choices}{did_you_mean(str(name)[:100], short_names)}")
    if name not in short_names:  # an export of an untrusted checkpoint must not import from the current folder
        add_folders(import_from)
    return import_object(short_names.get(name, name), where)


def say_choices(short_names: Iterable[str]) -> str:
    """Returns the values that a key for a class may have, in words."""
    return f"one of {', '.join(short_names)}, or to your own as package.module:Class"
