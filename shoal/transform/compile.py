"""torch.compile block by block: the repeated block is compiled once and serves all of them."""

from __future__ import annotations

import torch
from torch import nn

from shoal.types import ParallelPlan


def apply_compile(model: nn.Module, plan: ParallelPlan) -> int:
    """Compiles the plan's blocks in place, or the whole model if it has none. Names stay as they are.

    Only `forward` is compiled, and not `__call__`: hooks, such as those by which FSDP gathers a block's weights, run
    outside. Like blocks share one graph, because graphs are kept by code and weights are inputs of them.
    """
    modules = [model.get_submodule(name) for name in plan.blocks] or [model]
    for module in modules:
        module.forward = torch.compile(module.forward)
    return len(modules)
