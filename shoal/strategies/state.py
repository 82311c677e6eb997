"""A run's state by the names of the unwrapped model: what a checkpoint stores, whatever the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import UserError
from shoal.types import TrainState


def collect_state(model: nn.Module, optimizer: Optimizer, own: dict[str, Tensor]) -> TrainState:
    """`own` is what the strategy itself keeps, such as a loss scale."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    moments = {
        names[parameter]: {key: value for key, value in state.items() if isinstance(value, Tensor)}
        for parameter, state in optimizer.state.items()
    }
    return TrainState(_model_state(model), moments, own)


@torch.no_grad()
def restore_state(model: nn.Module, optimizer: Optimizer, own: dict[str, Tensor], state: TrainState) -> None:
    """The inverse; the names must be those of the model (the checkpoint room has checked that)."""
    for name, tensor in _model_state(model).items():
        tensor.copy_(state.model[name])
    parameters = dict(model.named_parameters())
    for name, moments in state.optimizer.items():
        parameter = parameters[name]
        optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in moments.items()}
    for name in own.keys() & state.strategy.keys():  # a checkpoint of another precision has none
        own[name].copy_(state.strategy[name])


def optimizer_settings(optimizer: Optimizer) -> dict[str, Any]:
    """Which optimizer it is, and the numbers in its groups: torch's schedulers go on from the learning rate there."""
    groups = [{key: value for key, value in group.items() if _is_numeric(value)} for group in optimizer.param_groups]
    return {"kind": type(optimizer).__name__, "groups": groups}


def check_same_optimizer(optimizer: Optimizer, settings: dict[str, Any] | None, path: Path) -> None:
    """Refuses moments that mean something else; `settings` are those stored, if any."""
    kind, groups = type(optimizer).__name__, len(optimizer.param_groups)
    if settings and (settings["kind"], len(settings["groups"])) != (kind, groups):
        raise UserError(
            f"{path} was saved with {settings['kind']} in {len(settings['groups'])} parameter groups, but this is "
            f"{kind} in {groups}; build the optimizer it was saved from"
        )


def restore_settings(optimizer: Optimizer, settings: dict[str, Any] | None) -> None:
    for group, stored in zip(optimizer.param_groups, settings["groups"] if settings else (), strict=False):
        group |= {key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()}


def check_jsonable(name: str, value: Any) -> None:
    """Refuses what would not come back from JSON as it was."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise UserError(f"save_checkpoint: {name} has the key {key!r}, but JSON makes text of it; use str keys")
            check_jsonable(f"{name}[{key!r}]", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            check_jsonable(f"{name}[{index}]", inner)
    elif not isinstance(value, str | int | float | None):
        raise UserError(
            f"save_checkpoint: {name} is a {type(value).__name__}, which JSON cannot hold; give numbers, text, lists, "
            "dicts (a tensor's .item() or .tolist()), or make it a buffer of the model"
        )


def _is_numeric(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_numeric, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def _model_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers; what is tied appears once, under its first name."""
    seen: set[int] = set()
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            state[name] = tensor.detach()
    return state
