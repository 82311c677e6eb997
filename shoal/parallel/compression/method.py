"""What a method of compression is: tensors by name in, for each the sum over ranks and what was not sent out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.parallel.compression.wire import Wire


class Exchanged(NamedTuple):
    """The outcome for one tensor."""

    total: Tensor
    """The sum over ranks, equal on all of them."""
    unsent: Tensor
    """The part of this rank's tensor that is not in the sum."""


class Method(ABC):
    """Sums tensors over ranks in fewer bytes. All ranks call `exchange` with the same names and shapes."""

    def compresses(self, shape: torch.Size) -> bool:
        """Returns whether tensors of this shape are worth it; others are summed as they are."""
        return True

    @abstractmethod
    def exchange(self, tensors: Mapping[str, Tensor], step: int, is_finite: Tensor, wire: Wire) -> dict[str, Exchanged]:
        """Returns the outcome for fp32 tensors. State is left as it is if `is_finite`, equal on all ranks, is false."""

    @abstractmethod
    def message_bytes(self, shape: torch.Size, ranks: int) -> float:
        """Returns what one rank sends for a tensor of this shape, if it is compressed."""

    def state(self) -> dict[str, Tensor]:
        """Returns what the next step needs, by `<kind>/<parameter>`."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027, most methods have no state
        """Takes back what `state` returned; an empty mapping starts anew."""


def buckets(tensors: Mapping[str, Tensor], bucket_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yields tensors that are sent together, of at least so many bytes; a larger tensor is a message of its own."""
    bucket, size = dict[str, Tensor](), 0
    for name, tensor in tensors.items():
        if bucket and size >= bucket_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket
