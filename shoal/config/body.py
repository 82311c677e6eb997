"""The function that `training.body` names, and what a run whose steps it computes cannot have."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shoal.config.callbacks import CallbackChoice
from shoal.config.classes import OBJECT_PATH
from shoal.config.importable import NOT_IMPORTABLE
from shoal.config.imports import add_folders, import_object
from shoal.config.yaml import Sources, named
from shoal.errors import UserError

NO_WAY_BACK = "steps that you write yourself cannot be taken back to a checkpoint"
"""The reason why a run with such steps refuses `go_back`."""


def import_body(name: str, sources: Sources, import_from: Path | None = None) -> Any:
    """Returns the function for `training.body: module:function`."""
    where = f"{named('training.body', sources)} = {name!r:.200}"
    if name.startswith(NOT_IMPORTABLE):
        raise UserError(
            f"{where}: this run was started from a script or notebook with a loop that cannot be imported; continue it "
            "there, or move the body of the loop into a function body(run, step) in a module"
        )
    if not OBJECT_PATH.match(name):
        raise UserError(f"{where} should be package.module:function")
    add_folders(import_from)
    body = import_object(name, where)
    if not callable(body):
        raise UserError(f"{where}: it is a {type(body).__name__}; give a function body(run, step)")
    return body


def check_callbacks_of_body(callbacks: Iterable[CallbackChoice]) -> None:
    """Refuses the built-in callback that goes back to a checkpoint."""
    for choice in callbacks:
        if choice.name.partition(".")[0] == "loss_spike":
            raise UserError(f"callbacks: loss_spike: {NO_WAY_BACK}; leave it out, or train the recipe's loss")
