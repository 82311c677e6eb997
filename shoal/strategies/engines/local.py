"""Replicas that train alone for some steps and then average their weights."""

from __future__ import annotations

from torch import nn

from shoal.parallel.compression.local_sgd import LocalSGD
from shoal.strategies.engines.plain import PlainEngine
from shoal.strategies.module_state import share_model
from shoal.torch_private import is_fake


class LocalEngine(PlainEngine):
    """Computes with the plain model; the mesh dimension `dp_replicate` averages weights."""

    def wrap(self, model: nn.Module) -> None:
        self.module = model
        assert self.mesh is not None
        assert self.layout.local_sgd is not None
        group = self.mesh.get_group("dp_replicate")
        if not is_fake(next(model.parameters())):
            share_model(model, group)
            self.local_sgd = LocalSGD(self.layout.local_sgd, model, group, self.layout.mesh)

    def describe(self) -> str:
        return f"{self.layout.strategy}, every rank alone between averages of weights"
