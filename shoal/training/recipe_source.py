"""Notices that the code of a recipe has changed between the runs of one training."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path
from typing import Any

import shoal


def recipe_source(recipe_type: type[Any]) -> dict[str, str] | None:
    """Returns the file of a user's recipe and a digest of it; None for shoal's recipes, or if there is no file."""
    try:
        path = Path(inspect.getfile(recipe_type)).resolve()
        if path.is_relative_to(Path(shoal.__file__).resolve().parent):
            return None
        return {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    except (OSError, TypeError):
        return None


def describe_change(then: Any, now: dict[str, str] | None) -> str:
    """Returns what to warn of if a checkpoint was made with another text of the recipe's file, or an empty string.

    `then` comes from a manifest, which is not trusted; checkpoints of earlier versions have none.
    """
    if now is None or not isinstance(then, dict) or then.get("sha256") in (None, now["sha256"]):
        return ""
    return f"the recipe's file {now['file']} has changed since the checkpoint; the run goes on with the new code"
