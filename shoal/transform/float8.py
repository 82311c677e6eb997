"""fp8 matrix products in linear layers, by torchao."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.forward import computes_as_linear
from shoal.types import ParallelPlan

ALIGNMENT = 16
"""GPUs multiply matrices in fp8 whose sizes are multiples of this."""


def apply_float8(model: nn.Module, plan: ParallelPlan, tensor_parts: int = 1) -> int:
    """Makes the linear layers inside the plan's blocks whose sides are multiples of 16 multiply in fp8.

    The plan's head stays as it is: its output decides the loss. So do small layers outside blocks, which gain nothing;
    without blocks in the plan, all layers but the head are taken. Each of `tensor_parts` ranks will have a part of a
    layer, whose sides must be multiples of 16, too. Returns the number of layers.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise UserError("training.mixed_precision = fp8 needs torchao: pip install 'shoal[quant]'") from None
    _replace_functions()
    multiple = ALIGNMENT * tensor_parts
    layers = [
        module
        for name, module in model.named_modules()
        if (not plan.blocks or any(name.startswith(f"{block}.") for block in plan.blocks)) and name != plan.head
        if computes_as_linear(module) and module.in_features % multiple == 0 and module.out_features % multiple == 0
    ]
    if not layers:
        raise UserError(
            "training.mixed_precision = fp8, but the model's blocks have no nn.Linear whose sides are multiples of "
            f"{multiple}; use bf16"
        )
    # The gradient of a weight is a product over tokens, of which there may be any number.
    config = Float8LinearConfig(pad_inner_dim=True)
    like = convert_to_float8_training(nn.Linear(16, 16, bias=False, device="meta"), config=config)
    for layer in layers:
        _convert(layer, like)
    return len(layers)


def _convert(layer: nn.Linear, like: nn.Module) -> None:
    """Gives a layer the class and the options of torchao's layer `like`.

    torchao makes new modules with the same parameters. Those would not have the layer's hooks, the methods of its own
    class, such as `reset_parameters`, and its other names in the model.
    """
    vars(layer).update({name: value for name, value in vars(like).items() if name not in vars(layer)})
    layer.__class__ = _class_in_float8(type(layer), type(like))  # type: ignore[arg-type]  # mypy on hashing a type


@cache
def _class_in_float8(kind: type[nn.Linear], torchao_linear: type[nn.Linear]) -> type[nn.Linear]:
    """Returns a subclass of both, with the name of the first: settings name classes."""

    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        if not input.numel():  # such as an expert without tokens; torchao looks for the largest number
            return F.linear(input, self.weight, self.bias)
        output: Tensor = torchao_linear.forward(self, input)
        return output

    return type(kind.__name__, (torchao_linear, kind), {"forward": forward, "__module__": kind.__module__})


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
