"""Fused paths of modules: another way to compute the same numbers, with the same parameters."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from shoal.errors import UserError


def has_fused_path(module: nn.Module) -> bool:
    """Returns whether a module has a method `use_fused_kernels()`, as the heads of BDH have."""
    return callable(getattr(module, "use_fused_kernels", None))


def apply_kernels(model: nn.Module, kernels: Literal["auto", "plain", "fused"], device: torch.device) -> list[str]:
    """Makes the modules that have a fused path use it, if so wanted; returns their names.

    Comes before layers around a forward. `auto` wants it on CUDA devices.
    """
    if kernels == "plain" or (kernels == "auto" and device.type != "cuda"):
        return []
    modules = {name: module for name, module in model.named_modules() if has_fused_path(module)}
    if not modules and kernels == "fused":
        raise UserError(
            f"training.kernels = fused: {type(model).__name__} has no module with a fused path, which is one with a "
            "method use_fused_kernels(); use plain"
        )
    for module in modules.values():
        module.use_fused_kernels()
    return [*modules]


def describe_kernels(module: nn.Module, device: torch.device, dtype: torch.dtype) -> str:
    """Returns what a fused module says of how it computes, such as "in Triton"; an empty text if it says nothing."""
    describe = getattr(module, "describe_kernels", None)
    return str(describe(device, dtype)) if callable(describe) else ""
