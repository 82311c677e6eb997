"""fp8 matrix products in linear layers, by torchao."""

from __future__ import annotations

from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.forward import computes_as_linear
from shoal.types import ParallelPlan

ALIGNMENT = 16
"""GPUs multiply matrices in fp8 whose sizes are multiples of this."""


def apply_float8(model: nn.Module, plan: ParallelPlan, tensor_parts: int = 1) -> int:
    """Replaces the linear layers inside the plan's blocks whose sides are multiples of 16 by torchao's fp8 layers.

    Their parameters, and the names of those, stay. The head stays as it is: its output decides the loss. So do small
    layers outside blocks, which gain nothing. Each of `tensor_parts` ranks will have a part of a layer, whose sides
    must be multiples of 16, too.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise UserError("training.mixed_precision = fp8 needs torchao: pip install 'shoal[quant]'") from None
    _replace_functions()
    converted: list[str] = []
    multiple = ALIGNMENT * tensor_parts

    def wanted(module: nn.Module, name: str) -> bool:
        inside = not plan.blocks or any(name.startswith(f"{block}.") for block in plan.blocks)
        fits = computes_as_linear(module) and module.in_features % multiple == 0 and module.out_features % multiple == 0
        if inside and fits and name != plan.head:
            converted.append(name)
            return True
        return False

    # The gradient of a weight is a product over tokens, of which there may be any number.
    convert_to_float8_training(model, module_filter_fn=wanted, config=Float8LinearConfig(pad_inner_dim=True))
    if not converted:
        raise UserError(
            "training.mixed_precision = fp8, but the model's blocks have no nn.Linear whose sides are multiples of "
            f"{multiple}; use bf16"
        )
    return len(converted)


def _replace_functions() -> None:
    """Replaces functions inside torchao (0.15 to 0.18) by those with the same results that cost less."""
    from torchao.float8 import float8_ops, float8_utils

    cheaper = (float8_utils, "tensor_to_amax", largest_by_rows), (float8_ops, "pad_tensor_for_matmul", padded_if_needed)
    for module, name, wrapper in cheaper:
        original = getattr(module, name, None)
        if original is not None and original.__module__ != __name__:
            setattr(module, name, wrapper(original))


def padded_if_needed(pad_tensor_for_matmul: Any) -> Any:
    """Returns a function like torchao's `pad_tensor_for_matmul`, which copies no tensor that needs no padding."""

    @wraps(pad_tensor_for_matmul)
    def padded(x: Tensor, dims: int | Iterable[int]) -> Tensor:
        dims = (dims,) if isinstance(dims, int) else (*dims,)
        if all(x.shape[dim] % ALIGNMENT == 0 for dim in dims):
            return x
        longer: Tensor = pad_tensor_for_matmul(x, dims)
        return longer

    padded.__module__ = __name__
    return padded


def largest_by_rows(tensor_to_amax: Any) -> Any:
    """Returns a function like torchao's `tensor_to_amax`, which looks for the largest number in each row first.

    That number decides the scale of a tensor. torchao reduces all numbers at once. The kernel that torch.compile (2.11
    to 2.13) makes of it reads memory at a third of its speed (H200), and is joined with fewer of the operations that
    make an activation or a gradient. Weights in fp32 are left alone, because no operation makes them.
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
