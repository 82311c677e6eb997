"""How the scales of fp8 tensors are found. Training in fp8 needs a GPU: tests/gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.transform.float8 import apply_float8, largest_by_rows
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
    from torchao.float8 import float8_utils

    for _ in range(2):
        model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        assert apply_float8(model, ParallelPlan()) == 1
    assert float8_utils.tensor_to_amax.__module__ == "shoal.transform.float8"
    assert float8_utils.tensor_to_amax.__wrapped__.__module__ == "torchao.float8.float8_utils"
    x = torch.randn(4, 32, dtype=torch.bfloat16)
    scale = float8_utils.tensor_to_scale(x, torch.float8_e4m3fn)
    assert scale == (torch.finfo(torch.float8_e4m3fn).max / x.abs().max().double()).float()
