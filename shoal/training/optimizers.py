"""Optimizers by name. All are fused: one kernel updates all parameters, and can skip the update on the device.

torch has no fused kernels for complex parameters; a model that has some gets an optimizer that is not fused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.config.schema import SGD, TrainingConfig
from shoal.errors import UserError


def build_optimizer(training: TrainingConfig, groups: list[dict[str, Any]]) -> Optimizer:
    fused = not any(parameter.is_complex() for _, parameter in _members(groups))
    common: dict[str, Any] = {"lr": training.learning_rate, "weight_decay": training.weight_decay, "fused": fused}
    chosen = training.optimizer
    if isinstance(chosen, SGD):
        optimizer: Optimizer = torch.optim.SGD(groups, momentum=chosen.momentum, nesterov=chosen.nesterov, **common)
    else:
        optimizer = torch.optim.AdamW(groups, betas=(chosen.betas[0], chosen.betas[1]), eps=chosen.eps, **common)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def freeze_ungrouped(model: nn.Module, groups: Iterable[Any]) -> list[str]:
    """Freezes the parameters that are in no parameter group, and returns their names.

    No optimizer would use or clear their gradients, which would grow in every step. It is done before the model is
    placed, so that every engine sees them as frozen. Refuses a parameter that is in the groups twice, because it would
    be updated twice.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    group_of: dict[int, int] = {}
    for number, parameter in _members(groups):
        if (other := group_of.get(id(parameter))) is not None:
            where = f"groups {other} and {number}" if other != number else f"group {number} twice"
            raise UserError(
                f"the recipe's param_groups: {names.get(id(parameter), 'a parameter')} is in {where} and would be "
                "updated twice; put it into one group, once"
            )
        group_of[id(parameter)] = number
    frozen = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in group_of]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return frozen


def _members(groups: Iterable[Any]) -> Iterator[tuple[int, Tensor]]:
    """Yields each parameter with the number of its group.

    As torch's optimizers do, it takes parameters without groups, and (name, parameter) for a parameter.
    """
    for number, group in enumerate(groups):
        members = group["params"] if isinstance(group, dict) else group
        for member in [members] if isinstance(members, Tensor) else members:
            yield number, member[1] if isinstance(member, tuple) else member


def kept_slots(training: TrainingConfig) -> set[str]:
    """Returns the names of the tensors that the optimizer keeps for each parameter, such as exp_avg.

    torch has no list of them, so an optimizer of one number takes a step, and its state is looked at.
    """
    number = torch.zeros(1, requires_grad=True)
    number.grad = torch.zeros(1)
    optimizer = build_optimizer(training, [{"params": [number]}])
    optimizer.step()
    return {slot for slot, value in optimizer.state[number].items() if isinstance(value, torch.Tensor)}


def set_learning_rate(optimizer: Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
