"""Replicas that exchange compressed gradients after the backward."""

from __future__ import annotations

from torch import nn

from shoal.parallel.compression.exchange import CompressedExchange
from shoal.strategies.engines.all_reduce import AllReduceEngine
from shoal.torch_private import is_fake


class CompressedEngine(AllReduceEngine):
    """Computes with the plain model over the mesh dimension `dp_replicate`."""

    def wrap(self, model: nn.Module) -> None:
        super().wrap(model)
        if not is_fake(next(model.parameters())):
            self.compressed = CompressedExchange(self.layout.compression, self._group, self.layout.mesh)

    def exchange(self, step: int) -> None:
        if self.compressed is None:  # a planner's fake tensors have no values to compress
            super().exchange(step)
        else:
            self.compressed.sum_over_ranks(self._used_gradients(), step)

    def describe(self) -> str:
        return f"{self.layout.strategy}, gradients compressed by {self.layout.compression.method}"
