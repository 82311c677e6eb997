"""The state of a run by the names of the plain model: what a checkpoint stores, in any layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shoal.checkpoint.pieces import StoredTensor
from shoal.checkpoint.regions import local_region, whole_region
from shoal.errors import UserError
from shoal.parallel.sharding.slots import slot_of, slots_as_tensors
from shoal.parallel.sharding.trial import starts_with_state
from shoal.tensors import local_part, local_slices, named_tensors
from shoal.torch_private import as_shard
from shoal.types import TrainState


def collect_state(model: nn.Module, optimizer: Optimizer, own: dict[str, Tensor]) -> TrainState:
    """Returns weights, buffers and optimizer state; `own` is the strategy's own state, such as a loss scale.

    The optimizer state of a sharded parameter is sharded like the parameter.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    moments: dict[str, dict[str, Tensor]] = {}
    for parameter, state in optimizer.state.items():
        whole = sharded_parameter(parameter)
        tensors = slots_as_tensors(state)
        if whole is not parameter and isinstance(whole, DTensor):
            shape = parameter.shape
            of_parts = getattr(optimizer, "slots_of_parts", ())
            tensors = {
                _name_of_part(slot, whole) if slot in of_parts else slot: as_shard(t, whole) if t.shape == shape else t
                for slot, t in tensors.items()
            }
        moments[names[whole]] = tensors
    return TrainState(named_tensors(model), moments, own)


@torch.no_grad()
def restore_state(model: nn.Module, optimizer: Optimizer | None, own: dict[str, Tensor], state: TrainState) -> None:
    """Loads a state one tensor at a time. Its values are whole tensors or on disk; each rank takes its part of them.

    The names must be those of the model. Weights that are not in the state, such as a frozen base that the model has
    already, stay as they are. Without an optimizer the weights alone are loaded.
    """
    for name, tensor in named_tensors(model).items():
        if name in state.model:
            local_part(tensor).copy_(part_in_layout(state.model[name], tensor))
    if optimizer is not None:
        _restore_slots(model, optimizer, state)
    restore_scale(own, state)


def _restore_slots(model: nn.Module, optimizer: Optimizer, state: TrainState) -> None:
    """Loads the optimizer's tensors, each to where the optimizer keeps it."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            whole = sharded_parameter(parameter)
            slots = state.optimizer.get(names[whole], {})
            stored = state.model.get(names[whole])
            if slots or not getattr(optimizer, "has_initial_state", False):
                optimizer.state.pop(parameter, None)  # one without state in the checkpoint has none afterwards
            for name, value in _slots_of_part(slots, whole, names[whole], optimizer).items():
                alike = tuple(value.shape) == tuple(whole.shape)
                part = part_in_layout(value, whole) if alike else part_in_layout(value, value)
                on_host = name == "step" and not part.ndim and not _counts_on_device(group)
                device = part.device if on_host else local_part(whole).device
                # In the same order in memory as the optimizer's own, because fused kernels go through memory.
                like = local_part(whole) if alike else torch.empty(part.shape)
                # State in the dtype of the weights follows them, if they have had another one in the checkpoint.
                follows = alike and stored is not None and part.dtype == stored.dtype
                dtype = whole.dtype if follows else part.dtype
                if alike and hasattr(optimizer, "get_state_buffer"):  # bitsandbytes' own, which may be paged
                    kept = optimizer.get_state_buffer(local_part(whole), dtype=part.dtype).copy_(part)
                else:
                    kept = torch.empty_like(like, dtype=dtype, device=device).copy_(part)
                sharded = alike and isinstance(parameter, DTensor)
                slot, restored = slot_of(name, as_shard(kept, parameter) if sharded else kept)
                optimizer.state[parameter][slot] = restored


def _name_of_part(slot: str, whole: DTensor) -> str:
    """Returns the name of a slot that is about this rank's part of a parameter, such as the scales of 8-bit moments."""
    return f"{slot}@{','.join(f'{rows.start}-{rows.stop}' for rows in local_slices(whole))}"


