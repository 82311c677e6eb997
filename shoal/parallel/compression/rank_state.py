"""State that every rank has for itself, as a checkpoint holds it: under the number of the rank, with its origin.

    rank_00001/residual/encoder      a tensor of rank 1
    rank_state.json                  the bytes of a JSON text: what the state depends on, such as method and mesh

A tensor in a checkpoint is otherwise the same on all ranks that have it, or a part of a whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

ORIGIN = "rank_state.json"
_RANK = re.compile(r"rank_(\d{5,})/")


def tag_with_rank(state: Mapping[str, Tensor], origin: Mapping[str, Any], rank: int) -> dict[str, Tensor]:
    """Returns a rank's state by names that no other rank has, and its origin, which is the same on all ranks."""
    text = bytearray(json.dumps(origin, sort_keys=True).encode())
    return {
        ORIGIN: torch.frombuffer(text, dtype=torch.uint8),
        **{f"rank_{rank:05d}/{name}": tensor for name, tensor in state.items()},
    }


def rank_of(name: str) -> int | None:
    """Returns the rank that a stored tensor belongs to; None if it belongs to all."""
    found = _RANK.match(name)
    return int(found[1]) if found else None


def state_of_rank(
    stored: Mapping[str, Any], origin: Mapping[str, Any], rank: int
) -> tuple[dict[str, Tensor], Mapping[str, Any] | None]:
    """Returns the state of this rank and None, or no state and the other origin that it was saved with.

    `stored` may have tensors that are still on disk; that of other ranks is not read.
    """
    then: Mapping[str, Any] = {}
    if ORIGIN in stored:
        then = json.loads(bytes(_read(stored[ORIGIN]).tolist()))
    if then != json.loads(json.dumps(origin)):
        return {}, then
    prefix = f"rank_{rank:05d}/"
    return {name.removeprefix(prefix): _read(t) for name, t in stored.items() if name.startswith(prefix)}, None


def _read(tensor: Any) -> Tensor:
    return tensor if isinstance(tensor, Tensor) else tensor.read()
