"""local_sgd: rounds of local steps, the outer step, and what an evaluation computes with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from strategies.nets import PLAN, Points, build, micro_batch, rows, sgd, squares
from torch import Tensor

from shoal.strategies import DDPStrategy, DistributedStrategy
from shoal.types import Weights

Values = list[Tensor]


def parameters_of(model: torch.nn.Module) -> Values:
    return [parameter.detach().clone() for parameter in model.parameters()]


def take_steps(strategy: DistributedStrategy, steps: int) -> tuple[list[Values], Values]:
    """Returns this rank's parameters after each step, and in the end those that an evaluation sees."""
    with strategy:
        model, optimizer = strategy.prepare(build(), sgd, PLAN, Weights("built"))
        after = []
        for step in range(steps):
            x, y = rows(8, step)
            part = slice(4 * strategy.data_rank, 4 * strategy.data_rank + 4)
            strategy.forward_backward(model, [micro_batch(x[part], y[part])], Points(), step)
            strategy.step(optimizer)
            after.append(parameters_of(model))
        with strategy.average(model):
            averaged = parameters_of(model)
        assert all(map(torch.equal, parameters_of(model), after[-1]))
        strategy.check_sync(dict(model.named_parameters()))  # within a round only the anchor is equal
        return after, averaged


def local_steps(options: dict[str, Any], steps: int) -> tuple[list[Values], Values]:
    return take_steps(DDPStrategy(device="cpu", local_sgd=options), steps)


def plain_steps(steps: int) -> tuple[list[Values], Values]:
    return take_steps(DDPStrategy(device="cpu"), steps)


def expected_steps(options: dict[str, Any], steps: int) -> list[Values]:
    """Computes local steps and outer steps with plain torch."""
    model, rank = build(), dist.get_rank()
    optimizer, anchor = sgd(model), parameters_of(model)
    velocities, after = [torch.zeros_like(p) for p in anchor], []
    for step in range(steps):
        x, y = rows(8, step)
        part = slice(4 * rank, 4 * rank + 4)
        optimizer.zero_grad()
        squares(model(x[part]), y[part]).mean().backward()
        optimizer.step()
        if (step + 1) % options["sync_every"] == 0:
            for index, parameter in enumerate(model.parameters()):
                mean = parameter.detach().clone()
                dist.all_reduce(mean)
                change = anchor[index] - mean / 2
                velocities[index] = options["outer_momentum"] * velocities[index] + change
                anchor[index] = anchor[index] - options["outer_lr"] * (
                    change + options["outer_momentum"] * velocities[index]
                )
                parameter.data.copy_(anchor[index])
        after.append(parameters_of(model))
    return after


def test_the_outer_step_is_that_of_diloco(pool2: Pool) -> None:
    options = {"sync_every": 2, "outer_lr": 0.7, "outer_momentum": 0.9}
    ranks, expected = pool2.run(local_steps, options, 5), pool2.run(expected_steps, options, 5)
    for (after, averaged), right in zip(ranks, expected, strict=True):
        for values, others in zip(after, right, strict=True):
            torch.testing.assert_close(values, others, rtol=1e-5, atol=1e-6)
        mean = [(one + other) / 2 for one, other in zip(expected[0][-1], expected[1][-1], strict=True)]
        torch.testing.assert_close(averaged, mean, rtol=1e-5, atol=1e-6)
    for step, (one, other) in enumerate(zip(ranks[0][0], ranks[1][0], strict=True)):
        assert all(map(torch.equal, one, other)) is (step % 2 == 1)


@pytest.mark.slow
def test_an_average_of_every_step_is_ddp(pool2: Pool) -> None:
    """With SGD, as many samples on every rank, and no clipping."""
    ranks = pool2.run(local_steps, {"sync_every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}, 4)
    plain = pool2.run(plain_steps, 4)
    torch.testing.assert_close(ranks[0][0], plain[0][0], rtol=1e-5, atol=1e-6)
