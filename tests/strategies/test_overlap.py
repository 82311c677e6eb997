"""The exchange of data-parallel ranks takes place while they compute: what is sent when, in traces of two processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pool import Pool
from strategies.nets import sgd
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.recipes import Recipe
from shoal.strategies import DDPStrategy, DistributedStrategy, FSDPStrategy
from shoal.types import MicroBatch, ParallelPlan

WIDTHS = (512, 520, 528, 536, 544)
"""All different, so that shapes tell layers apart, and with weights above 1 MiB, so that each fills a bucket of DDP."""
SHAPES = [(outputs, inputs) for inputs, outputs in pairwise(WIDTHS)]
SIZES = [outputs * inputs for outputs, inputs in SHAPES]
LAYERS = range(len(SHAPES))
SENDING: dict[Any, Callable[[Any], tuple[str, Tensor]]] = {
    torch.ops.c10d.allreduce_.default: lambda args: ("sum", args[0][0]),
    torch.ops.c10d._allgather_base_.default: lambda args: ("gather", args[0]),
    torch.ops.c10d._reduce_scatter_base_.default: lambda args: ("scatter", args[1]),
}
"""For each collective, its name and the tensor that is sent or made as a whole."""
PATIENCE_SECONDS = 20
Events = list[tuple[str, int]]


class Layers(Recipe):
    """A chain of layers without biases. With `may_begin`, the backward of rank 1 waits until that file exists."""

    may_begin: Path | None = None
    waited_in_vain = False

    def build_model(self) -> nn.Module:
        return nn.Sequential(*[nn.Linear(inputs, outputs, bias=False) for outputs, inputs in SHAPES])

    def inputs(self, batch: Any) -> dict[str, Any]:
        return {"input": batch}

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        if self.may_begin is not None and dist.get_rank() == 1:
            output.register_hook(lambda gradient: self._wait(self.may_begin))
        return output.sum()

    def _wait(self, may_begin: Path) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not may_begin.exists():
            if time.monotonic() > end:
                self.waited_in_vain = True
                return
            time.sleep(0.001)


class Trace(TorchDispatchMode):
    """Notes for each layer when its output and its gradient are computed and its exchanges begin, in order."""

    def __init__(self, computed: Path | None):
        """`computed` is a file to make when the gradient of the first layer, the last of all, has been computed."""
        super().__init__()
        self.events: Events = []
        self._computed = computed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self._note("gradient", SHAPES, (args[0].shape[0], args[1].shape[1]))
            self._note("output", SHAPES, tuple(args[1].shape[::-1]))
        elif func in SENDING:
            kind, whole = SENDING[func](args)
            self._note(kind, SIZES, whole.numel())  # others are counts and totals
        result = func(*args, **(kwargs or {}))
        if self._computed is not None and self.events[-1:] == [("gradient", 0)]:
            self._computed.touch()
        return result

    def _note(self, kind: str, of_layers: list[Any], found: Any) -> None:
        if found in of_layers:
            self.events.append((kind, of_layers.index(found)))


def second_step(strategy: DistributedStrategy, computed: Path | None = None) -> tuple[Events, bool]:
    """Returns what happens in a step once the engine knows the order of layers, and whether rank 1 waited in vain.

    With `computed`, rank 1 begins its backward only when rank 0 has computed all gradients.
    """
    recipe = Layers()
    micro_batches = [MicroBatch(torch.ones(2, WIDTHS[0]), (0, 0), (0, 1))]
    with strategy:
        plan = ParallelPlan(blocks=tuple(str(layer) for layer in LAYERS))
        model, optimizer = strategy.prepare(recipe.build_model(), sgd, plan)
        strategy.forward_backward(model, micro_batches, recipe, 0)
        strategy.step(optimizer)
        recipe.may_begin = computed
        with Trace(computed if strategy.rank == 0 else None) as trace:
            strategy.forward_backward(model, micro_batches, recipe, 1)
    return trace.events, recipe.waited_in_vain


def under_ddp(computed: Path) -> tuple[Events, bool]:
    return second_step(DDPStrategy(device="cpu", bucket_cap_mb=1), computed)


def under_fsdp() -> tuple[Events, bool]:
    return second_step(FSDPStrategy(device="cpu", forward_prefetch=True))


def test_ddp_sends_each_bucket_before_the_gradients_of_earlier_layers(pool2: Pool, tmp_path: Path) -> None:
    (events, _), (of_other_rank, waited_in_vain) = pool2.run(under_ddp, tmp_path / "computed", init=False)
    assert events == of_other_rank
    for layer in LAYERS[1:]:
        assert events.index(("sum", layer)) < events.index(("gradient", layer - 1))
    # Until rank 0 had all gradients, rank 1 sent nothing: so rank 0 did not wait for the buckets that it had sent.
    assert not waited_in_vain


def test_fully_shard_gathers_the_next_block_before_it_computes_one(pool2: Pool) -> None:
    (events, _), _ = pool2.run(under_fsdp, init=False)
    for layer in LAYERS[:-1]:
        assert events.index(("gather", layer + 1)) < events.index(("output", layer))
    backward = events[events.index(("output", LAYERS[-1])) + 1 :]
    for layer in LAYERS[1:-1]:
        assert backward.index(("gather", layer - 1)) < backward.index(("gradient", layer))
    for layer in LAYERS[1:]:
        assert backward.index(("scatter", layer)) < backward.index(("gradient", layer - 1))
