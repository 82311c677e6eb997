"""Small recipes for `prove`, and four typical bugs of distributed training that it must find."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.func import functional_call

from shoal.config import Run
from shoal.config.layout import Layout
from shoal.processes.detect import detect
from shoal.processes.world import World
from shoal.recipes import Recipe
from shoal.strategies import DDPStrategy, DistributedStrategy
from shoal.strategies.contract import Engaged
from shoal.strategies.engines import ddp
from shoal.strategies.engines.plain import PlainEngine
from shoal.strategies.executors import InTurn, Surroundings
from shoal.strategies.native import NativeStrategy
from shoal.tensors import local_part, replace_parameters
from shoal.types import StepInfo
from shoal.verify import trace as trace_module
from shoal.verify.trace import Trace, trace
from shoal.weights.materialise import materialise


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Words:
    """A dataset of sequences with one to six labels."""

    def __len__(self) -> int:
        return 61

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 13, (7,), generator=generator)
        labels = ids[1:].clone()
        labels[1 + index % 6 :] = -100
        return {"input_ids": ids[:-1], "labels": labels}


class Ragged(Recipe):
    """Trains a small model on sequences with different numbers of labels."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(13, 16), Block(), nn.Dropout(0.2), Block(), nn.Linear(16, 13))

    def train_data(self) -> Words:
        return Words()

    def inputs(self, batch: Any) -> dict[str, Any]:
        return {"input": batch["input_ids"]}

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


class Frozen(Ragged):
    """Freezes most of the model, as with adapters."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model[1].requires_grad_(False)
        model[3].requires_grad_(False)
        return model


class Normed(Ragged):
    """Has a BatchNorm, which mixes the samples of a batch."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Embedding(13, 16), nn.Flatten(), nn.BatchNorm1d(96), nn.Unflatten(1, (6, 16)), nn.Linear(16, 13)
        )


class Tabled(Ragged):
    """Has a buffer with more bytes than all parameters together."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_buffer("table", torch.zeros(4096))
        return model


class GatherEverything(NativeStrategy):
    """Shards the wrong way: every rank holds a part, gathers all of it, and computes all of the batch."""

    def _place_model(self, model: nn.Module, builders: Any, plan: Any, weights: Any, *rest: Any) -> Any:
        assert self.mesh is not None
        mesh = self.mesh["tp"]
        materialise(model, self.device, self._seed, weights)
        replace_parameters(model, lambda p: nn.Parameter(distribute_tensor(p.data, mesh, [Shard(0)])))

        class Gathering(nn.Module):
            def forward(self, **inputs: Any) -> Any:
                whole = {name: p.full_tensor() for name, p in model.named_parameters()}  # type: ignore[operator]
                return functional_call(model, whole, kwargs=inputs)

        engine = PlainEngine(self.layout, self.device, self.mesh, "sum")
        engine.wrap(Gathering())
        self._engine = engine
        self._executor = InTurn(engine, Surroundings(self.device, "fp32", 0, (0,), None))
        self._module_state = self._find_module_state(model)
        self.engaged = Engaged(parameter_bytes=sum(local_part(p).nbytes for p in model.parameters()))
        return [build(model) for build in builders]

    def step(self, optimizer: Any, max_norm: float | None = None) -> StepInfo:
        optimizer.zero_grad()
        return StepInfo(torch.zeros(()), torch.zeros(()))

    def load_state(self, *args: Any) -> None:
        pass


def _gather_everything(config: Any, world: World | None = None) -> NativeStrategy:
    world = world or detect()
    sides = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": world.size}
    return GatherEverything(Layout("gather everything", "plain", sides), world, device="cpu")


def _wrong_rank(config: Any, world: World | None = None) -> DistributedStrategy:
    strategy = DDPStrategy(device="cpu")
    strategy.data_rank = 0
    return strategy


def _count_of_first_micro_batch(self: DistributedStrategy, values: Any, micro_batches: Any) -> Tensor:
    return torch.as_tensor(values[0])


def _no_all_reduce(state, bucket):  # type: ignore[no-untyped-def]
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def trace_with(bug: str, run: Run, steps: int, shared: dict[str, Tensor] | None, adamw: bool) -> Trace:
    """Traces the run while a bug is planted in its strategy."""
    patches = {
        "forgotten 1/accumulation": lambda: patch.object(DistributedStrategy, "_sum", _count_of_first_micro_batch),
        "missing all-reduce": lambda: patch.object(ddp, "_sum_over_ranks", _no_all_reduce),
        "wrong rank's data": lambda: patch.object(trace_module, "from_config", _wrong_rank),
        "gathers everything": lambda: patch.object(trace_module, "from_config", _gather_everything),
    }
    with patches[bug]():
        return trace(run, steps, shared, adamw)
