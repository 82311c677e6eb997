"""Top-k: the largest elements by absolute value, with their places."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.parallel.compression.method import Exchanged, Method
from shoal.parallel.compression.wire import Wire

_SAMPLE = 1 << 14
"""How many elements the search for a threshold looks at."""


class TopK(Method):
    """Sends a fraction of the elements; values of several ranks at one place are added up in fp32."""

    def __init__(self, ratio: float, min_compression: float):
        self.ratio, self.min_compression = ratio, min_compression

    def count(self, numel: int) -> int:
        """Returns how many elements are sent of so many."""
        return max(1, int(numel * self.ratio))

    def compresses(self, shape: torch.Size) -> bool:
        numel = shape.numel()
        return numel > 0 and numel >= self.min_compression * 2 * self.count(numel)  # an index is as long as a value

    def message_bytes(self, shape: torch.Size, ranks: int) -> float:
        return (ranks - 1) * self.count(shape.numel()) * (4 + _index_dtype(shape.numel()).itemsize)

    def exchange(self, tensors: Mapping[str, Tensor], step: int, is_finite: Tensor, wire: Wire) -> dict[str, Exchanged]:
        if not tensors:
            return {}
        device, values, places = next(iter(tensors.values())).device, list[Tensor](), list[Tensor]()
        with wire.coding(device):
            for tensor in tensors.values():
                index = largest(tensor.reshape(-1), self.count(tensor.numel()))
                values.append(tensor.reshape(-1)[index])
                places.append(index)
            narrow = [place.to(_index_dtype(t.numel())) for place, t in zip(places, tensors.values(), strict=True)]
            message = torch.cat([part.view(torch.uint8) for part in (*values, *narrow)])
        by_rank = wire.all_gather(message)
        with wire.coding(device):
            parts = by_rank.split([part.nbytes for part in (*values, *narrow)], dim=1)
            outcomes = {}
            for (name, tensor), coded, where, place in zip(
                tensors.items(), parts[: len(values)], parts[len(values) :], places, strict=True
            ):
                total = torch.zeros_like(tensor).view(-1)
                for one, index in zip(coded, where, strict=True):  # in the order of ranks
                    indices = index.clone().view(_index_dtype(tensor.numel())).long()
                    total.index_add_(0, indices, one.clone().view(torch.float32))
                unsent = tensor.reshape(-1).clone()
                unsent[place] = 0
                outcomes[name] = Exchanged(total.view_as(tensor), unsent.view_as(tensor))
            return outcomes


def largest(flat: Tensor, count: int) -> Tensor:
    """Returns the indices of the largest elements by absolute value, in no order; NaN counts as the largest.

    On a CPU, a sample gives a threshold that about twice as many elements exceed, and only those are ranked: torch's
    topk over all elements takes several times as long.
    """
    size = flat.abs()
    if size.device.type != "cpu" or 4 * count > len(size) or len(size) < 4 * _SAMPLE:
        return size.topk(count, sorted=False).indices
    sample = size[:: len(size) // _SAMPLE]
    wanted = min(len(sample), 2 * len(sample) * count // len(size) + 16)
    threshold = sample.kthvalue(len(sample) - wanted + 1).values
    candidates = torch.nonzero(~(size < threshold)).view(-1)
    if len(candidates) < count:  # the sample was misleading
        return size.topk(count, sorted=False).indices
    return candidates[size[candidates].topk(count, sorted=False).indices]


def _index_dtype(numel: int) -> torch.dtype:
    return torch.int32 if numel < 1 << 31 else torch.int64
