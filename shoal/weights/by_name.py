"""Weights by name: each module draws its own parameters under a seed made from its name.

What a module draws depends on nothing else, so any layout can draw any part of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.seeding import mix
from shoal.tensors import local_part, local_slices
from shoal.torch_private import TorchDispatchMode, storage_key

Reset = Callable[[nn.Module, nn.Module], None]


@torch.no_grad()
def draw(model: nn.Module, seed: int, reset: Reset | None, parameters: set[nn.Parameter]) -> None:
    """Draws parameters module by module, children first, each module under a seed made from its name.

    On the CPU whatever the device, so that a GPU starts from the weights a CPU starts from; and whole whatever the
    shard, so that every layout does. What a module's own reset might touch, its children included, stays whole until
    that has run, and not longer.
    """
    resetting = [m for m in model.modules() if not reset and _reset_function(model, m, None)]
    touched_later = {child for module in resetting for child in module.modules() if child is not module}
    whole: dict[nn.Parameter, nn.Parameter] = {}
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    for name, module in _children_first(model):
        own = {key: p for key, p in module._parameters.items() if p is not None and p in parameters}
        fresh = [p for p in own.values() if p not in whole]
        whole |= {p: parameter_like(p, torch.empty(p.shape, dtype=p.dtype)) for p in fresh}
        places += [(module, key, p) for key, p in own.items()]
        module._parameters.update({key: whole[p] for key, p in own.items()})
        reset_module = _reset_function(model, module, reset)
        if fresh and reset_module:
            torch.manual_seed(mix(seed, "init", name))
            reset_module()
        if module not in touched_later:
            for owner, key, parameter in places:
                local_part(parameter).copy_(whole[parameter][tuple(local_slices(parameter))])
                owner._parameters[key] = parameter
            parameters = parameters - whole.keys()  # what is tied is drawn once
            whole, places = {}, []


def parameter_like(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """A parameter of the same kind; of a DTensor, which is a kind of tensor and not of parameter, a plain one."""
    kind = nn.Parameter if isinstance(parameter, DTensor) else type(parameter)
    return kind(data, requires_grad=parameter.requires_grad)


def why_not_by_name(model: nn.Module, constructor: InitRecorder, reset: Reset | None) -> str | None:
    """None if resetting each module in turn does exactly what the constructors did to every parameter.

    Init code that lives elsewhere (a loop at the end of a constructor, weights drawn before they became
    parameters) would be lost silently; such a model is built as it is instead. A reset that the recipe gives has
    only to reach every parameter.
    """
    done: set[int] = set()
    with InitRecorder() as resets:
        for name, module in _children_first(model):
            own = {storage_key(p) for p in module.parameters(recurse=False) if p.is_meta}
            if own <= done:
                continue
            reset_module = _reset_function(model, module, reset)
            if reset_module is None:
                return f"{type(module).__name__}{f' {name!r}' if name else ''} has parameters but no reset_parameters()"
            reset_module()
            done |= own
    for name, parameter in model.named_parameters():
        key = storage_key(parameter)
        if reset and key not in resets.writes:
            return f"the recipe's reset leaves {name!r} as it is"
        if not reset and constructor.writes.get(key, []) != resets.writes.get(key, []):
            return f"the constructor initialises {name!r} otherwise than its module's reset_parameters()"
    return None


class InitRecorder(TorchDispatchMode):
    """Records what is written in place into tensors on the meta device: the program that initialises them."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: dict[int, list[tuple[Any, ...]]] = {}
        self._alive: list[Tensor] = []  # the memory of a freed tensor, and with it its key, would go to another one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and args and isinstance(args[0], Tensor) and args[0].is_meta:
            written = (str(func), *(arg for arg in args[1:] if isinstance(arg, int | float)))
            self.writes.setdefault(storage_key(args[0]), []).append(written)
            self._alive.append(args[0])
        return func(*args, **(kwargs or {}))


def _reset_function(model: nn.Module, module: nn.Module, reset: Reset | None) -> Callable[[], None] | None:
    if reset is not None:
        return partial(reset, model, module)
    # nn.MultiheadAttention and nn.Transformer spell it with an underscore.
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _children_first(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The order in which constructors ran: what a parent does to its children comes after their own."""
    names = {module: name for name, module in model.named_modules()}

    def visit(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if (name := names.pop(module, None)) is not None:  # it may be in the model twice
            for child in module.children():
                yield from visit(child)
            yield name, module

    return visit(model)
