"""What an optimizer keeps for a parameter, as tensors: a checkpoint holds nothing else.

Numbers of Python, such as a step count, become tensors of no dimension, under a name that tells their type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.errors import UserError

_TYPES: Mapping[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
_BY_SUFFIX = {f".{kind.__name__}": kind for kind in _TYPES}


def slots_as_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the slots of one parameter; None is left out, because torch's optimizers mean a missing slot by it."""
    tensors: dict[str, Tensor] = {}
    for slot, value in state.items():
        if isinstance(value, Tensor):
            tensors[slot] = value
        elif type(value) in _TYPES:
            tensors[f"{slot}.{type(value).__name__}"] = torch.tensor(value, dtype=_TYPES[type(value)])
        elif value is not None:
            raise UserError(
                f"the optimizer keeps a {type(value).__name__} as {slot!r} in its state, which a checkpoint cannot "
                "hold; keep tensors and numbers"
            )
    return tensors


def slot_of(name: str, value: Tensor) -> tuple[str, Any]:
    """Returns the slot that a tensor was stored for, and its value: the tensor, or the number that it stands for."""
    slot, dot, kind = name.rpartition(".")
    number = _BY_SUFFIX.get(dot + kind)
    return (slot, number(value.item())) if number is not None else (name, value)
