"""The desync alarm: compares a cheap hash of every parameter between replicas, and the samples that ranks took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.tensors import fingerprint, local_part
from shoal.types import MicroBatch


class Desync(RuntimeError):
    """Raised when ranks that should agree do not."""


def check_replicas(named: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Compares a hash of each tensor between the ranks of `group`, which should hold the same.

    Names the first rank and tensor that differ.
    """
    own = torch.stack([fingerprint(local_part(tensor)) for tensor in named.values()])
    by_rank = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(by_rank, own, group=group)
    ranks = dist.get_process_group_ranks(group)
    for rank, hashes in zip(ranks, by_rank, strict=True):
        different = [name for name, differs in zip(named, (hashes != by_rank[0]).tolist(), strict=True) if differs]
        if different:
            more = f" and {len(different) - 1} more" if len(different) > 1 else ""
            raise Desync(f"replicas drifted apart: {different[0]}{more} on rank {rank} is not what rank {ranks[0]} has")


def check_samples(micro_batches: Sequence[MicroBatch], expected: Iterable[tuple[int, int]]) -> None:
    """Compares the (epoch, id) of the samples that all ranks took in a step with those of the step."""
    taken = [key for micro in micro_batches if micro.weight for key in zip(micro.epochs, micro.ids, strict=True)]
    by_rank: list[list[tuple[int, int]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(by_rank, taken)
    left = Counter(expected)
    for rank, keys in enumerate(by_rank):
        for epoch, sample in Counter(keys) - left:
            raise Desync(f"rank {rank} took sample {sample} of epoch {epoch}, which is not its own in this step")
        left -= Counter(keys)
    for epoch, sample in left:
        raise Desync(f"no rank took sample {sample} of epoch {epoch}, nor {left.total() - 1} others of this step")
