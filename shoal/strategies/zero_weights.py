"""This rank's part of the trained parameters under ZeRO: stretches of the flat tensors that DeepSpeed updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from shoal.checkpoint.pieces import StoredTensor
from shoal.parallel.zero.partition import Partition
from shoal.strategies.local_weights import LocalWeights
from shoal.tensors import named_tensors


class ZeroWeights(LocalWeights):
    """The parts of a model that DeepSpeed has partitioned. Checkpoints hold them in rows, as they hold its weights."""

    def __init__(
        self,
        model: nn.Module,
        partition: Partition,
        as_rows: Callable[[str, Tensor, Tensor], Tensor],
        own_elements: Callable[[str, Tensor, Any], Tensor],
    ):
        """`as_rows` and `own_elements` turn a part into rows of a tensor and back, by exchanging it between ranks."""
        self._tensors, self._partition = named_tensors(model), partition
        self._as_rows, self._own_elements = as_rows, own_elements
        self._trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.parts = {name: partition.part(name, partition.flats[partition.group[name]]) for name in self._trained}

    def as_stored(self, name: str, part: Tensor) -> Tensor:
        return self._as_rows(name, self._trained[name], part) if name in self._trained else part

    def read_part(self, name: str, stored: Tensor | StoredTensor) -> Tensor:
        if name in self._trained:
            return self._own_elements(name, self._trained[name], stored)
        return super().read_part(name, stored)

    def _exchange(self, values: Mapping[str, Tensor]) -> None:
        super()._exchange(values)
        self._partition.publish_weights()
