"""Fused paths of modules: another way to compute the same numbers, with the same parameters."""

from __future__ import annotations

from torch import nn

from shoal.errors import UserError


def has_fused_path(module: nn.Module) -> bool:
    """Returns whether a module has a method `use_fused_kernels()`, as the heads of BDH have."""
    return callable(getattr(module, "use_fused_kernels", None))


def use_fused_kernels(model: nn.Module) -> list[str]:
    """Makes every module that has a fused path use it; returns their names. Comes before layers around a forward."""
    modules = {name: module for name, module in model.named_modules() if has_fused_path(module)}
    if not modules:
        raise UserError(
            f"training.kernels = fused: {type(model).__name__} has no module with a fused path, which is one with a "
            "method use_fused_kernels(); use plain"
        )
    for module in modules.values():
        module.use_fused_kernels()
    return [*modules]
