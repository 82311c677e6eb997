"""Gives a model that has been placed the gradients of one device, so that the update can be checked by itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.parallel.zero.partition import set_gradient
from shoal.strategies import DistributedStrategy
from shoal.tensors import local_part, local_slices
from shoal.torch_private import as_shard


@torch.no_grad()
def set_gradients(
    strategy: DistributedStrategy, model: nn.Module, gradients: Mapping[str, Tensor], factor: float
) -> None:
    """Replaces the gradients of a model by whole ones times `factor`; this rank takes its part of each.

    DeepSpeed holds gradients between a backward and the next step only, so a backward has to come first.
    """
    layout = strategy.layout
    if layout.engine == "deepspeed" and layout.zero.stage == 3:
        factor = factor / strategy.data_size  # it averages over ranks, and the update takes that back
    for name, parameter in model.named_parameters():
        if name not in gradients:
            continue
        if layout.engine == "deepspeed":
            set_gradient(parameter, gradients[name] * factor)
        else:
            _set_part(parameter, gradients[name][tuple(local_slices(parameter))] * factor)


def _set_part(parameter: nn.Parameter, part: Tensor) -> None:
    """Sets the gradient of what this rank holds, in the memory that a gradient already has, such as a bucket's."""
    if parameter.grad is None:
        gradient = torch.empty_like(local_part(parameter))
        parameter.grad = as_shard(gradient, parameter) if isinstance(parameter, DTensor) else gradient
    local_part(parameter.grad).copy_(part)
