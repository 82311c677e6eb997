"""fp8 matrix products in linear layers, by torchao."""

from __future__ import annotations

from torch import nn

from shoal.errors import UserError
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
    converted: list[str] = []

    def wanted(module: nn.Module, name: str) -> bool:
        inside = not plan.blocks or any(name.startswith(f"{block}.") for block in plan.blocks)
        fits = isinstance(module, nn.Linear) and module.in_features % 16 == 0 and module.out_features % 16 == 0
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
