"""Which module first makes a number that is not finite. Run only when training has already gone wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.strategies import DistributedStrategy, Objective
from shoal.tensors import local_part
from shoal.types import MicroBatch


def first_bad_module(strategy: DistributedStrategy, model: nn.Module, micro: MicroBatch, recipe: Objective) -> str:
    """Repeats one forward and backward, eagerly, and says where the first non-finite value appears."""
    bad_names = [name for name, p in model.named_parameters() if not local_part(p).isfinite().all()]
    if strategy.highest(bool(bad_names)):  # all ranks go on or none does
        return f"parameter {bad_names[0]} is already not finite" if bad_names else "a parameter of another rank"
    found: list[str] = []
    hooks = []
    for name, module in model.named_modules():
        label = f"{name or 'the model'} ({type(module).__name__})"
        hooks.append(module.register_forward_hook(_watch(found, f"the output of {label}")))
        hooks.append(module.register_full_backward_hook(_watch(found, f"the gradient through {label}")))
    try:
        with torch.compiler.set_stance("force_eager"):
            if not strategy.calls_plainly:
                return _first_of_all_ranks(strategy, model, micro, recipe, found)
            batch = strategy.ready(micro, recipe)
            with strategy.autocast(), strategy.scoring(batch):
                loss = recipe.loss(model(**recipe.inputs(batch)), batch)
            bad_loss = not found and not loss.isfinite()
            # A backward that some ranks go through alone may hang.
            if not strategy.highest(bool(found) or bad_loss) and strategy.backs_plainly:
                loss.backward()
            if bad_loss:
                return "the loss, though the model's output is finite"
        if not (found or strategy.backs_plainly):
            return "in the backward: the model's output and its loss are finite"
        bad = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        return (
            found[0] if found else f"the gradient of {bad[0]}" if bad else "nothing on this batch: it is finite again"
        )
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad()


def _first_of_all_ranks(
    strategy: DistributedStrategy, model: nn.Module, micro: MicroBatch, recipe: Objective, found: list[str]
) -> str:
    """Where a model is computed by several ranks: the first in the order of ranks, which with one stage on each is the
    order of stages."""
    loss = strategy.evaluate(model, [micro], recipe).loss
    told: list[list[str]] = [[] for _ in range(strategy.world_size)]
    dist.all_gather_object(told, found[:1])
    first = next((labels[0] for labels in told if labels), None)
    return first or ("in the backward: outputs and the loss are finite" if loss.isfinite() else "the loss")


def _watch(found: list[str], label: str) -> Any:
    def hook(module: nn.Module, before: Any, after: Any) -> None:
        tensors = _tensors(after if label.startswith("the output") else before)
        if any(t.is_floating_point() and not t.isfinite().all() for t in tensors):
            found.append(label)

    return hook


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
