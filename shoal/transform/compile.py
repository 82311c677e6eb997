"""torch.compile block by block: the repeated block is compiled once and serves all of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from itertools import count
from types import CodeType, FunctionType
from typing import Any, Literal, cast

import torch
from torch import nn

from shoal.errors import UserError
from shoal.forward import add_layer, make_views_before
from shoal.torch_private import num_graphs, prepare_for_many_sizes
from shoal.transform.compile_cache import check_cache, remove_broken_libraries
from shoal.types import ParallelPlan

LAUNCHED_TOGETHER = {"combo_kernels": True, "combo_kernels_pointwise_only": True}
"""torch.compile's options that make one kernel of several whose results do not depend on each other."""
MOST_SIZES, MOST_GRAPHS = 8, 48
"""How often a block, and all blocks of one class together, are compiled for single sizes, before torch decides which
graphs to make. It keeps 64 of a class."""
_NUMBERS = count()
Kind = Literal["one each", "one for all", "left to torch"]
DYNAMIC: Mapping[Kind, bool | None] = {"one each": False, "one for all": True, "left to torch": None}
"""The option `dynamic` of torch.compile by how graphs and sizes of tensors belong together."""


class Copies:
    """Copies of a function's code for all kinds of graphs, under names that no other code has, and what became of them.

    torch keeps a limited number of graphs for a code object, and remembers by name and line which sizes have changed.
    It would take the sizes of another model in the process for such a change, and make slower graphs for all sizes.
    """

    def __init__(self, function: Callable[..., Any], name: str):
        code, number = cast(FunctionType, function).__code__, next(_NUMBERS)
        self.codes = {kind: code.replace(co_name=f"{name}_{number}_{kind.replace(' ', '_')}") for kind in DYNAMIC}
        self.num_graphs = 0
        """How many graphs there are for single sizes."""
        self.left_to_torch = {True: False, False: False}
        """Whether torch decides, with gradients and without."""


class GraphChoice:
    """Decides which graphs compute a batch, so that it depends on the batch and its recipe alone.

    By itself torch makes a graph for the sizes that it sees first, and one for all sizes as soon as it sees others. The
    two round differently, and which of them computes a batch depends on the batches before: a restarted process would
    not repeat an undisturbed one. So every size has a graph of its own here, and recipes whose sizes vary have one for
    all sizes from the start. Only what goes through many sizes unsaid is left to torch, with a warning.
    """

    def __init__(self) -> None:
        self.sizes_vary = False
        """Whether the recipe that computes now says that sizes vary."""
        self._has_warned = False

    def compile(self, function: Callable[..., Any], copies: Copies | None = None, **options: Any) -> Callable[..., Any]:
        """Returns a function compiled by torch.compile with these options, once for each kind.

        Functions that are given the same `copies` share their graphs.
        """
        copies = copies or Copies(function, function.__name__)
        prepare_for_many_sizes()
        compiled = {
            kind: torch.compile(_with_code(function, copies.codes[kind]), dynamic=dynamic, **options)
            for kind, dynamic in DYNAMIC.items()
        }
        num_sizes = {True: 0, False: 0}

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.sizes_vary:
                return compiled["one for all"](*args, **kwargs)
            with_gradient = torch.is_grad_enabled()
            if copies.left_to_torch[with_gradient]:
                return compiled["left to torch"](*args, **kwargs)
            if torch.compiler.is_compiling():
                return compiled["one each"](*args, **kwargs)
            before = num_graphs()
            result = compiled["one each"](*args, **kwargs)
            if made := num_graphs() - before:
                num_sizes[with_gradient] += 1
                copies.num_graphs += made
                if copies.num_graphs > MOST_GRAPHS:
                    copies.left_to_torch = {True: True, False: True}
                elif num_sizes[with_gradient] > MOST_SIZES:
                    copies.left_to_torch[with_gradient] = True
                if copies.left_to_torch[with_gradient]:
                    self._warn()
            return result

        return call

    def _warn(self) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"training.compile = true: blocks are called with more than {MOST_SIZES} sizes of tensors, or with other "
            "numbers each time. From now on torch makes graphs that fit several, so a resumed run may differ from this "
            "one in its last digits. Write `sizes_vary = True` into the class of the recipe, bring batches to fewer "
            'sizes, or generate under torch.compiler.set_stance("force_eager"); TORCH_LOGS=recompiles shows what '
            "changes",
            stacklevel=2,  # a place in shoal, whose warnings the command line shows in one line
        )


def _with_code(function: Any, code: CodeType) -> Callable[..., Any]:
    copied = FunctionType(code, function.__globals__, None, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return wraps(function)(copied)


def compile_forwards(
    modules: Sequence[nn.Module], choice: GraphChoice, options: Mapping[str, Any] | None = None
) -> None:
    """Compiles the forwards of modules that have layers, with all of them. Those of one class share their graphs.

    `options` are those of torch.compile. All layers have the same code, so that other classes and other models would
    use up the graphs that torch keeps for it; so each class gets copies of the code, anew at each call.
    """
    copies: dict[type[nn.Module], Copies] = {}
    for module in modules:
        forward, kind = module.forward, type(module)
        if kind not in copies:
            copies[kind] = Copies(forward, f"forward_of_{kind.__name__}")
        module.forward = choice.compile(forward, copies[kind], options=dict(options) if options else None)
        make_views_before(module)


class CompiledModules:
    """The plan's blocks, or the whole model if it has none, and a count of how often they ran without being compiled.

    It is made before layers such as recomputation are added: torch runs the whole of a recomputed module eagerly if it
    cannot capture a part, and the innermost layer is where that shows. `compile` is called after them, so that they are
    part of the graphs.
    """

    def __init__(self, model: nn.Module, plan: ParallelPlan, choice: GraphChoice | None = None):
        named = [model.get_submodule(name) for name in plan.blocks]
        self.modules = [*dict.fromkeys(named)] or [model]  # layers that share their weights are one module
        self.choice = choice or GraphChoice()
        self.eager_calls = 0
        """How many calls of blocks with gradients ran uncompiled: evaluations and previews may."""
        self._has_warned = False
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
        check_cache()
        if device.type == "cpu":
            remove_broken_libraries()
        compile_forwards(self.modules, self.choice, LAUNCHED_TOGETHER if small else None)

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
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self.eager_calls += 1
        return forward(*args, **kwargs)

    def find_eager_calls(self) -> str | None:
        """Returns a warning the first time that blocks ran uncompiled, else None."""
        if not self.eager_calls or self._has_warned:
            return None
        self._has_warned = True
        return (
            f"training.compile = true: {self.eager_calls} calls of blocks ran uncompiled, which is slower; torch gives "
            "up on a block that needs more than 64 graphs. TORCH_LOGS=recompiles,graph_breaks shows why"
        )
