"""Where weights come from, and how every layout starts from the same ones.

A model is born with its parameters on the meta device and its buffers real (so tables computed in
constructors are right), then each module draws its own parameters under a seed made from its name.
What a module draws depends on nothing else, so any layout can draw any part of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from shoal.errors import UserError
from shoal.seeding import mix
from shoal.tensors import local_part, local_slices, replace_parameters, tensors_with_names
from shoal.torch_private import TorchDispatchMode, storage_key
from shoal.types import Weights

Reset = Callable[[nn.Module, nn.Module], None]
DRAWN = Weights("init")


def build(build_model: Callable[[], nn.Module], wanted: Weights, seed: int) -> tuple[nn.Module, Weights]:
    """The model, on meta where its weights are drawn by name or read, else built whole on the CPU; and which it is."""
    if wanted.kind != "built":
        with parameters_on_meta(), _InitRecorder() as constructor:
            model = build_model()
        if wanted.kind == "files":
            return model, replace(wanted, reason=_check_files(model, wanted))
        reason = _why_not_by_name(model, constructor, wanted.reset)
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


def materialise(
    model: nn.Module,
    device: torch.device,
    seed: int,
    weights: Weights = DRAWN,
    parameters_on: torch.device | None = None,
) -> None:
    """Gives every meta parameter its memory and its first value; moves the rest as it is.

    A parameter that is a DTensor gets its shard: the whole is drawn, or only the shard read, one module at a time.
    `parameters_on` is another device for parameters, under offload.
    """
    targets = _allocate(model, parameters_on or device)
    model.to(parameters_on or device)  # FSDP then looks for the memory its parameters got
    if parameters_on:
        move_buffers(model, device)
    if weights.kind == "files":
        if weights.reset:
            _Draw(model, seed, weights.reset, _not_in_files(model, weights, targets))(model)
        _read(model, weights)
    elif targets:
        _Draw(model, seed, weights.reset, targets)(model)


def move_buffers(model: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """To a device and, if they are floating-point, to a type."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(device, dtype if buffer.is_floating_point() else None)


def _allocate(model: nn.Module, device: torch.device) -> dict[int, nn.Parameter]:
    """Allocates this rank's part of every meta parameter, and returns the new parameters by their id."""
    born: list[nn.Parameter] = []

    def allocate(parameter: nn.Parameter) -> nn.Parameter:
        if not parameter.is_meta:
            return parameter
        kind = nn.Parameter if isinstance(parameter, DTensor) else type(parameter)
        empty = torch.empty_like(parameter, device=device)
        born.append(kind(empty, requires_grad=parameter.requires_grad))
        return born[-1]

    replace_parameters(model, allocate)
    return {id(parameter): parameter for parameter in born}


class _Draw:
    """Draws parameters module by module, children first, each module under a seed made from its name.

    On the CPU whatever the device, so that a GPU starts from the weights a CPU starts from; and whole whatever the
    shard, so that every layout does. What a module's own reset might touch, its children included, stays whole until
    that has run, and not longer.
    """

    def __init__(self, model: nn.Module, seed: int, reset: Reset | None, targets: dict[int, nn.Parameter]):
        self.model, self.seed, self.reset, self.targets = model, seed, reset, targets
        self.names = {module: name for name, module in model.named_modules()}
        self.whole: dict[int, nn.Parameter] = {}
        self.places: list[tuple[nn.Module, str, nn.Parameter]] = []

    def __call__(self, module: nn.Module, held: bool = False) -> None:
        name = self.names.pop(module, None)
        if name is None:  # it is in the model twice
            return
        reset = _reset_function(self.model, module, self.reset)
        for child in module.children():
            self(child, held or (reset is not None and self.reset is None))
        fresh = False
        for key, target in module._parameters.items():
            if target is None or id(target) not in self.targets:
                continue
            if id(target) not in self.whole:
                empty = torch.empty(target.shape, dtype=target.dtype)
                kind = nn.Parameter if isinstance(target, DTensor) else type(target)
                self.whole[id(target)] = kind(empty, requires_grad=target.requires_grad)
                fresh = True
            self.places.append((module, key, target))
            module._parameters[key] = self.whole[id(target)]
        if fresh and reset:
            torch.manual_seed(mix(self.seed, "init", name))
            reset()
        if not held:
            self._settle()

    @torch.no_grad()
    def _settle(self) -> None:
        for module, key, target in self.places:
            local_part(target).copy_(self.whole[id(target)][tuple(local_slices(target))])
            module._parameters[key] = target
            self.targets.pop(id(target), None)  # what is tied has several places
        self.places.clear()
        self.whole.clear()


