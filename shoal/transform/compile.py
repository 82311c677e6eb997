"""torch.compile block by block: the repeated block is compiled once and serves all of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import count
from types import CodeType, FunctionType
from typing import Any, cast

import torch
from torch import nn

from shoal.errors import UserError
from shoal.forward import add_layer, make_views_before
from shoal.tensors import map_tensors
from shoal.torch_private import prepare_for_many_sizes
from shoal.transform.compile_cache import remove_broken_libraries
from shoal.types import MicroBatch, ParallelPlan

LAUNCHED_TOGETHER = {"combo_kernels": True, "combo_kernels_pointwise_only": True}
"""torch.compile's options that make one kernel of several whose results do not depend on each other."""
_NUMBERS = count()
DYNAMIC = {"usual": None, "usual in evaluation": None, "unusual": False, "unusual in evaluation": False, "any": True}
"""The option `dynamic` of torch.compile by the kind of sizes. None makes a graph for the first size and one for others,
False one for each size, and True one for all."""
Codes = Mapping[str, CodeType]


class BatchSizes:
    """Decides which graphs compute a batch, from the batch and its recipe alone.

    torch makes a graph for the sizes that it sees first, and one for all sizes as soon as it sees others. The two round
    differently, and which of them computes a batch depends on the batches before: a restarted process would not repeat
    an undisturbed one. So there are several compiled functions here: for the sizes that most batches have, for steps
    with a micro-batch of another number of samples, both again for evaluation, and for recipes whose sizes vary.
    """

    def __init__(self) -> None:
        self.kind = "usual"
        """Which functions compute now: a key of DYNAMIC."""
        self._where = ""
        self._seen: list[torch.Size] | None = None

    def look_at(self, micro_batches: Sequence[MicroBatch], sizes_vary: bool) -> None:
        """Decides for the micro-batches of a step. `sizes_vary` is the recipe's."""
        self._where = "" if torch.is_grad_enabled() else " in evaluation"
        is_usual = all(micro.is_usual_size for micro in micro_batches)
        self.kind = "any" if sizes_vary else f"{'usual' if is_usual else 'unusual'}{self._where}"
        if self.kind == "usual":
            for micro in micro_batches:
                self._check(micro)

    def _check(self, micro: MicroBatch) -> None:
        """Warns, once, if a training batch has other sizes than the one before; the number of samples is known."""
        sizes: list[torch.Size] = []
        map_tensors(lambda tensor: sizes.append(tensor.shape[1:]), micro.data)
        if self._seen and sizes != self._seen:
            before, now = next(pair for pair in zip(self._seen, sizes, strict=False) if pair[0] != pair[1])
            sizes = []
            warnings.warn(
                f"training.compile = true: batches vary in size (a sample had a tensor of shape {[*before]}, now one "
                f"of {[*now]}). torch compiles again for new sizes, which takes long, and a resumed run may differ "
                "from this one in its last digits. Write `sizes_vary = True` into the class of the recipe",
                stacklevel=2,
            )
        if self._seen is None or not sizes:
            self._seen = sizes  # an empty list ends the comparison

    @contextmanager
    def unusual_if(self, is_unusual: bool) -> Iterator[None]:
        """Is entered around what is computed for sizes that are unusual in a usual batch, too."""
        before = self.kind
        if is_unusual and before != "any":
            self.kind = f"unusual{self._where}"
        try:
            yield
        finally:
            self.kind = before

    def compile(self, function: Callable[..., Any], codes: Codes | None = None, **options: Any) -> Callable[..., Any]:
        """Returns a function compiled by torch.compile with these options, once for each kind of sizes.

        Functions that are given the same `codes` share their graphs.
        """
        codes = codes or copy_code(function, function.__name__)
        prepare_for_many_sizes()
        compiled = {
            kind: torch.compile(_with_code(function, codes[kind]), dynamic=dynamic, **options)
            for kind, dynamic in DYNAMIC.items()
        }

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return compiled[self.kind](*args, **kwargs)

        return call


def copy_code(function: Callable[..., Any], name: str) -> Codes:
    """Returns copies of a function's code for all kinds of sizes, under names that no other code has.

    torch keeps a limited number of graphs for a code object, and remembers by name and line which sizes have changed.
    It would take the sizes of another model in the process for such a change, and make slower graphs for all sizes.
    """
    code, number = cast(FunctionType, function).__code__, next(_NUMBERS)
    return {kind: code.replace(co_name=f"{name}_{number}_{kind.replace(' ', '_')}") for kind in DYNAMIC}


def _with_code(function: Any, code: CodeType) -> Callable[..., Any]:
    copied = FunctionType(code, function.__globals__, None, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return wraps(function)(copied)


def compile_forwards(modules: Sequence[nn.Module], sizes: BatchSizes, options: Mapping[str, Any] | None = None) -> None:
    """Compiles the forwards of modules that have layers, with all of them. Those of one class share their graphs.

    `options` are those of torch.compile. All layers have the same code, so that other classes and other models would
    use up the graphs that torch keeps for it; so each class gets copies of the code, anew at each call.
    """
    codes: dict[type[nn.Module], Codes] = {}
    for module in modules:
        forward, kind = module.forward, type(module)
        if kind not in codes:
            codes[kind] = copy_code(forward, f"forward_of_{kind.__name__}")
        module.forward = sizes.compile(forward, codes[kind], options=dict(options) if options else None)
        make_views_before(module)


class CompiledModules:
    """The plan's blocks, or the whole model if it has none, and a count of how often they ran without being compiled.

    It is made before layers such as recomputation are added: torch runs the whole of a recomputed module eagerly if it
    cannot capture a part, and the innermost layer is where that shows. `compile` is called after them, so that they are
    part of the graphs.
    """

    def __init__(self, model: nn.Module, plan: ParallelPlan, sizes: BatchSizes | None = None):
        self.modules = [model.get_submodule(name) for name in plan.blocks] or [model]
        self.sizes = sizes or BatchSizes()
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
        if device.type == "cpu":
            remove_broken_libraries()
        compile_forwards(self.modules, self.sizes, LAUNCHED_TOGETHER if small else None)

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
