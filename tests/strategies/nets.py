"""A small model that every layout can cut, its recipe, and helpers to look at what ranks hold."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.recipes import Recipe
from shoal.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    DistributedStrategy,
    FSDPStrategy,
    MeshStrategy,
    SingleStrategy,
)
from shoal.types import MicroBatch, ParallelPlan

PLAN = ParallelPlan(
    blocks=("up", "down"),
    order=("up", "act", "down", "scale"),
    entry="x",
    tensor={"up": "column", "down": "row"},
)

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "single": (SingleStrategy, {}),
    "ddp": (DDPStrategy, {}),
    "fsdp": (FSDPStrategy, {}),
    "fsdp_no_shard": (FSDPStrategy, {"sharding_strategy": "NO_SHARD"}),
    "hybrid": (FSDPStrategy, {"sharding_strategy": "HYBRID_SHARD", "mesh": {"dp_replicate": 2, "dp_shard": 2}}),
    "tp": (MeshStrategy, {"mesh": {"tp": 2}}),
    "tp_fsdp": (MeshStrategy, {"mesh": {"tp": 2, "dp_shard": 2}}),
    "pp": (MeshStrategy, {"mesh": {"pp": 2, "dp_shard": 1}, "schedule": "gpipe"}),
    "zero_1": (DeepSpeedStrategy, {"stage": 1}),
    "zero_2": (DeepSpeedStrategy, {"stage": 2}),
    "zero_3": (DeepSpeedStrategy, {"stage": 3, "stage3_param_persistence_threshold": 0}),
}
"""Strategies by a name, with their options."""
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="the package deepspeed is not installed")
ZERO_1, ZERO_3 = (pytest.param(kind, marks=needs_deepspeed) for kind in ("zero_1", "zero_3"))
SLOW_ZERO_1 = pytest.param("zero_1", marks=[needs_deepspeed, pytest.mark.slow])


def make(kind: str, **options: Any) -> DistributedStrategy:
    preset, own = KINDS[kind]
    return preset(device="cpu", **own, **options)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Net(nn.Module):
    """Rows that do not divide by two ranks, and a parameter that is neither a layer's weight nor its bias."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up, self.act, self.down, self.scale = nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3), Scale()

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.down(self.act(self.up(x))))


def build(seed: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)


def rows(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, generator=generator), torch.randn(count, 3, generator=generator)


def squares(output: Tensor, y: Tensor) -> Tensor:
    """Returns one loss per row."""
    return (output - y).square().sum(-1)


class Points(Recipe):
    """Sums the squared distance over rows, and counts rows."""

    def build_model(self) -> nn.Module:
        return Net()

    def parallel_plan(self, model: nn.Module) -> ParallelPlan:
        return PLAN

    def inputs(self, batch: Any) -> dict[str, Any]:
        return {"x": batch["x"]}

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return squares(output, batch["y"]).sum()


def micro_batch(x: Tensor, y: Tensor) -> MicroBatch:
    return MicroBatch({"x": x, "y": y}, [0] * len(x), [*range(len(x))])


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns copies of the whole tensors. All ranks call it."""
    full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    return {name: tensor.detach().clone() for name, tensor in full.items()}
