"""torch.compile block by block: the repeated block is compiled once and serves all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shoal.errors import UserError
from shoal.forward import add_layer, compile_forwards
from shoal.types import ParallelPlan

LAUNCHED_TOGETHER = {"combo_kernels": True, "combo_kernels_pointwise_only": True}
"""torch.compile's options that make one kernel of several whose results do not depend on each other."""


class CompiledModules:
    """The plan's blocks, or the whole model if it has none, and a count of how often they ran without being compiled.

    It is made before layers such as recomputation are added: torch runs the whole of a recomputed module eagerly if it
    cannot capture a part, and the innermost layer is where that shows. `compile` is called after them, so that they are
    part of the graphs.
    """

    def __init__(self, model: nn.Module, plan: ParallelPlan):
        self.modules = [model.get_submodule(name) for name in plan.blocks] or [model]
        self.eager_calls = 0
        layer = self._count_eager_calls  # one object for all: torch.compile then makes one graph for like modules
        for module in self.modules:
            add_layer(module, layer)

    def compile(self, device: torch.device) -> None:
        """Compiles `forward` alone, not `__call__`, so that hooks such as those of fully_shard stay outside.

        On a GPU, modules with adapters get fewer and larger kernels: each of their matrices is cast by itself, and the
        host takes longer to launch so many small kernels than the GPU to compute them.
        """
        members = (member for module in self.modules for member in module.modules())
        small = device.type == "cuda" and any(getattr(member, "has_small_matrices", False) for member in members)
        compile_forwards(self.modules, LAUNCHED_TOGETHER if small else None)

    def check_around(self, modules: list[nn.Module], key: str) -> None:
        """Refuses layers that are to be added after `compile` to other modules than the compiled ones."""
        compiled = {id(module) for module in self.modules}
        if any(id(module) not in compiled for module in modules):
            raise UserError(
                f"{key}: with training.compile = true only the inputs of the compiled blocks can be moved, which are "
                "the blocks of the recipe's parallel_plan; leave out activation_checkpointing.classes, or set "
                "training.compile to false"
            )

    def _count_eager_calls(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self.eager_calls += 1
        return forward(*args, **kwargs)