@torch.no_grad()
def _read(model: nn.Module, weights: Weights) -> None:
    """Copies from safetensors what this rank holds, and reads no more than that."""
    with ExitStack() as files:
        stored = _open_files(weights.files, files)
        for tensor, names in tensors_with_names(model):
            file = next((stored[name].get_slice(name) for name in names if name in stored), None)
            if file is not None:
                local_part(tensor).copy_(file[tuple(local_slices(tensor))])


def _check_files(model: nn.Module, weights: Weights) -> str:
    """Refuses files that lack a parameter or have it in another shape; returns what they have and the model has not."""
    where = weights.files[0].parent if weights.files else "no file"
    known: set[str] = set()
    with ExitStack() as files:
        stored = _open_files(weights.files, files)
        parameters = {id(parameter) for parameter in model.parameters()}
        for tensor, names in tensors_with_names(model):
            known.update(names)
            name = next((name for name in names if name in stored), None)
            drawn = weights.reset is not None and tensor.requires_grad
            if name is None and id(tensor) in parameters and not drawn:
                raise UserError(f"{where} has no tensor {names[0]!r} (it has {', '.join(sorted(stored)[:3])}, …)")
            if name is not None and (shape := stored[name].get_slice(name).get_shape()) != [*tensor.shape]:
                raise UserError(f"{where}: {name} has shape {shape}, but the model's is {[*tensor.shape]}")
        unused = sorted(stored.keys() - known)
    return f"{len(unused)} tensors in them are not the model's: {', '.join(unused[:3])}" if unused else ""


def _not_in_files(model: nn.Module, weights: Weights, targets: dict[int, nn.Parameter]) -> dict[int, nn.Parameter]:
    """What has to be drawn: all parameters of modules with one that no file has; a reset may draw them together."""
    with ExitStack() as files:
        stored = _open_files(weights.files, files)
        lacking = {id(tensor) for tensor, names in tensors_with_names(model) if not stored.keys() & set(names)}
    drawn: dict[int, nn.Parameter] = {}
    for module in model.modules():
        own = {id(p): p for p in module._parameters.values() if p is not None and id(p) in targets}
        drawn |= own if own.keys() & lacking else {}
    return drawn


def _open_files(paths: tuple[Path, ...], files: ExitStack) -> dict[str, Any]:
    """Name → the open file that has it."""
    stored: dict[str, Any] = {}
    for path in paths:
        try:
            file = files.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read as safetensors: {error}") from None
        stored |= dict.fromkeys(file.keys(), file)
    return stored


def _why_not_by_name(model: nn.Module, constructor: _InitRecorder, given: Reset | None) -> str | None:
    """None if resetting each module in turn does exactly what the constructors did to every parameter.

    Init code that lives elsewhere (a loop at the end of a constructor, weights drawn before they became
    parameters) would be lost silently; such a model is built as it is instead. A reset that the recipe gives has
    only to reach every parameter.
    """
    done: set[int] = set()
    with _InitRecorder() as resets:
        for name, module in _children_first(model):
            own = {storage_key(p) for p in _own_meta_parameters(module).values()}
            if own <= done:
                continue
            reset = _reset_function(model, module, given)
            if reset is None:
                return f"{type(module).__name__}{f' {name!r}' if name else ''} has parameters but no reset_parameters()"
            reset()
            done |= own
    for name, parameter in model.named_parameters():
        key = storage_key(parameter)
        if given and key not in resets.writes:
            return f"the recipe's reset leaves {name!r} as it is"
        if not given and constructor.writes.get(key, []) != resets.writes.get(key, []):
            return f"the constructor initialises {name!r} otherwise than its module's reset_parameters()"
    return None


class _InitRecorder(TorchDispatchMode):
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


def _own_meta_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {key: p for key, p in module._parameters.items() if p is not None and p.is_meta}


def _reset_function(model: nn.Module, module: nn.Module, given: Reset | None) -> Callable[[], None] | None:
    if given is not None:
        return partial(given, model, module)
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
