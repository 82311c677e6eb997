"""Replicas that sum gradients after the backward, of those parameters alone that a backward was about.

torch's DistributedDataParallel expects a gradient of every parameter; with several objectives each backward makes some.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.parallel.compression.wire import Wire, sum_in_buckets
from shoal.processes.group import cpu_group
from shoal.strategies.engines.plain import PlainEngine
from shoal.strategies.module_state import share_model
from shoal.torch_private import is_fake


class AllReduceEngine(PlainEngine):
    """Computes with the plain model over the mesh dimension `dp_replicate`."""

    def wrap(self, model: nn.Module) -> None:
        self.module = model
        assert self.mesh is not None
        self._group = self.mesh.get_group("dp_replicate")
        if not is_fake(next(model.parameters())):
            share_model(model, self._group)

    def exchange(self, step: int) -> None:
        """Sums the gradients of the parameters that require one, as far as any rank has used them."""
        sum_in_buckets([*self._used_gradients().values()], Wire(self._group))

    def _used_gradients(self) -> dict[str, Tensor]:
        """Returns the gradients by name; one that only other ranks have is zero."""
        named = [(name, parameter) for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        used = torch.tensor([parameter.grad is not None for _, parameter in named], dtype=torch.int32)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=cpu_group(self._group))
        gradients = {}
        for (name, parameter), is_used in zip(named, used.tolist(), strict=True):
            if is_used:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)  # other ranks used it
                gradients[name] = parameter.grad
        return gradients
