"""Where weights come from, and how every layout starts from the same ones.

A model is born with its parameters on the meta device and its buffers real (so tables computed in
constructors are right), then each module draws its own parameters under a seed made from its name.
What a module draws depends on nothing else, so any layout can draw any part of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from shoal.seeding import mix
from shoal.torch_private import TorchDispatchMode, storage_key
from shoal.types import Weights


def build(build_model: Callable[[], nn.Module], wanted: Weights, seed: int) -> tuple[nn.Module, Weights]:
    """The model, on meta where it can be drawn by name, else built whole on the CPU; and which of the two."""
    if wanted.kind == "init":
        with parameters_on_meta(), _InitRecorder() as constructor:
            model = build_model()
        reason = _why_not_by_name(model, constructor)
        if reason is None:
            return model, wanted
        wanted = Weights("built", reason)
    torch.manual_seed(mix(seed, "build"))
    return build_model(), wanted


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules constructed here keep no parameter memory; buffers stay real."""

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return parameter
        # The twin is remembered so that one parameter registered twice stays one (tied weights).
        twin: nn.Parameter | None = getattr(parameter, "_meta_twin", None)
        if twin is None:
            twin = type(parameter)(parameter.to("meta"), requires_grad=parameter.requires_grad)
            parameter._meta_twin = twin  # type: ignore[attr-defined]
        return twin

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # may return one
    try:
        yield
    finally:
        handle.remove()


def materialise(model: nn.Module, device: torch.device, seed: int) -> None:
    """Gives every meta parameter its memory and its first value, module by module; moves the rest as it is.

    Drawn on the CPU whatever the device, so that a GPU starts from the weights a CPU starts from.
    """
    born: dict[int, nn.Parameter] = {}
    for name, module in _children_first(model):
        own = _own_meta_parameters(module)
        fresh = [parameter for parameter in own.values() if id(parameter) not in born]
        for parameter in fresh:
            empty = torch.empty_like(parameter, device="cpu")
            born[id(parameter)] = type(parameter)(empty, requires_grad=parameter.requires_grad)
        for key, parameter in own.items():
            module._parameters[key] = born[id(parameter)]
        if fresh and (reset := _reset_function(module)):
            torch.manual_seed(mix(seed, "init", name))
            reset()
    model.to(device)


def _why_not_by_name(model: nn.Module, constructor: _InitRecorder) -> str | None:
    """None if resetting each module in turn does exactly what the constructors did to every parameter.

    Init code that lives elsewhere (a loop at the end of a constructor, weights drawn before they became
    parameters) would be lost silently; such a model is built as it is instead.
    """
    done: set[int] = set()
    with _InitRecorder() as resets:
        for name, module in _children_first(model):
            own = {storage_key(p) for p in _own_meta_parameters(module).values()}
            if own <= done:
                continue
            reset = _reset_function(module)
            if reset is None:
                return f"{type(module).__name__}{f' {name!r}' if name else ''} has parameters but no reset_parameters()"
            reset()
            done |= own
    for name, parameter in model.named_parameters():
        key = storage_key(parameter)
        if constructor.writes.get(key, []) != resets.writes.get(key, []):
            return f"the constructor initialises {name!r} otherwise than its module's reset_parameters()"
    return None


class _InitRecorder(TorchDispatchMode):
    """Records what is written in place into tensors on the meta device: the program that initialises them."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: dict[int, list[tuple[Any, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and args and isinstance(args[0], Tensor) and args[0].is_meta:
            written = (str(func), *(arg for arg in args[1:] if isinstance(arg, int | float)))
            self.writes.setdefault(storage_key(args[0]), []).append(written)
        return func(*args, **(kwargs or {}))


def _own_meta_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {key: p for key, p in module._parameters.items() if p is not None and p.is_meta}


def _reset_function(module: nn.Module) -> Callable[[], None] | None:
    # nn.MultiheadAttention and nn.Transformer spell it with an underscore.
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _children_first(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The order in which constructors ran: what a parent does to its children comes after their own."""
    names = {module: name for name, module in model.named_modules()}

    def visit(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        name = names.pop(module, None)
        if name is None:
            return
        for child in module.children():
            yield from visit(child)
        yield name, module

    yield from visit(model)
