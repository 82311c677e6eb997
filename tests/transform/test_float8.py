"""Linear layers in fp8, and how the scales of their tensors are found. tests/verify/test_fp8.py trains them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.profiler import ProfilerActivity, profile

from shoal.errors import UserError
from shoal.transform.float8 import apply_float8, largest_by_rows
from shoal.transform.precision import HalfWitness, check_precision
from shoal.types import ParallelPlan


def find_largest(
    x: Tensor, reduce_amax: bool = False, device_mesh: Any = None, granularity: Any = None, axiswise_dim: Any = None
) -> Tensor:
    """What torchao's `tensor_to_amax` does, with its arguments."""
    return x.abs().max() if axiswise_dim is None else x.abs().amax(axiswise_dim, keepdim=True)


@pytest.mark.parametrize("shape", [(7,), (5, 6), (2, 3, 4)])
@pytest.mark.parametrize("arguments", [(), (False, None, None, None), (False, None, None, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_largest_number_is_found_by_rows(
    shape: tuple[int, ...], arguments: tuple[Any, ...], dtype: torch.dtype
) -> None:
    """Of activations and gradients; those of weights, in fp32, at once."""
    seen: list[torch.Size] = []

    def recorded(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(x.shape)
        return find_largest(x, *args, **kwargs)

    x = -torch.rand(shape).to(dtype)
    by_axis = len(arguments) == 4 and arguments[3] is not None
    assert torch.equal(largest_by_rows(recorded)(x, *arguments), find_largest(x, *arguments))
    assert seen == [shape if by_axis or len(shape) == 1 or dtype == torch.float32 else shape[:-1]]
    x.view(-1)[0] = torch.nan
    assert largest_by_rows(recorded)(x, *arguments).isnan().any()


def test_layers_of_torchao_find_their_scales_by_rows() -> None:
    """Replaced once, however many models there are."""
    pytest.importorskip("torchao", reason="torchao is not installed; pip install 'shoal[quant]'")
    from torchao.float8 import float8_ops, float8_utils

    for _ in range(2):
        model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        assert apply_float8(model, ParallelPlan()) == 1
    for function in (float8_utils.tensor_to_amax, float8_ops.pad_tensor_for_matmul):
        assert function.__module__ == "shoal.transform.float8"
        assert function.__wrapped__.__module__ == "torchao.float8.float8_utils"
    x = torch.randn(4, 32, dtype=torch.bfloat16)
    scale = float8_utils.tensor_to_scale(x, torch.float8_e4m3fn)
    assert scale == (torch.finfo(torch.float8_e4m3fn).max / x.abs().max().double()).float()


@pytest.mark.parametrize("tokens", [64, 50])
def test_layers_multiply_in_fp8(tokens: int) -> None:
    """Forward and backward, and on CPUs. GPUs add up over multiples of 16 tokens, which CPUs do not ask for."""
    pytest.importorskip("torchao", reason="torchao is not installed; pip install 'shoal[quant]'")
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(32, 48), torch.randn(tokens, 32, requires_grad=True)
    expected = layer(x)
    gradient = torch.randn_like(expected)
    right = torch.autograd.grad(expected, (x, layer.weight), gradient)
    model = torch.nn.Sequential(layer)
    apply_float8(model, ParallelPlan())
    with (
        profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled,
        torch.autocast("cpu", torch.bfloat16),
    ):
        output = model(x)
        found = torch.autograd.grad(output, (x, model[0].weight), gradient.bfloat16())
    products = [event.input_shapes[:2] for event in profiled.events() if event.name == "aten::_scaled_mm"]
    assert products == [[[tokens, 32], [32, 48]], [[tokens, 48], [48, 32]], [[48, 64], [64, 32]]]
    for one, other in zip((output, *found), (expected, *right), strict=True):
        assert 0.01 < (one - other).norm() / other.norm() < 0.06


def test_layers_of_which_a_rank_would_have_a_part_that_does_not_fit_stay_as_they_are() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed; pip install 'shoal[quant]'")
    for parts, converted in ((1, 2), (2, 1)):
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 48))
        assert apply_float8(model, ParallelPlan(), parts) == converted
    with pytest.raises(UserError, match=r"no nn\.Linear whose sides are multiples of 64; use bf16"):
        apply_float8(torch.nn.Sequential(torch.nn.Linear(32, 64)), ParallelPlan(), 4)


def test_devices_that_cannot_multiply_in_fp8_are_refused() -> None:
    check_precision("fp8", False, torch.device("cpu"))
    with pytest.raises(UserError, match="fp8 runs on cuda and cpu, not on mps; use bf16"):
        check_precision("fp8", False, torch.device("mps"))


class Own(nn.Linear):
    """A layer with an initialisation of its own."""

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.5)
        nn.init.zeros_(self.bias)


def test_layers_keep_what_they_have_besides_parameters() -> None:
    """Hooks, methods of their own class, its name, other names in the model, and weights that are computed."""
    pytest.importorskip("torchao", reason="torchao is not installed; pip install 'shoal[quant]'")
    torch.manual_seed(0)
    block = nn.ModuleDict({"own": Own(32, 32), "normed": weight_norm(nn.Linear(32, 32)), "plain": nn.Linear(32, 32)})
    block["again"], listed = block["plain"], [block["plain"]]
    block["own"].register_forward_hook(lambda module, inputs, output: 3 * output)
    x = torch.randn(16, 32)
    expected = {name: layer(x) for name, layer in block.items()}
    assert apply_float8(block, ParallelPlan()) == 3
    assert type(block["own"]).__name__ == "Own"
    assert block["again"] is block["plain"] is listed[0]
    for name, layer in block.items():
        with torch.autocast("cpu", torch.bfloat16):
            assert 0 < (layer(x) - expected[name]).norm() < 0.06 * expected[name].norm(), name
    block["own"].reset_parameters()
    assert torch.equal(block["own"].weight, torch.full((32, 32), 0.5))
    block["normed"](x).sum().backward()
    assert all(parameter.grad is not None for parameter in block["normed"].parameters())


def test_a_layer_without_inputs_has_no_outputs() -> None:
    """Such as an expert that gets no tokens."""
    pytest.importorskip("torchao", reason="torchao is not installed; pip install 'shoal[quant]'")
    model = nn.Sequential(nn.Linear(32, 48))
    apply_float8(model, ParallelPlan())
    output = model(torch.empty(0, 32, requires_grad=True))
    output.sum().backward()
    assert output.shape == (0, 48)
    assert model[0].weight.grad is not None


def test_layers_whose_forward_is_not_called_or_is_another_one_stay_as_they_are() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed; pip install 'shoal[quant]'")
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(32, 2), "patched": nn.Linear(32, 32)})
    model["patched"].forward = lambda x: 2 * x
    with pytest.raises(UserError, match=r"no nn\.Linear"):
        apply_float8(model, ParallelPlan())


def test_products_in_fp8_are_told_from_others() -> None:
    """So that a run in which nothing is computed in fp8 is refused."""
    pytest.importorskip("torchao", reason="torchao is not installed; pip install 'shoal[quant]'")
    model, x = nn.Sequential(nn.Linear(32, 32)), torch.randn(16, 32)
    apply_float8(model, ParallelPlan())
    for compute, seen in ((lambda: F.linear(x, model[0].weight), False), (lambda: model(x), True)):
        witness = HalfWitness("fp8")
        with witness, torch.autocast("cpu", torch.bfloat16):
            compute()
        assert witness.seen == seen
