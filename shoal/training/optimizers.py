"""Optimizers by name. All are fused: one kernel updates all parameters, and can skip the update on the device.

torch has no fused kernels for complex parameters; a model that has some gets an optimizer that is not fused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from shoal.config.schema import SGD, TrainingConfig


def build_optimizer(training: TrainingConfig, groups: list[dict[str, Any]]) -> Optimizer:
    fused = not any(parameter.is_complex() for group in groups for parameter in group["params"])
    common: dict[str, Any] = {"lr": training.learning_rate, "weight_decay": training.weight_decay, "fused": fused}
    chosen = training.optimizer
    if isinstance(chosen, SGD):
        optimizer: Optimizer = torch.optim.SGD(groups, momentum=chosen.momentum, nesterov=chosen.nesterov, **common)
    else:
        optimizer = torch.optim.AdamW(groups, betas=(chosen.betas[0], chosen.betas[1]), eps=chosen.eps, **common)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


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
