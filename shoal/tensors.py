"""The tensors of a model by name, and the part of each that this rank holds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.torch_private import shape_and_offset

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The floating-point dtypes by the names that configs and commands use."""
EXTRA_STATE = "_extra_state"
"""What torch adds to a module's name for the state that its `get_extra_state` returns."""
_INTEGER_OF_SIZE = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def local_part(tensor: Tensor) -> Tensor:
    """Returns the part of a tensor that this rank holds, in the same memory; all of it if it is not sharded."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def local_slices(tensor: Tensor) -> list[slice]:
    """Returns where this rank's part lies in the logical tensor, one slice per dimension."""
    if not isinstance(tensor, DTensor):
        return [slice(0, size) for size in tensor.shape]
    shape, offset = shape_and_offset(tensor)
    return [slice(start, start + size) for start, size in zip(offset, shape, strict=True)]


def logical_shape(tensor: Tensor) -> tuple[int, ...]:
    """Returns the shape of the whole tensor. A parameter that ZeRO-3 has partitioned is empty; DeepSpeed keeps its
    shape in an attribute."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def logical_numel(parameter: Tensor) -> int:
    """Returns the number of weights that a parameter stands for; one of packed weights has it as an attribute."""
    return int(getattr(parameter, "logical_numel", parameter.numel()))


def is_packed(parameter: Tensor) -> bool:
    """Returns whether a parameter is part of quantised weights, which may have a floating-point dtype and yet are bits
    that no cast may change."""
    return hasattr(parameter, "logical_numel")


def tensors_with_names(model: nn.Module) -> Iterator[tuple[Tensor, list[str]]]:
    """Yields every parameter and persistent buffer once, with all the names it has (tied weights have several)."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name.rpartition(".")[2] == EXTRA_STATE:  # what a module returns besides; see strategies/module_state.py
            continue
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    yield from found.values()


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and persistent buffers by name; a tied one appears once, under its first name."""
    return {names[0]: tensor.detach() for tensor, names in tensors_with_names(model)}


def modules_with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules that define torch's `get_extra_state`, each with the name of that state in a state_dict."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{name}.{EXTRA_STATE}" if name else EXTRA_STATE, module


@contextmanager
def module_state_kept(modules: Iterable[nn.Module], except_for: Collection[nn.Module] = ()) -> Iterator[None]:
    """Gives buffers and extra state back the values that they had, after a forward that is not part of the training.

    A buffer that the forward registered, or replaced by one of another shape, is left: it is a cache, and the module
    may remember in an attribute that it has it. `except_for` are modules that keep what the forward makes of them.
    """
    modules = [*modules]
    extra = [(m, copy.deepcopy(m.get_extra_state())) for module in modules for _, m in modules_with_extra_state(module)]
    members = [member for module in modules for member in module.modules() if member not in except_for]
    before = [{name: buffer.clone() for name, buffer in member.named_buffers(recurse=False)} for member in members]
    try:
        yield
    finally:  # also after an error that somebody handles, such as a lack of memory
        for member, values in zip(members, before, strict=True):
            for name, buffer in member.named_buffers(recurse=False):
                if name in values and values[name].shape == buffer.shape:
                    buffer.data.copy_(values[name])
        for module, value in extra:
            module.set_extra_state(value)


def replace_parameters(model: nn.Module, replace: Callable[[nn.Parameter], nn.Parameter]) -> dict[int, nn.Parameter]:
    """Puts `replace(parameter)` in the place of each parameter, and returns the new ones by the id of the old.

    A parameter that is tied to another is replaced once, so that the two stay tied. One of packed weights stays marked
    as such (see `logical_numel`).
    """
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in replaced:
                replaced[id(parameter)] = new = replace(parameter)
                if is_packed(parameter):
                    new.logical_numel = parameter.logical_numel  # type: ignore[attr-defined]
            module._parameters[key] = replaced[id(parameter)]
    return replaced


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Returns the same nesting of mappings, lists, tuples and named tuples with `function` applied to every tensor."""
    if isinstance(tree, Tensor):
        return function(tree)
    if type(tree) is dict:
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, MutableMapping):
        mapped = copy.copy(tree)  # keeps the class, also one whose constructor takes other arguments than a dict's
        for key, value in tree.items():  # transformers' outputs have no `update`
            mapped[key] = map_tensors(function, value)
        return mapped
    if isinstance(tree, list | tuple):
        values = [map_tensors(function, value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree


def is_on_host(tensor: Tensor) -> bool:
    """Returns whether the host can read the numbers of a tensor without waiting for a device.

    A tensor of a subclass may be a fake one, which has no numbers.
    """
    return tensor.is_cpu and type(tensor) is Tensor


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Returns the dtype that autocast computes products of a device in, or None if it is off."""
    if device.type == "meta":  # torch raises for it
        return None
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


@cache  # operators ask in every call
def why_no_triton(device: torch.device) -> str | None:
    """Returns why kernels in Triton cannot run on a device, or None if they can."""
    if device.type != "cuda":
        return f"Triton needs a CUDA device, and this is {device.type}"
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"the kernels need an Ampere GPU or a newer one, and this is {torch.cuda.get_device_name(device)}"
    return None


def tiles_ahead(rank: int) -> int:
    """Returns how many tiles a kernel of an adapter loads ahead, for a rank that is rounded up to a power of 2.

    Three of the widest ones need up to 120 KiB of a multiprocessor's memory, and an RTX 4090, an A10 or an L4 has 99.
    """
    return 3 if rank <= 64 else 2


def fingerprint(tensor: Tensor) -> Tensor:
    """Returns the sum of a tensor's bits, read as integers, in one pass over its memory.

    Reads eight bytes at a time where the size allows it: a CPU takes ten times as long to widen smaller integers.
    """
    flat = tensor.contiguous().view(-1)
    if flat.nbytes % 8:
        return flat.view(_INTEGER_OF_SIZE[flat.element_size()]).sum(dtype=torch.int64)
    if flat.storage_offset() * flat.element_size() % 8:  # a view as int64 needs aligned memory
        flat = flat.clone()
    return flat.view(torch.int64).sum()
