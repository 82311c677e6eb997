"""DDP: what a step agrees on over ranks, and what the alarm hears."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from verify.planted import Ragged, Words

from shoal.config.schema import TrainingConfig
from shoal.data import BatchSchedule, Loader
from shoal.processes.desync import Desync, check_samples
from shoal.strategies import DDPStrategy, DistributedStrategy, SingleStrategy
from shoal.strategies.engines.ddp import default_bucket_mb
from shoal.training.optimizers import build_optimizer
from shoal.transform.loss_scale import LossScale
from shoal.types import MicroBatch, ParallelPlan


def test_buckets_grow_with_the_model() -> None:
    with torch.device("meta"):
        small, large = nn.Linear(100, 100), nn.Linear(2**14, 2**14, bias=False)  # 1 GiB
    assert (default_bucket_mb(small), default_bucket_mb(large)) == (25, 51)
    assert default_bucket_mb(large.requires_grad_(False)) == 25


class Sometimes(nn.Module):
    """A layer that no sample uses, and one that only some do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(13, 16), nn.Linear(16, 13)
        self.never = nn.Linear(4, 4)

    def forward(self, input: Tensor) -> Tensor:
        return self.head(self.embed(input))


class WithUnused(Ragged):
    def build_model(self) -> nn.Module:
        return Sometimes()


def steps(strategy: DistributedStrategy, recipe: Any, count: int, poison: int | None = None) -> dict[str, Any]:
    """A few updates; `poison` is the rank whose first micro-batch makes a NaN."""
    training = TrainingConfig(max_steps=1, learning_rate=1e-2)
    with strategy:
        torch.manual_seed(0)
        model, optimizer = strategy.prepare(
            recipe.build_model().eval(),
            lambda m: build_optimizer(training, recipe.param_groups(m)),
            ParallelPlan(),
        )
        loader = Loader(
            Words(),
            recipe.collate,
            BatchSchedule.constant(11, 2),
            seed=0,
            data_rank=strategy.data_rank,
            data_size=strategy.data_size,
        )
        result: dict[str, Any] = {"loss": [], "norm": [], "skipped": []}
        for step, micro_batches in zip(range(count), loader, strict=False):
            output = strategy.forward_backward(model, micro_batches, recipe, step)
            if step == 1 and poison == strategy.rank:
                next(model.parameters()).grad[0, 0] = math.nan  # type: ignore[index]
            info = strategy.step(optimizer, 0.5)
            result["loss"].append(output.loss.item())
            result["norm"].append(info.grad_norm.item())
            result["skipped"].append(info.skipped.item())
        result["weights"] = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
        result["scale"] = strategy._loss_scale.scale.item() if strategy._loss_scale else None
        return result


def under_ddp(options: dict[str, Any], recipe: type[Ragged] = Ragged, count: int = 3) -> dict[str, Any]:
    return steps(DDPStrategy(device="cpu", **options), recipe(), count)


