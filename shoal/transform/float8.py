"""fp8 matrix products in linear layers, by torchao."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.forward import computes_as_linear
from shoal.types import ParallelPlan


def apply_float8(model: nn.Module, plan: ParallelPlan) -> int:
    """Replaces the linear layers inside the plan's blocks whose sides are multiples of 16 by torchao's fp8 layers.

    Their parameters, and the names of those, stay. The head stays as it is: its output decides the loss. So do small
    layers outside blocks, which gain nothing.
    """
    try:
        from torchao.float8 import convert_to_float8_training
    except ImportError:
        raise UserError("training.mixed_precision = fp8 needs torchao: pip install 'shoal[quant]'") from None
    _find_largest_by_rows()
    converted: list[str] = []

    def wanted(module: nn.Module, name: str) -> bool:
        inside = not plan.blocks or any(name.startswith(f"{block}.") for block in plan.blocks)
        fits = computes_as_linear(module) and module.in_features % 16 == 0 and module.out_features % 16 == 0
        if inside and fits and name != plan.head:
            converted.append(name)
            return True
        return False

    convert_to_float8_training(model, module_filter_fn=wanted)
    if not converted:
        raise UserError(
            "training.mixed_precision = fp8, but the model's blocks have no nn.Linear whose sides are multiples of 16; "
            "use bf16"
        )
    return len(converted)


def _find_largest_by_rows() -> None:
    """Replaces a function inside torchao (0.15 to 0.18) by one with the same results, which torch.compile (2.11 to
    2.13) makes faster kernels of."""
    from torchao.float8 import float8_utils

    original = getattr(float8_utils, "tensor_to_amax", None)
    if original is not None and original.__module__ != __name__:
        float8_utils.tensor_to_amax = largest_by_rows(original)


def largest_by_rows(tensor_to_amax: Any) -> Any:
    """Returns a function like torchao's `tensor_to_amax`, which looks for the largest number in each row first.

    That number decides the scale of a tensor. torchao reduces all numbers at once. The kernel of that reads memory at a
    third of its speed (H200), and is joined with fewer of the operations that make an activation or a gradient. Weights
    in fp32 are left alone, because no operation makes them.
    """

    @wraps(tensor_to_amax)
    def by_rows(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        axis = kwargs.get("axiswise_dim", args[3] if len(args) > 3 else None)
        if axis is None and x.ndim > 1 and x.element_size() == 2:  # one scale for a whole activation or gradient
            with torch.no_grad():
                x = x.abs().amax(-1)
        found: Tensor = tensor_to_amax(x, *args, **kwargs)
        return found

    by_rows.__module__ = __name__
    return by_rows
