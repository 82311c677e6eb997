"""State of modules that is not a parameter: persistent buffers, such as BatchNorm's running means, and extra state.

A forward may change it, and data-parallel ranks see different samples. So every step starts with the values of the
first data-parallel rank, in all layouts: nothing depends on when a buffer begins to change, saving does not disturb
training, and a run that resumes starts with the values that all ranks would have started with.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.checkpoint.pieces import StoredTensor, why_not_storable
from shoal.errors import UserError
from shoal.processes.group import cpu_group
from shoal.tensors import modules_with_extra_state, tensors_with_names

_BUCKET_BYTES = 1 << 26
"""What is copied into one message. A larger tensor is a message of its own, and is not copied."""
_JSON = ".json"
Groups = Sequence[dist.ProcessGroup | None]


class ModuleState:
    """The persistent buffers and the extra state of a model, which the ranks of `groups` make equal."""

    def __init__(self, model: nn.Module, groups: Groups):
        expand_memory(model)
        self._modules, self._groups = [*model.named_modules()], groups
        self._kinds = {name: _kind(buffer) for name, buffer in self._buffers().items()}
        self._stateful = dict(modules_with_extra_state(model))
        for name, module in self._stateful.items():
            if type(module).set_extra_state is nn.Module.set_extra_state:
                raise UserError(
                    f"{name}: {type(module).__name__} defines get_extra_state and not set_extra_state, so a run that "
                    "resumes could not give it back; define both"
                )
        self.extra_state()  # refuses what a checkpoint cannot hold

    def make_equal(self) -> None:
        """Gives every rank the values of the first data-parallel rank. A model without such state sends nothing."""
        buffers = self.check()
        if buffers and self._groups:
            broadcast(buffers, self._groups)
        if self._stateful and self._groups:
            mine, shared = self.extra_state(), [self.extra_state()]
            for group in self._groups:
                group = cpu_group(group)
                dist.broadcast_object_list(shared, dist.get_global_rank(group, 0) if group else 0, group)
            self.set_extra_state({name: t for name, t in shared[0].items() if not _equal(mine.get(name), t)})

    def extra_state(self) -> dict[str, Tensor]:
        """Returns what modules' `get_extra_state` gives, as tensors on the CPU that a checkpoint can hold.

        Anything but a tensor becomes the bytes of a JSON text, under a name with the ending `.json`.
        """
        encoded: dict[str, Tensor] = {}
        for name, module in self._stateful.items():
            value = module.get_extra_state()
            if type(value) is Tensor:
                encoded[name] = value.detach().cpu().clone()
                continue
            if problem := find_not_in_json(value):
                raise UserError(
                    f"{name}: get_extra_state of {type(module).__name__} returns {problem}, which a checkpoint "
                    "does not hold; return a tensor, or numbers, text, lists and dicts with text keys"
                )
            text = json.dumps(value).encode()
            # Padded, so that a counter with one digit more rarely changes the size.
            encoded[name + _JSON] = torch.frombuffer(bytearray(text + b" " * (-len(text) % 256)), dtype=torch.uint8)
        return encoded

    def set_extra_state(self, stored: Mapping[str, Tensor | StoredTensor]) -> None:
        """Gives modules their extra state back, as far as it is in `stored`."""
        for name, module in self._stateful.items():
            if name in stored:
                now = module.get_extra_state()
                module.set_extra_state(_read(stored[name]).clone().to(now.device if isinstance(now, Tensor) else "cpu"))
            elif name + _JSON in stored:
                module.set_extra_state(json.loads(bytes(_read(stored[name + _JSON]).tolist())))

    def check(self) -> list[Tensor]:
        """Returns the persistent buffers, each once; refuses those that are not what they were before the first step.

        A run that resumes builds the model anew: it would lack a buffer that a forward had registered, or have it in
        another shape. Ranks with different sequences would also have it in different shapes.
        """
        found = self._buffers()
        if not found and not self._kinds:
            return []
        if {name: _kind(buffer) for name, buffer in found.items()} != self._kinds:
            self._refuse(found)
        return [*{id(buffer): buffer for buffer in found.values()}.values()]

    def _refuse(self, found: dict[str, Tensor]) -> None:
        for name in sorted({*found, *self._kinds}):
            then, now = self._kinds.get(name, "absent"), _kind(found[name]) if name in found else "absent"
            if then != now:
                raise UserError(
                    f"buffer {name} was {_say(then)} before the first step and is {_say(now)} now, so a run that "
                    "resumes could not take it from a checkpoint; register it in the constructor with the shape and "
                    "dtype that it keeps, or with persistent=False if the forward can compute it again"
                )

    def _buffers(self) -> dict[str, Tensor]:
        """Returns the persistent buffers by name. It is called in every step, so it is no generator."""
        found = {}
        for prefix, module in self._modules:
            if module._buffers:
                for key, buffer in module._buffers.items():
                    if buffer is not None and key not in module._non_persistent_buffers_set:
                        found[f"{prefix}.{key}" if prefix else key] = buffer
        return found


def check_storable(model: nn.Module) -> None:
    """Refuses tensors that a checkpoint cannot hold, instead of failing when the first one is saved."""
    for tensor, (name, *_) in tensors_with_names(model):
        if reason := why_not_storable(tensor):
            advice = "" if isinstance(tensor, nn.Parameter) else ", or register it with persistent=False"
            raise UserError(f"{name} {reason}{advice}")


def find_not_in_json(value: Any, path: str = "") -> str | None:
    """Returns what JSON would not give back unchanged in a value, in words; None if there is nothing."""
    if type(value) is dict:
        if odd := [key for key in value if type(key) is not str]:
            return f"a dict with the key {odd[0]!r}{path}"
        inside = [find_not_in_json(inner, f" at [{key!r}]{path}") for key, inner in value.items()]
    elif type(value) is list:
        inside = [find_not_in_json(inner, f" at [{index}]{path}") for index, inner in enumerate(value)]
    else:
        return None if value is None or type(value) in (str, int, float, bool) else f"a {type(value).__name__}{path}"
    return next(filter(None, inside), None)


def _equal(first: Tensor | None, second: Tensor) -> bool:
    return first is not None and first.dtype == second.dtype and torch.equal(first, second)


def _read(value: Tensor | StoredTensor) -> Tensor:
    return value.read() if isinstance(value, StoredTensor) else value


Kind = tuple[torch.Size, torch.dtype]


def _kind(buffer: Tensor) -> Kind:
    return buffer.shape, buffer.dtype


def _say(kind: Kind | str) -> str:
    return kind if isinstance(kind, str) else f"{[*kind[0]]} {str(kind[1]).removeprefix('torch.')}"


def expand_memory(model: nn.Module) -> None:
    """Gives buffers that were made by `expand` memory for each element, so that they can be written."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.layout == torch.strided and _overlaps(buffer):
                module._buffers[key] = buffer.clone(memory_format=torch.contiguous_format)


