"""torch.compile block by block: the repeated block is compiled once and serves all of them."""

from __future__ import annotations

from torch import nn

from shoal.types import ParallelPlan


def apply_compile(model: nn.Module, plan: ParallelPlan) -> int:
    """Compiles the plan's blocks in place, or the whole model if it has none. Names stay as they are."""
    modules = [model.get_submodule(name) for name in plan.blocks] or [model]
    for module in modules:
        module.compile()
    return len(modules)
