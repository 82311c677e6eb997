"""The collectives inside a model compute the same, forward and backward, whether torch.compile captured them or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor

from shoal.parallel import collectives

FUNCTIONS: dict[str, Callable[[Tensor, dist.ProcessGroup], Tensor]] = {
    "sum_gradients": collectives.sum_gradients,
    "sum_over": collectives.sum_over,
    "gather_tokens": collectives.gather_tokens,
    "scatter_tokens": collectives.scatter_tokens,
    "swap": lambda tensor, group: collectives.swap(tensor, 2, 1, group),
}


def compiled_and_eager(name: str) -> list[list[Tensor]]:
    """Returns the output, the gradient of the input and that of a weight: eagerly, then captured by torch.compile."""
    torch.compiler.reset()
    group = dist.group.WORLD
    assert group is not None

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return FUNCTIONS[name](x @ weight, group) * 2

    results = []
    for function in (forward, torch.compile(forward, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(dist.get_rank())
        x, weight = torch.randn(2, 4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        output = function(x, weight)
        output.square().sum().backward()
        assert x.grad is not None
        assert weight.grad is not None
        results.append([output.detach(), x.grad, weight.grad])
    return results


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_collectives_have_the_same_gradients(pool2: Pool, name: str) -> None:
    for eager, compiled in pool2.run(compiled_and_eager, name):
        for expected, actual in zip(eager, compiled, strict=True):
            assert expected.abs().sum() > 0
            torch.testing.assert_close(actual, expected)
