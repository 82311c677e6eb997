"""Operators that are written in Python: torch treats them as its own, and a call costs the host little."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.lora.dropout import drop, dropped_product

SEED = torch.tensor(3)


def python_calls(function: Any, *args: Any) -> int:
    """Returns how many Python functions a call runs. The first one fills caches."""
    function(*args)
    calls = [0]
    sys.setprofile(lambda frame, event, arg: calls.__setitem__(0, calls[0] + (event == "call")))
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return calls[0]


def test_a_call_runs_little_besides_the_function() -> None:
    """torch.library.custom_op would run five more functions, two of them to switch torch.compile off."""
    x, alike = torch.randn(4, 8), torch.library.custom_op("shoal_tests::nothing", mutates_args=())(nothing)
    from shoal.operators import operator

    ours = operator("nothing_for_tests", empty=nothing)(nothing)
    with torch.no_grad():
        assert python_calls(ours, x) <= 2
        assert python_calls(ours, x) < python_calls(alike, x)


def test_graphs_call_a_form_that_asks_for_no_gradient() -> None:
    """And its derivative is the same, also where a graph is computed without gradients."""
    from torch._dynamo.backends.common import aot_autograd

    called = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        called.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    def gradients(function: Any) -> list[Tensor | None]:
        torch.manual_seed(0)
        x, weight = torch.randn(3, 16, requires_grad=True), torch.randn(4, 16, requires_grad=True)
        function(x, weight, weight.detach().clone(), SEED, 0.3, 0.5).square().sum().backward()
        with torch.no_grad():
            return [x.grad, weight.grad, function(x, weight, weight.detach().clone(), SEED, 0.3, 0.5)]

    torch.compiler.reset()
    compiled = torch.compile(lambda *args: dropped_product(*args), backend=aot_autograd(fw_compiler=note))
    for found, expected in zip(gradients(compiled), gradients(dropped_product), strict=True):
        assert found is not None
        assert torch.equal(found, expected)
    assert torch.ops.shoal.dropped_product_in_graph.default in called
    assert dropped_product not in called
    in_graph, x = torch.ops.shoal.drop_in_graph.default, torch.randn(3, 16)
    with torch.no_grad():
        assert python_calls(in_graph, x, SEED, 0.3) < python_calls(drop, x, SEED, 0.3)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.shoal.dropped_product(x, self.weight, self.weight.detach(), SEED, 0.3, 0.5)


def test_an_exported_program_can_be_trained() -> None:
    module, x = Dropping(), torch.randn(3, 16)
    exported = torch.export.export(module, (x,)).run_decompositions({}).module()
    for one in (module, exported):
        one(x).square().sum().backward()
    (found,) = exported.parameters()
    assert found.grad is not None
    assert module.weight.grad is not None
    assert torch.equal(found.grad, module.weight.grad)


def nothing(x: Tensor) -> Tensor:
    return x.new_empty(2)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_the_operators_of_adapters_are_registered_as_torch_wants(p: float) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 5, 16, requires_grad=True), torch.randn(4, 16, requires_grad=True)
    torch.library.opcheck(drop, (x, SEED, p))
    torch.library.opcheck(dropped_product, (x, weight, weight.detach().clone(), SEED, p, 0.5))