def _overlaps(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def share_model(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Gives all ranks the parameters and buffers of the first one; refuses ranks that have built different models."""
    expand_memory(model)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    seen = crc32(repr([(name, _kind(tensor)) for name, tensor in tensors]).encode())
    highest = torch.tensor([seen, -seen])
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=cpu_group(group))
    if highest[0] != -highest[1]:
        raise UserError(
            "ranks have built different models: names, shapes or dtypes of parameters or buffers are not the same on "
            "all of them; build the same model everywhere"
        )
    broadcast((tensor for _, tensor in tensors if not tensor.is_meta), [group])


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], groups: Groups) -> None:
    """Overwrites tensors with those of the first rank of each group, in few messages.

    They are sent as bytes, because gloo knows few dtypes. They are written through `data`: a buffer that an earlier
    forward has used may be written before its backward, as under DDP, and autograd would take that for a mistake.
    """
    by_device: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for tensor in tensors:
        if tensor.numel():
            memory = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data
            as_bytes = memory.reshape(-1).view(torch.uint8)  # a copy if the memory is not contiguous
            by_device.setdefault(tensor.device.type, []).append((memory, as_bytes))
    for bucket in (bucket for members in by_device.values() for bucket in _buckets(members)):
        received = [as_bytes for _, as_bytes in bucket]
        joined = received[0] if len(bucket) == 1 else torch.cat(received)
        _send(joined, groups)
        for (memory, as_bytes), part in zip(bucket, joined.split([data.numel() for data in received]), strict=True):
            if as_bytes is not joined:
                as_bytes.copy_(part)
            if not memory.is_contiguous():
                memory.copy_(as_bytes.view(memory.dtype).view(memory.shape))


def _buckets(members: list[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yields the tensors that are sent together."""
    bucket, size = list[tuple[Tensor, Tensor]](), 0
    for member in members:
        if bucket and size + member[1].numel() > _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(member)
        size += member[1].numel()
    yield bucket


def _send(data: Tensor, groups: Groups) -> None:
    for group in groups:
        able = cpu_group(group) if data.device.type == "cpu" else group
        dist.broadcast(data, dist.get_global_rank(able, 0) if able else 0, able)
