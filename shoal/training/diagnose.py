"""Finds the module that first computes a number that is not finite, once training has gone wrong."""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.peers import Peers
from shoal.strategies import DistributedStrategy
from shoal.tensors import is_packed, local_part
from shoal.types import MicroBatch, Objective


def first_bad_module(strategy: DistributedStrategy, model: nn.Module, micro: MicroBatch, recipe: Objective) -> str:
    """Repeats one forward and backward, eagerly, and says where the first non-finite value appears.

    All ranks take part, and the first in the order of ranks is named: with one stage on each, the order of stages.
    """
    if bad := bad_parameter(strategy, model):
        return bad
    found: list[str] = []
    hooks = []
    # Backward hooks on modules do not work under DeepSpeed, nor with a pipeline's split backward.
    watches_backward = strategy.layout.engine != "deepspeed" and strategy.layout.mesh["pp"] == 1
    for name, module in model.named_modules():
        label = f"{name or 'the model'} ({type(module).__name__})"
        hooks.append(module.register_forward_hook(_watch(found, f"the output of {label}")))
        if watches_backward:
            hooks.append(module.register_full_backward_hook(_watch(found, f"the gradient through {label}")))
    recorded = strategy.engaged.recorded
    try:
        if recorded is not None:
            recorded.is_paused = True
        with torch.compiler.set_stance("force_eager"):
            output = strategy.forward_backward(model, [micro], recipe, 0)
        if not found:
            gradients = strategy.gradients(model) if watches_backward else {}
            found = [f"the gradient of {name}" for name, g in gradients.items() if not local_part(g).isfinite().all()]
        by_rank = Peers().all_gather(found)
    finally:
        if recorded is not None:
            recorded.is_paused = False
        for hook in hooks:
            hook.remove()
        model.zero_grad()
    loss, count = output.loss, output.count.item()
    if not 0 <= count < inf:
        return f"the recipe's count of the last batch is {count:g}; it must be a finite number, at least 0"
    culprits = [names[0] for names in by_rank if names]
    if not loss.isfinite() and not any(name.startswith("the output") for name in culprits):
        return "the first bad value is the loss, though the model's output is finite"
    if culprits:
        return f"the first bad value is {culprits[0]}"
    if watches_backward:
        return "the last batch gives finite values when it is repeated"
    return "the first bad value is in the backward: the model's output and its loss are finite"


def bad_parameter(strategy: DistributedStrategy, model: nn.Module) -> str:
    """Returns which parameter is not finite, or an empty string if all are. All ranks call it."""
    numbers = [(name, parameter) for name, parameter in model.named_parameters() if not is_packed(parameter)]
    bad_names = [name for name, parameter in numbers if not local_part(parameter).isfinite().all()]
    if not strategy.any_rank(bool(bad_names)):  # all ranks continue or none does
        return ""
    where = f"parameter {bad_names[0]}" if bad_names else "a parameter of another rank"
    return f"{where} is already not finite"


def _watch(found: list[str], label: str) -> Any:
    def hook(module: nn.Module, before: Any, after: Any) -> None:
        if _has_bad_value(after if label.startswith("the output") else before):
            found.append(label)

    return hook


def _has_bad_value(value: Any) -> bool:
    """Returns whether a tensor in this nesting of dicts, lists and tuples is not finite."""
    if isinstance(value, Tensor):
        return value.is_floating_point() and not value.isfinite().all()
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(map(_has_bad_value, items))