def worst(a: dict[str, Any], b: dict[str, Any]) -> float:
    return max(float(np.abs(a["weights"][name] - b["weights"][name]).max()) for name in a["weights"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"static_graph": True},
        {"gradient_as_bucket_view": False},
        {"bucket_cap_mb": 1, "broadcast_buffers": False},
        {"find_unused_parameters": True},
    ],
)
def test_every_option_trains_as_one_device(pool2: Pool, options: dict[str, Any]) -> None:
    alone = steps(SingleStrategy(device="cpu"), Ragged(), 3)
    ranks = pool2.run(under_ddp, options, init=False)
    for result in ranks:
        assert result["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert result["norm"] == pytest.approx(alone["norm"], rel=1e-5)
        assert worst(result, alone) < 1e-5
    assert ranks[0]["norm"] == ranks[1]["norm"]
    assert worst(ranks[0], ranks[1]) == 0


def test_unused_parameters_stay_as_they_were(pool2: Pool) -> None:
    alone = steps(SingleStrategy(device="cpu"), WithUnused(), 3)
    for result in pool2.run(under_ddp, {"find_unused_parameters": True}, WithUnused, init=False):
        assert worst(result, alone) < 1e-5
        assert np.array_equal(result["weights"]["never.weight"], alone["weights"]["never.weight"])


def test_the_first_step_repeats_to_the_bit(pool4: Pool) -> None:
    """DDP fills its buckets anew after its first backward; a restarted run must not see that."""
    first, again = pool4.run(first_step_and_again, init=False)[0]
    assert first == again


def first_step_and_again() -> tuple[list[bytes], list[bytes]]:
    strategy, recipe = DDPStrategy(device="cpu"), Ragged()
    with strategy:
        torch.manual_seed(0)
        model, _ = strategy.prepare(
            recipe.build_model().eval(), lambda m: torch.optim.SGD(m.parameters()), ParallelPlan()
        )
        loader = Loader(
            Words(), recipe.collate, BatchSchedule.constant(40, 5), seed=0, data_rank=strategy.rank, data_size=4
        )
        micro_batches = next(iter(loader))
        result = []
        for _ in range(2):
            strategy.forward_backward(model, micro_batches, recipe, 0)
            result.append([p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None])
            model.zero_grad(set_to_none=False)
        return result[0], result[1]


def half_with_a_nan(rank_with_nan: int) -> dict[str, Any]:
    with patch.object(LossScale, "GROWTH_STEPS", 2):
        return steps(DDPStrategy(device="cpu", mixed_precision="fp16"), NanOnOneRank(rank_with_nan), 6)


class NanOnOneRank(Ragged):
    """The loss of one rank's samples overflows in the second step."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.calls = rank, 0

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        self.calls += 1
        mine = torch.distributed.get_rank() == self.rank
        return super().loss(output, batch) * (math.inf if mine and self.calls == 7 else 1.0)


def test_fp16_skips_together_and_scales(pool2: Pool) -> None:
    ranks = pool2.run(half_with_a_nan, 1, init=False)
    assert ranks[0]["skipped"] == ranks[1]["skipped"]
    assert sum(ranks[0]["skipped"]) == 1
    assert worst(ranks[0], ranks[1]) == 0
    assert ranks[0]["scale"] == ranks[1]["scale"]
    assert ranks[0]["scale"] != 2.0**16  # halved once, and doubled after every two good steps


def drifted(rank_to_change: int) -> str:
    strategy = DDPStrategy(device="cpu")
    with strategy:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        torch.manual_seed(0)
        for p in model.parameters():
            nn.init.normal_(p)
        if strategy.rank == rank_to_change:
            with torch.no_grad():
                model[1].weight[0, 0] += 1e-6  # type: ignore[index,operator]
        try:
            strategy.check_sync(dict(model.named_parameters()))
        except Desync as alarm:
            return str(alarm)
        return ""


def test_the_alarm_names_rank_and_tensor(pool4: Pool) -> None:
    assert pool4.run(drifted, 99, init=False) == [""] * 4
    for result in pool4.run(drifted, 2, init=False):
        assert "1.weight on rank 2" in result


def took(ids_by_rank: list[list[int]]) -> str:
    strategy = DDPStrategy(device="cpu")
    with strategy:
        ids = ids_by_rank[strategy.rank]
        try:
            check_samples([MicroBatch(None, [0] * len(ids), ids)], [(0, i) for i in range(6)])
        except Desync as alarm:
            return str(alarm)
        return ""


def test_the_alarm_hears_of_samples(pool2: Pool) -> None:
    assert pool2.run(took, [[0, 1, 2], [3, 4, 5]], init=False) == ["", ""]
    assert "rank 1 took sample 2" in pool2.run(took, [[0, 1, 2], [2, 4, 5]], init=False)[0]
    assert "no rank took sample 5" in pool2.run(took, [[0, 1, 2], [3, 4]], init=False)[0]
