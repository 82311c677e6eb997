"""An average of the weights over steps, sharded as the parameters are."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.errors import UserError
from shoal.torch_private import move_towards

if TYPE_CHECKING:
    from shoal.strategies.local_weights import LocalWeights

KIND = "average"
"""The first part of the names of an average's tensors in the state of a callback."""
_BUCKET_NUMEL = 1 << 26
"""How many elements are updated at a time; the update needs memory for as many."""


class Average:
    """This rank's part of the average of each trained parameter, in fp32 or a more exact dtype."""

    def __init__(self, weights: LocalWeights):
        """Begins with the weights as they are."""
        self._weights = weights
        self.values = {name: _accumulator(part) for name, part in weights.parts.items()}
        self._buckets = _buckets(self.values, weights.parts)

    @torch.no_grad()
    def update(self, weight: Tensor) -> None:
        """Moves the average towards the weights by a fraction, a number on the device; 0 changes nothing."""
        for averages, parts in self._buckets:
            move_towards(averages, parts, weight.to(averages[0].device))  # another one only if DeepSpeed offloads

    def in_use(self) -> AbstractContextManager[None]:
        """Returns a context in which the model computes with the average."""
        return self._weights.replaced_by(self.values)

    def state(self) -> dict[str, Tensor]:
        """Returns the tensors for the state of a callback."""
        return {f"{KIND}/{name}": value for name, value in self.values.items()}

    def load_state(self, state: Mapping[str, Any], owner: str) -> None:
        """Takes the tensors from the state of the callback `owner`."""
        for name, value in self.values.items():
            if f"{KIND}/{name}" not in state:
                raise UserError(
                    f"callbacks: {owner}: the checkpoint has no average of {name}, which was not trained when it was "
                    "saved; freeze it again, or resume without the callback"
                )
            value.copy_(state[f"{KIND}/{name}"])


def _accumulator(part: Tensor) -> Tensor:
    """Returns a copy that is exact enough to add small changes to."""
    small = part.is_floating_point() and part.dtype.itemsize < 4
    return part.to(torch.float32 if small else part.dtype, copy=True)


def _buckets(values: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Returns averages and weights that are updated together."""
    buckets: list[tuple[list[Tensor], list[Tensor]]] = []
    numel = 0
    for name, value in values.items():
        if not buckets or numel + value.numel() > _BUCKET_NUMEL:
            buckets.append(([], []))
            numel = 0
        numel += value.numel()
        buckets[-1][0].append(value)
        buckets[-1][1].append(parts[name])
    return buckets
