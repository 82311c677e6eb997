"""Fused paths of modules: another way to compute the same numbers, with the same parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from shoal.errors import UserError


def has_fused_path(module: nn.Module) -> bool:
    """Returns whether a module has a method `use_fused_kernels()`, as the heads of BDH have."""
    return callable(getattr(module, "use_fused_kernels", None))


def apply_kernels(
    model: nn.Module,
    kernels: Literal["auto", "plain", "fused"],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> list[str]:
    """Makes the modules that have a fused path use it, if so wanted; returns their names.

    Comes before layers around a forward. `auto` wants it on CUDA devices, where a module has no method `fused_pays`
    that says otherwise for the dtype of products.
    """
    if kernels == "plain" or (kernels == "auto" and device.type != "cuda"):
        return []
    modules = {name: module for name, module in model.named_modules() if has_fused_path(module)}
    if not modules and kernels == "fused":
        raise UserError(
            f"training.kernels = fused: {type(model).__name__} has nothing that can be fused, which are heads of BDH, "
            "adapters with lora.lora_dropout above 0, and modules with a method use_fused_kernels(); use auto"
        )
    if kernels == "auto":
        modules = {name: module for name, module in modules.items() if _pays(module, device, dtype)}
    for module in modules.values():
        module.use_fused_kernels()
    return [*modules]


def _pays(module: nn.Module, device: torch.device, dtype: torch.dtype) -> bool:
    pays = getattr(module, "fused_pays", None)
    return pays is None or bool(pays(device, dtype))


def describe_kernels(modules: Iterable[nn.Module], device: torch.device, dtype: torch.dtype) -> str:
    """Returns what fused modules say of how they compute, such as "in Triton"; an empty text if they say nothing."""
    found: list[Any] = [getattr(module, "describe_kernels", None) for module in modules]
    return "; ".join(dict.fromkeys(describe(device, dtype) for describe in found if describe))
