"""Detects replicas that drifted apart: compares a hash of every parameter, and the samples of a step, over ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.tensors import fingerprint, local_part
from shoal.types import MicroBatch


class Desync(RuntimeError):
    """Raised if ranks that should hold or do the same do not."""


def check_replicas(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Raises Desync if ranks of `group`, which should hold the same tensors, do not; names the first that differs.

    Each rank hashes its local part of every tensor, and only hashes are exchanged.
    """
    local_hashes = torch.stack([fingerprint(local_part(tensor)) for tensor in tensors.values()])
    hashes_by_rank = [torch.empty_like(local_hashes) for _ in range(dist.get_world_size(group))]
    dist.all_gather(hashes_by_rank, local_hashes, group=group)
    ranks = dist.get_process_group_ranks(group)
    for rank, hashes in zip(ranks, hashes_by_rank, strict=True):
        different = [
            name for name, differs in zip(tensors, (hashes != hashes_by_rank[0]).tolist(), strict=True) if differs
        ]
        if different:
            more = f" and {len(different) - 1} more" if len(different) > 1 else ""
            raise Desync(f"replicas drifted apart: {different[0]}{more} on rank {rank} differs from rank {ranks[0]}")


def check_samples(micro_batches: Sequence[MicroBatch], expected: Iterable[tuple[int, int]]) -> None:
    """Raises Desync if the ranks together did not take exactly the expected samples, given as (epoch, id)."""
    local_samples = [
        key for micro in micro_batches if micro.weight for key in zip(micro.epochs, micro.ids, strict=True)
    ]
    samples_by_rank: list[list[tuple[int, int]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(samples_by_rank, local_samples)
    remaining = Counter(expected)
    for rank, samples in enumerate(samples_by_rank):
        for epoch, sample in Counter(samples) - remaining:
            raise Desync(f"rank {rank} took sample {sample} of epoch {epoch}, which belongs to another rank or step")
        remaining -= Counter(samples)
    for epoch, sample in remaining:
        raise Desync(
            f"no rank took sample {sample} of epoch {epoch}; {remaining.total() - 1} more of this step are missing"
        )
