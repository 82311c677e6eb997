"""Importing what a config names as `package.module:name`: a recipe, an optimizer, a schedule."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shoal.config.schema import TrainingConfig
from shoal.config.schema_optimizers import Imported, ImportedOptimizer
from shoal.config.yaml import Sources, named
from shoal.errors import UserError, one_line


def add_folders(import_from: Path | None) -> None:
    """Lets Python import from the current folder and from the folder of the config."""
    sys.path[:0] = [folder for folder in dict.fromkeys(("", str(import_from or ""))) if folder not in sys.path]


def import_object(path: str, where: str) -> Any:
    """Returns what `package.module:name` names; `where` begins the messages, such as `recipe = a.b:C`."""
    module_name, name = path.split(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):  # something that the module imports
            raise
        raise UserError(
            f"{where}: no module {error.name!r} in the config's folder, {Path.cwd()} or the Python path"
        ) from None
    if not hasattr(module, name):
        raise UserError(f"{where}: {module_name} has no {name!r}{did_you_mean(name, dir(module))}")
    return getattr(module, name)


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    return "".join(f"; did you mean {near!r}?" for near in get_close_matches(name, choices, n=1))


def check_imports(training: TrainingConfig, sources: Sources, import_from: Path | None) -> None:
    """Imports the optimizer and the schedule if they are the user's own, and refuses what cannot be used."""
    if isinstance(training.optimizer, Imported) or isinstance(training.lr_scheduler, Imported):
        add_folders(import_from)
    if isinstance(chosen := training.optimizer, ImportedOptimizer):
        _check_class(chosen, f"{named('training.optimizer', sources)} = {chosen.name!r}")
    if isinstance(training.lr_scheduler, Imported):
        name = training.lr_scheduler.name
        where = f"{named('training.lr_scheduler', sources)} = {name!r}"
        function = import_object(name, where)
        try:
            inspect.signature(function).bind(0, 1)
        except (TypeError, ValueError):
            raise UserError(f"{where} must be a function f(step, total_steps) that returns a factor") from None


def optimizer_arguments(kind: type[Any], training: TrainingConfig, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of an optimizer's constructor: its options, and the rate and decay if it takes them."""
    common = {"lr": training.learning_rate, "weight_decay": training.weight_decay}
    return {**{key: value for key, value in common.items() if takes(kind, key)}, **options}


def takes(kind: type[Any], argument: str) -> bool:
    """Returns whether a constructor has an argument of this name."""
    parameters = inspect.signature(kind).parameters
    return argument in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _check_class(chosen: ImportedOptimizer, where: str) -> None:
    from torch.optim import Optimizer

    kind = import_object(chosen.name, where)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise UserError(f"{where} is not an optimizer; make it a subclass of torch.optim.Optimizer")
    for key, common in (("lr", "learning_rate"), ("weight_decay", "weight_decay")):
        if key in chosen.options:
            raise UserError(f"training.optimizer.{key} = {chosen.options[key]!r}: set training.{common} instead")
    known = [*inspect.signature(kind).parameters][1:]
    for key in chosen.options:
        if not takes(kind, key):
            has = f"; it has {', '.join(known)}" if known else ""
            raise UserError(
                f"training.optimizer.{key}: {one_line(kind.__name__)} has no such argument"
                f"{did_you_mean(key, known) or has}"
            )
