"""Replicas that exchange compressed gradients after the backward."""

from __future__ import annotations

from torch import nn

from shoal.parallel.compression.exchange import CompressedExchange
from shoal.strategies.engines.all_reduce import AllReduceEngine


class CompressedEngine(AllReduceEngine):
    """Computes with the plain model over the mesh dimension `dp_replicate`."""

    def wrap(self, model: nn.Module) -> None:
        super().wrap(model)
        self.compressed = CompressedExchange(self.layout.compression, self._group, self.layout.mesh)

    def exchange(self, step: int) -> None:
        assert self.compressed is not None
        self.compressed.sum_over_ranks(self._used_gradients(), step)

    def describe(self) -> str:
        return f"{self.layout.strategy}, gradients compressed by {self.layout.compression.method}"
