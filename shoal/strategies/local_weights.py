"""This rank's part of the trained parameters, for averages that are sharded as the parameters are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.checkpoint.pieces import StoredTensor
from shoal.strategies.state import part_in_layout
from shoal.tensors import local_part, named_tensors
from shoal.torch_private import as_shard


class LocalWeights:
    """The parts of a model whose parameters are plain tensors or DTensors."""

    def __init__(self, model: nn.Module):
        self._tensors = named_tensors(model)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.parts = {name: local_part(tensor) for name, tensor in self._tensors.items() if name in trained}
        """This rank's part of each trained parameter, in the memory that the optimizer updates."""

    def holds(self, name: str) -> bool:
        """Returns whether this rank has a part of a parameter or buffer; it has none of another pipeline stage."""
        return name in self._tensors

    def as_stored(self, name: str, part: Tensor) -> Tensor:
        """Returns a part as a checkpoint stores it: as this rank's shard of a tensor that is sharded as `name` is."""
        like = self._tensors[name]
        return as_shard(part, like) if isinstance(like, DTensor) else part

    def read_part(self, name: str, stored: Tensor | StoredTensor) -> Tensor:
        """Returns this rank's part of a stored tensor; the inverse of `as_stored`."""
        return part_in_layout(stored, self._tensors[name])

    @contextmanager
    def replaced_by(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Computes with other values, and then puts the weights back to the bit.

        A value of the parameter's dtype changes places with it, so that memory is needed for one tensor at a time.
        """
        kept = {name: part.clone() for name, part in self.parts.items() if values[name].dtype != part.dtype}
        self._exchange(values)
        try:
            yield
        finally:
            self._exchange(values)
            for name, before in kept.items():
                self.parts[name].copy_(before)

    @torch.no_grad()
    def _exchange(self, values: Mapping[str, Tensor]) -> None:
        for name, part in self.parts.items():
            value = values[name]
            if value.dtype != part.dtype:
                part.copy_(value)
                continue
            before = part.clone()
            part.copy_(value)
            value.copy_(before)
