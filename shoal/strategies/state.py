"""A run's state by the names of the unwrapped model: what a checkpoint stores, whatever the layout."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

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


def _model_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers; what is tied appears once, under its first name."""
    seen: set[int] = set()
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            state[name] = tensor.detach()
    return state