def _slots_of_part(slots: dict[str, Any], whole: Tensor, name: str, optimizer: Optimizer) -> dict[str, Any]:
    """Returns the slots of this rank, without those of other parts. Raises UserError if the parts are others."""
    result = {slot: value for slot, value in slots.items() if "@" not in slot}
    for slot in getattr(optimizer, "slots_of_parts", ()):
        stored = {key for key in slots if key.partition("@")[0] == slot}
        wanted = _name_of_part(slot, whole) if isinstance(whole, DTensor) else slot
        if stored and wanted not in stored:
            raise UserError(
                f"training.optimizer: the 8-bit state of {name} was saved in another layout, whose parts have other "
                "scales; resume in that layout, or start anew from the weights with checkpoint.init_from"
            )
        if stored:
            result[slot] = slots[wanted]
    return result


def note_initial_state(optimizer: Optimizer) -> None:
    """Notes whether the optimizer's constructor makes state, as Adagrad's does.

    A fresh start, without state in a checkpoint, then leaves that state, which the first step needs.
    """
    optimizer.has_initial_state = starts_with_state(optimizer)  # type: ignore[attr-defined]


def _counts_on_device(group: dict[str, Any]) -> bool:
    """Returns whether step counts are on the device; torch keeps them on the CPU otherwise, where the host reads."""
    return bool(group.get("fused") or group.get("capturable"))


def restore_scale(own: dict[str, Tensor], state: TrainState) -> None:
    """Puts back the loss scale; a checkpoint of another precision has none."""
    for name in own.keys() & state.strategy.keys():
        own[name].copy_(part_in_layout(state.strategy[name], own[name]))


def sharded_parameter(parameter: Tensor) -> Tensor:
    """Returns the model's parameter for one of the optimizer's, which may be the local part of a DTensor."""
    return getattr(parameter, "shard_of", parameter)


def part_in_layout(value: Tensor | StoredTensor, like: Tensor | StoredTensor) -> Tensor:
    """Returns this rank's part of `value` in the layout of `like`."""
    if not isinstance(like, DTensor):
        return value.read() if isinstance(value, StoredTensor) else value
    if isinstance(value, DTensor):
        return value.redistribute(like.device_mesh, like.placements).to_local()
    region = local_region(like)
    if isinstance(value, StoredTensor):
        return value.read(region)
    return value[region.slices_in(whole_region(value.shape))]


def optimizer_settings(optimizer: Optimizer) -> dict[str, Any]:
    """Returns the optimizer's class and the numbers in its groups, such as the learning rate that schedulers set."""
    groups = [{key: value for key, value in group.items() if _is_numeric(value)} for group in optimizer.param_groups]
    return {"kind": type(optimizer).__name__, "groups": groups}


def check_same_optimizers(optimizers: Sequence[Optimizer], settings: Sequence[Any], path: Path) -> None:
    """Refuses the state of other optimizers; `settings` are those of the checkpoint, None if it has none for one."""
    if len(settings) != len(optimizers):
        raise UserError(f"{path} was saved with {len(settings)} optimizers, but the loop has {len(optimizers)}")
    for optimizer, stored in zip(optimizers, settings, strict=True):
        kind, groups = type(optimizer).__name__, len(optimizer.param_groups)
        if stored and (stored["kind"], len(stored["groups"])) != (kind, groups):
            raise UserError(
                f"{path} was saved with {stored['kind']} in {len(stored['groups'])} parameter groups, but this is "
                f"{kind} in {groups}; build the optimizer it was saved from"
            )


def restore_settings(optimizer: Optimizer, settings: dict[str, Any] | None) -> None:
    for group, stored in zip(optimizer.param_groups, settings["groups"] if settings else (), strict=False):
        group |= {key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()}


def check_jsonable(name: str, value: Any) -> None:
    """Refuses a value that JSON would not give back unchanged."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise UserError(f"save: {name} has the key {key!r}, but keys in JSON are text; use str keys")
            check_jsonable(f"{name}[{key!r}]", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            check_jsonable(f"{name}[{index}]", inner)
    elif not isinstance(value, str | int | float | None):
        raise UserError(
            f"save: {name} is a {type(value).__name__}, which JSON cannot hold; give numbers, text, lists or dicts (a "
            "tensor's .item() or .tolist()), or make it a buffer of the model"
        )


def _is_numeric(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_numeric, value))
    return isinstance(value, int | float) and not isinstance(value, bool)
