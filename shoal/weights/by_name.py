"""Draws weights by name: each module initialises its own parameters under a seed made from its name.

The values depend on nothing else, so every layout starts from the same ones, and a rank can draw any part of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.seeding import mix, seed_generators
from shoal.torch_private import TorchDispatchMode, storage_key
from shoal.weights.parallel_draws import ParallelDraws
from shoal.weights.parameter_extras import carry_over, find_reference

Reset = Callable[[nn.Module, nn.Module], None]
"""A function (model, module) that initialises the parameters which the module itself holds."""


@torch.no_grad()
def draw(
    model: nn.Module,
    seed: int,
    reset: Reset | None,
    parameters: set[nn.Parameter],
    draw_dtypes: Mapping[torch.dtype, torch.dtype] = MappingProxyType({}),
) -> None:
    """Draws these parameters module by module, children first, each module under a seed made from its name.

    They are drawn on the CPU, so that a GPU starts from the same values, and as whole tensors, so that every sharding
    does; then the shard is copied to its device. A module's own `reset_parameters()` may also change the parameters of
    its children, so those stay whole until it has run. Large tensors of several modules are drawn at the same time, and
    all parameters have their values when this returns. `draw_dtypes` has the dtypes in which they are drawn, by the
    dtypes that they have, where these differ.
    """
    modules_with_reset = [m for m in model.modules() if not reset and _reset_function(model, m, None)]
    reset_again_later = {child for module in modules_with_reset for child in module.modules() if child is not module}
    whole_tensors: dict[nn.Parameter, nn.Parameter] = {}
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    with ParallelDraws(parameters) as draws:
        for name, module in _children_first(model):
            to_draw = {key: p for key, p in module._parameters.items() if p is not None and p in parameters}
            undrawn = [p for p in to_draw.values() if p not in whole_tensors]
            for p in undrawn:
                whole_tensors[p] = parameter_like(p, draws.allocate(p.shape, draw_dtypes.get(p.dtype, p.dtype)))
            replaced += [(module, key, p) for key, p in to_draw.items()]
            module._parameters.update({key: whole_tensors[p] for key, p in to_draw.items()})
            reset_module = _reset_function(model, module, reset)
            if undrawn and reset_module:
                seed_generators(mix(seed, "init", name))
                draws.run(reset_module)
            if module not in reset_again_later:
                for owner, key, parameter in replaced:
                    owner._parameters[key] = parameter
                draws.end_unit(whole_tensors)
                parameters = parameters - whole_tensors.keys()  # a tied parameter is drawn once
                whole_tensors, replaced = {}, []


def parameter_like(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """Returns `data` as a parameter of the same class, with the same attributes and hooks; as a plain nn.Parameter if
    `parameter` is a DTensor."""
    kind = nn.Parameter if isinstance(parameter, DTensor) else type(parameter)
    new = kind(data, requires_grad=parameter.requires_grad)
    carry_over(parameter, new)
    return new


def why_not_by_name(model: nn.Module, constructor: InitRecorder, reset: Reset | None) -> str | None:
    """Returns why the parameters cannot be drawn by name, or None if they can.

    They can if a reset of each module in turn does exactly what the constructors did. Otherwise initialisation code
    that is elsewhere, such as a loop at the end of a constructor, would silently be lost. A recipe's own `reset` only
    has to reach every parameter.
    """
    if computed := next((name for name, buffer in model.named_buffers() if buffer.is_meta), None):
        return f"the constructor computes the buffer {computed!r} from a parameter"
    if place := find_reference(model):
        return f"{place}, which would keep the parameter that is replaced"
    reset_storages: set[int] = set()
    with InitRecorder() as resets:
        for name, module in _children_first(model):
            storages = {storage_key(p) for p in module.parameters(recurse=False) if p.is_meta}
            if storages <= reset_storages:
                continue
            reset_module = _reset_function(model, module, reset)
            if reset_module is None:
                return f"{type(module).__name__}{f' {name!r}' if name else ''} has parameters but no reset_parameters()"
            reset_module()
            reset_storages |= storages
    for name, parameter in model.named_parameters():
        key = storage_key(parameter)
        if reset and key not in resets.writes:
            return f"the recipe's reset does not initialise {name!r}"
        if not reset and constructor.writes.get(key, []) != resets.writes.get(key, []):
            return f"the constructor initialises {name!r} in another way than its module's reset_parameters()"
    return None


class InitRecorder(TorchDispatchMode):
    """Records the in-place operations on meta tensors, which are how constructors initialise parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: dict[int, list[tuple[Any, ...]]] = {}
        self._alive: list[Tensor] = []  # or another tensor could get the memory of a freed one, and its key with it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and args and isinstance(args[0], Tensor) and args[0].is_meta:
            operation = (str(func), *(arg for arg in args[1:] if isinstance(arg, int | float)))
            self.writes.setdefault(storage_key(args[0]), []).append(operation)
            self._alive.append(args[0])
        return func(*args, **(kwargs or {}))


def _reset_function(model: nn.Module, module: nn.Module, reset: Reset | None) -> Callable[[], None] | None:
    """Returns what initialises the module: the recipe's `reset`, the module's own function, or None."""
    if reset is not None:
        return partial(reset, model, module)
    # In nn.MultiheadAttention and nn.Transformer its name begins with an underscore.
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _children_first(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields all modules with their names in the order in which their constructors ended: parents after children."""
    names = {module: name for name, module in model.named_modules()}

    def visit(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if (name := names.pop(module, None)) is not None:  # a module may be in the model twice
            for child in module.children():
                yield from visit(child)
            yield name, module

    return visit(model)
