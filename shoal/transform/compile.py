"""torch.compile block by block: the repeated block is compiled once and serves all of them."""

from __future__ import annotations

from torch import nn

from shoal.forward import compile_forward
from shoal.types import ParallelPlan


def apply_compile(model: nn.Module, plan: ParallelPlan) -> int:
    """Compiles the plan's blocks in place, or the whole model if it has none; returns how many modules it compiled.

    Only `forward` is compiled, not `__call__`, so that hooks such as those of fully_shard run outside of the graph.
    """
    modules = [model.get_submodule(name) for name in plan.blocks] or [model]
    for module in modules:
        compile_forward(module)
    return len(modules)
