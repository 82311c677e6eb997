"""Recipes and functions that Python code hands over: the names by which a run folder records them.

A run that was started from Python can be continued by a command if what it was started with can be imported. If not,
the recorded name says so, and the command line refuses it.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from inspect import signature
from typing import Any

NOT_IMPORTABLE = "not importable: "
"""How the recorded name of something begins that only the program has which started the run."""


def importable_name(thing: Any) -> str | None:
    """Returns `module:name` of a class or function at the top level of a module; None for all others.

    What a script or a notebook defines is in `__main__`, which is another module in every program.
    """
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    if module in (None, "__main__", "__mp_main__") or getattr(sys.modules.get(module), name, None) is not thing:
        return None
    return f"{module}:{name}"


def recorded_name(thing: Any) -> str:
    """Returns the name that a run folder has for a class or function."""
    module = str(getattr(thing, "__module__", None)).replace("__mp_main__", "__main__")
    return importable_name(thing) or f"{NOT_IMPORTABLE}{module}.{getattr(thing, '__qualname__', type(thing).__name__)}"


def is_built_from_config(recipe: Any) -> bool:
    """Returns whether `type(recipe)(recipe.config)` makes a recipe like this one."""
    kind, config = type(recipe), config_of(recipe)
    if [*signature(kind).parameters] != ["config"] or config is None:
        return False
    with suppress(Exception):  # a constructor may raise anything
        return vars(recipe).keys() <= vars(kind(config)).keys()  # attributes that were set later would be lost
    return False


def config_of(recipe: Any) -> Any:
    """Returns the config that a recipe object was built with, or None if it keeps none."""
    config = getattr(recipe, "config", None)
    return config if isinstance(config, type(recipe).Config) else None
