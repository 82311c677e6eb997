"""A gradient means the same in every strategy: one thing after `prepare`, and another after `Loop.wrap`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from pool import Pool
from strategies.nets import PLAN, Points, build, make, micro_batch, rows, sgd, squares, whole
from torch import Tensor

from shoal.strategies import Loop
from shoal.types import Weights

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="the package deepspeed is not installed")
ON_TWO = [
    *("ddp", "fsdp", "fsdp_no_shard", "tp"),
    *(pytest.param(f"zero_{stage}", marks=needs_deepspeed) for stage in (1, 2, 3)),
]

SIZES = ((3, 1), (2, 4))
"""Rows by micro-batch and data-parallel rank. They differ, so that a mean of means is not the mean of all."""


def batches(rank: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """Returns the micro-batches of a data-parallel rank; one rank alone has the rows of both."""
    made = [[rows(count, 10 * index + place) for place, count in enumerate(micro)] for index, micro in enumerate(SIZES)]
    if size == 2:
        return [micro[rank] for micro in made]
    return [tuple(torch.cat(parts) for parts in zip(*micro, strict=True)) for micro in made]  # type: ignore[misc]


def outcome(strategy: Any, model: Any, optimizer: Any, gradients: dict[str, Tensor], step: Any) -> dict[str, Any]:
    """Returns the gradients, their norm as the step gives it, and how far the step moved the weights."""
    before = whole(strategy.state(model, optimizer).model)
    norm = step().grad_norm.item()
    after = whole(strategy.state(model, optimizer).model)
    return {"gradients": gradients, "norm": norm, "moved": {name: after[name] - before[name] for name in before}}


def after_prepare(kind: str) -> dict[str, Any]:
    with make(kind) as strategy:
        model, optimizer = strategy.prepare(build(), sgd, PLAN, Weights("built"))
        micro_batches = [micro_batch(x, y) for x, y in batches(strategy.data_rank, strategy.data_size)]
        strategy.forward_backward(model, micro_batches, Points(), 0)
        gradients = whole(strategy.gradients(model))
        return outcome(strategy, model, optimizer, gradients, lambda: strategy.step(optimizer))


def after_wrap(kind: str, exchange: str | None = None) -> dict[str, Any]:
    with make(kind) as strategy:
        loop = Loop(strategy)
        model, optimizer = loop.wrap(build(), sgd, plan=PLAN, exchange=exchange)
        for index, (x, y) in enumerate(batches(strategy.data_rank, strategy.data_size)):
            with loop.accumulate(last=index == len(SIZES) - 1):
                loop.backward(squares(model(x), y).mean() / len(SIZES))
        gradients = {} if exchange == "at_step" else whole(strategy.gradients(loop.model))
        return outcome(strategy, loop.model, optimizer, gradients, loop.step)


def gradients_of(loss: Any) -> dict[str, Tensor]:
    model = build()
    loss(model).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def global_mean(model: Any) -> Tensor:
    """Returns (sum of losses) / (count) over the global batch."""
    return torch.cat([squares(model(x), y) for x, y in batches(0, 1)]).mean()


def mean_over_ranks(model: Any) -> Tensor:
    """Returns the mean over ranks of each rank's loss, which is the mean of its micro-batches' means."""
    by_rank = [[squares(model(x), y).mean() for x, y in batches(rank, 2)] for rank in range(2)]
    return torch.stack([torch.stack(means).mean() for means in by_rank]).mean()


def mean_of_micro_batches(model: Any) -> Tensor:
    """Returns the same for one data-parallel rank, which has all rows."""
    return torch.stack([squares(model(x), y).mean() for x, y in batches(0, 1)]).mean()


def check(result: dict[str, Any], expected: dict[str, Tensor], at_step: bool = False) -> None:
    close = {"rtol": 1e-5, "atol": 1e-6}
    if not at_step:
        torch.testing.assert_close(result["gradients"], expected, **close)
    assert result["norm"] == pytest.approx(torch.nn.utils.get_total_norm(expected.values()).item(), rel=1e-5)
    torch.testing.assert_close(result["moved"], {name: -0.5 * gradient for name, gradient in expected.items()}, **close)


def test_the_two_meanings_differ() -> None:
    """Otherwise the tests below would prove nothing."""
    by_count, by_rank = gradients_of(global_mean), gradients_of(mean_over_ranks)
    alone = gradients_of(mean_of_micro_batches)
    for one, other in ((by_count, by_rank), (by_rank, alone), (by_count, alone)):
        assert all((one[name] - other[name]).norm() > 1e-2 * other[name].norm() for name in one)


@pytest.mark.parametrize("kind", ON_TWO)
def test_after_prepare_it_is_that_of_the_global_batch(pool2: Pool, kind: str) -> None:
    for result in pool2.run(after_prepare, kind, init=False):
        check(result, gradients_of(global_mean))


@pytest.mark.parametrize("kind", ON_TWO)
def test_after_wrap_it_is_the_mean_over_ranks(pool2: Pool, kind: str) -> None:
    expected = mean_of_micro_batches if kind == "tp" else mean_over_ranks
    for result in pool2.run(after_wrap, kind, init=False):
        check(result, gradients_of(expected))


def test_gradients_that_are_averaged_at_the_step(pool2: Pool) -> None:
    for result in pool2.run(after_wrap, "ddp", "at_step", init=False):
        check(result, gradients_of(mean_over_ranks), at_step=True)


def test_one_process() -> None:
    check(after_prepare("single"), gradients_of(global_mean))
    check(after_wrap("single"), gradients_of(mean_of_micro_batches))
