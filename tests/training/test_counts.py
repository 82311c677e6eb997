"""A loss is divided by its count, whatever the count: small, zero, or nonsense."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from conftest import ToyRun
from pool import Pool
from strategies.nets import PLAN, Points, build, make, micro_batch, rows, sgd, squares, whole
from torch import Tensor

from shoal.errors import UserError
from shoal.types import Weights

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="the package deepspeed is not installed")
ON_TWO = ["ddp", "fsdp", "tp", "pp", *(pytest.param(f"zero_{n}", marks=needs_deepspeed) for n in (1, 3))]
USABLE, UNUSABLE = (1.0, 1e-3, 0.0), (-1.0, math.nan)


class Weighted(Points):
    """Counts weights instead of rows."""

    weight = 1.0

    def count(self, batch: Any) -> Tensor:
        return torch.full((len(batch["x"]),), self.weight).sum()

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (self.weight if math.isfinite(self.weight) else 1.0) * super().loss(output, batch)


def steps(kind: str) -> list[tuple[float, float, bool]]:
    """Returns for each weight the norm of the gradient, whether the update was skipped, and whether weights moved."""
    result, recipe = [], Weighted()
    with make(kind) as strategy:
        model, optimizer = strategy.prepare(build(), sgd, PLAN, Weights("built"))
        for weight in (*USABLE, *UNUSABLE):
            optimizer.param_groups[0]["lr"] = 0.5 if weight in (0.0, *UNUSABLE) else 0.0  # all from the same weights
            recipe.weight = weight
            before = whole(strategy.state(model, optimizer).model)
            batch = micro_batch(*rows(4, strategy.data_rank))
            strategy.forward_backward(model, [batch, micro_batch(*rows(2, 7))], recipe, 0)
            info = strategy.step(optimizer, 1.0)
            after = whole(strategy.state(model, optimizer).model)
            moved = any(not torch.equal(before[name], after[name]) for name in before)
            result.append((info.grad_norm.item(), info.skipped.item(), moved))
    return result


def check(kind: str, result: list[tuple[float, float, bool]], ranks: int) -> None:
    model = build()
    data = [*(rows(4, rank) for rank in range(ranks)), *(rows(2, 7) for _ in range(ranks))]
    torch.cat([squares(model(x), y) for x, y in data]).mean().backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
    one, small, none, *unusable = result
    for found, skipped, _ in (one, small):
        assert found == pytest.approx(norm, rel=1e-5)
        assert not skipped
    assert none == (0.0, 0.0, False)
    for _, skipped, moved in unusable:
        assert skipped
        assert not moved


def test_on_one_process() -> None:
    check("single", steps("single"), ranks=1)


@pytest.mark.parametrize("kind", ON_TWO)
def test_on_two_processes(pool2: Pool, kind: str) -> None:
    for result in pool2.run(steps, kind, init=False):
        check(kind, result, ranks=1 if kind in ("tp", "pp") else 2)


def test_a_negative_count_stops_the_run_and_is_named(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe("    def inputs(", "    def count(self, batch):\n        return -4\n\n    def inputs(")
    with pytest.raises(UserError, match=r"3 updates were skipped.*; the recipe's count of the last batch is -4"):
        toy.train("training.max_skipped_steps=3")


def test_an_infinite_count_stops_the_run(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe("    def inputs(", "    def count(self, batch):\n        return float('inf')\n\n    def inputs(")
    with pytest.raises(UserError, match="the recipe's count of a batch is infinite"):
        toy.train()


def test_steps_and_evaluations_without_a_count_go_on(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe("    def inputs(", "    def count(self, batch):\n        return 0\n\n    def inputs(")
    change_recipe("** 2).sum()", "** 2).sum() * 0")
    outcome = toy.train("checkpoint.keep_best=1", "training.eval_steps=5")
    assert outcome.step == 10
    assert toy.metrics("train/skipped_steps")[10] == 0
    assert set(toy.metrics().values()) == set(toy.metrics("eval/loss").values()) == {"nan"}
