"""The trained model of a checkpoint or a run, for use in Python. A checkpoint is data: nothing that it names is run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from shoal.checkpoint import Checkpoint, DamagedCheckpoint, step_folders
from shoal.checkpoint.frozen_base import FrozenBaseError
from shoal.checkpoint.inspect import open_step_folder
from shoal.checkpoint.latest import named_checkpoint
from shoal.checkpoint.manifest import MANIFEST
from shoal.checkpoint.rotation import best_first_folders
from shoal.checkpoint.trained_model import Source, build_model, built_in_recipe, make_recipe, recipe_sections
from shoal.errors import UserError
from shoal.strategies.module_state import ModuleState


def load(
    checkpoint: str | os.PathLike[str],
    *,
    recipe: Any = None,
    device: str | torch.device = "cpu",
    which: Literal["latest", "best"] = "latest",
    average: str | None = None,
    base: str | os.PathLike[str] | None = None,
) -> nn.Module:
    """Returns the model of a checkpoint folder or a run folder, in evaluation mode, whatever layout trained it.

    Of a run folder it is the latest good checkpoint, or the best one; `RUN/last` and `RUN/best` name them, too.
    Recipes that shoal ships are found by their names; any other has to be passed: its class, which is built with the
    checkpoint's config, or an object. `average` names a callback, such as `ema`, whose average is loaded in place of
    the weights, or is `evaluated`: the average that the last evaluation used, if it used one. That is the default with
    `which="best"`; `none` loads the weights. `base` is the file or folder with the frozen weights, if they were
    moved.
    """
    average = average or ("evaluated" if which == "best" else "none")
    path, place = named_checkpoint(Path(checkpoint)), None if base is None else Path(base)
    if which not in ("latest", "best"):
        raise UserError(f"shoal.load: which = {which!r}: use latest or best")
    if (path / MANIFEST).exists() or not step_folders(path):
        try:
            return _load(open_step_folder(path, place), recipe, device, average)
        except DamagedCheckpoint as damage:
            raise UserError(f"{path} is a damaged checkpoint: {damage}; choose another") from None
    damages: list[str] = []
    for folder in best_first_folders(path) if which == "best" else step_folders(path)[::-1]:
        try:
            return _load(open_step_folder(folder, place), recipe, device, average)
        except DamagedCheckpoint as damage:
            damages.append(str(damage))
            warnings.warn(f"{folder.name} is damaged and passed over: {damage}", stacklevel=2)
    problem = f"all checkpoints are damaged ({damages[0]})" if damages else "no checkpoint was evaluated"
    raise UserError(f"{path}: {problem}; choose another folder" + ("" if damages else ", or which='latest'"))


def _load(checkpoint: Checkpoint, recipe: Any, device: str | torch.device, average: str) -> nn.Module:
    with base_needed(checkpoint.folder):
        source = Source(checkpoint, dtype=None, adapter_only=False, average=_callback_of(checkpoint, average))
        model = build_model(_find_recipe(checkpoint, recipe), source, "pass the recipe that it was trained with")
        stored = {name: tensor.read() for name, tensor in checkpoint.stored_state().strategy.items()}  # type: ignore[attr-defined]
    ModuleState(model, ()).set_extra_state(stored)
    return model.to(device)


@contextmanager
def base_needed(folder: Path) -> Iterator[None]:
    """Adds to an error about the frozen base of a checkpoint what to do about it."""
    try:
        yield
    except FrozenBaseError as error:
        raise UserError(
            f"{folder} refers to frozen weights, but {error}; give --base PATH if they were moved (in Python "
            "base=PATH), or put them back"
        ) from None


def _callback_of(checkpoint: Checkpoint, average: str) -> str | None:
    """Returns the callback whose average is to be loaded, or None."""
    if average != "evaluated":
        return None if average == "none" else average
    evaluated = str(checkpoint.trainer.get("evaluated_weights", ""))
    has_it = evaluated and any(name.startswith(f"{evaluated}/") for name in checkpoint.stored_state().callbacks)
    return evaluated.partition("/")[0] if has_it else None


def _find_recipe(checkpoint: Checkpoint, recipe: Any) -> Any:
    """Returns the recipe that builds the model: the one that was passed, or a built-in one by its name."""
    if recipe is None:
        advice = "pass it as shoal.load(..., recipe=MyRecipe)"
        return make_recipe(*built_in_recipe(checkpoint, "shoal.load", advice))
    kind = recipe if isinstance(recipe, type) else type(recipe)
    if not hasattr(kind, "Config"):
        raise UserError(f"shoal.load: recipe = {recipe!r:.100} is not a recipe; pass a recipe class or object")
    if kind is not recipe:
        return recipe
    return make_recipe(kind.__name__, recipe_sections(checkpoint), kind)
