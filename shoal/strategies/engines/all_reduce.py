"""Replicas that sum gradients after the backward, of those parameters alone that a backward was about.

torch's DistributedDataParallel expects a gradient of every parameter; with several objectives each backward makes some.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.processes.group import cpu_group
from shoal.strategies.engines.plain import PlainEngine
from shoal.strategies.module_state import share_model
from shoal.torch_private import is_fake

_BUCKET_BYTES = 25 << 20
"""What is sent in one message, at least; a larger gradient is a message of its own."""


class AllReduceEngine(PlainEngine):
    """Computes with the plain model over the mesh dimension `dp_replicate`."""

    def wrap(self, model: nn.Module) -> None:
        self.module = model
        assert self.mesh is not None
        self._group = self.mesh.get_group("dp_replicate")
        if not is_fake(next(model.parameters())):
            share_model(model, self._group)

    def exchange(self) -> None:
        """Sums the gradients of the parameters that require one, as far as any rank has used them."""
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=cpu_group(self._group))
        gradients = []
        for parameter, is_used in zip(parameters, used.tolist(), strict=True):
            if is_used:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)  # other ranks used it
                gradients.append(parameter.grad)
        for bucket in _buckets(gradients):
            joined = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(joined, group=self._group)
            for gradient, total in zip(bucket, joined.split([gradient.numel() for gradient in bucket]), strict=True):
                gradient.copy_(total.view_as(gradient))


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yields gradients of one dtype that are sent together."""
    bucket, size = list[Tensor](), 0
    for gradient in sorted(gradients, key=lambda gradient: str(gradient.dtype)):
        if bucket and (size >= _BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket
