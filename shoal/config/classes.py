"""Imports the classes that a config names: recipes and callbacks, built in or the user's own."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shoal.errors import UserError

_CLASS_PATH = re.compile(r"^[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*$")
"""`package.module:Class`, each part a name of Python."""


def import_class(where: str, name: Any, short_names: Mapping[str, str], import_from: Path | None) -> Any:
    """Returns what `name` or `module:Class` stands for, also from the current folder or `import_from`.

    `where` is the key with its value, for messages; `short_names` are the built-in classes by name.
    """
    if not isinstance(name, str) or not (name in short_names or _CLASS_PATH.match(name)):
        choices = say_choices(short_names)
        raise UserError(f"{where} is unknown; set it to {choices}{_did_you_mean(str(name)[:100], short_names)}")
    module_name, class_name = short_names.get(name, name).split(":")
    if name not in short_names:  # an export of an untrusted checkpoint must not import from the current folder
        sys.path[:0] = [folder for folder in dict.fromkeys(("", str(import_from or ""))) if folder not in sys.path]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):  # something that the user's module imports
            raise
        raise UserError(
            f"{where}: no module {error.name!r} in the config's folder, {Path.cwd()} or the Python path"
        ) from None
    if not hasattr(module, class_name):
        raise UserError(f"{where}: {module_name} has no {class_name!r}{_did_you_mean(class_name, dir(module))}")
    return getattr(module, class_name)


def say_choices(short_names: Iterable[str]) -> str:
    """Returns the values that a key for a class may have, in words."""
    return f"one of {', '.join(short_names)}, or to your own as package.module:Class"


def _did_you_mean(name: str, choices: Iterable[str]) -> str:
    return "".join(f"; did you mean {near!r}?" for near in get_close_matches(name, choices, n=1))
