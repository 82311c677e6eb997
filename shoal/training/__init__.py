"""The loop: step, optimizers, schedules, evaluation.

The names below are imported when they are first used: a launcher checks a run without them (see `preflight.py`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.training.loop import Outcome as Outcome
    from shoal.training.trainer import train as train

_MODULES = {"Outcome": "shoal.training.loop", "train": "shoal.training.trainer"}

__all__ = ["Outcome", "train"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'shoal.training' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
