"""Finds parameters that the model's forward writes, such as the weights of a mean teacher inside the model.

Where parameters are sharded, a forward sees copies that are gathered for it, and what it writes into them is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.strategies import DistributedStrategy
from shoal.strategies.contract import prepare_batch
from shoal.tensors import map_tensors
from shoal.torch_private import storage_key
from shoal.types import MicroBatch, Objective


def check_forward_writes(
    meta_model: nn.Module | None,
    micro: MicroBatch,
    recipe: Objective,
    seed: int,
    strategy: DistributedStrategy,
    warn: Callable[[str], None],
) -> None:
    """Refuses a forward that writes parameters where that would be lost, and warns where ranks might drift apart.

    `meta_model` is the model on meta, as it was before any layout changed it. A model that cannot run on meta is not
    checked.
    """
    if meta_model is None or strategy.world_size == 1:
        return
    batch = map_tensors(lambda tensor: tensor.to("meta"), prepare_batch(micro, recipe, seed, strategy.device))
    names = written_parameters(meta_model, recipe.inputs(batch))
    if not names:
        return
    layout = strategy.layout
    if layout.engine in ("fully_shard", "deepspeed") or layout.mesh["tp"] > 1:
        raise UserError(
            f"the forward writes parameter {names[0]}, and strategy {strategy.name} would lose what it writes; keep it "
            "in a buffer, use the callback `ema` for an average of the weights, or use strategy ddp"
        )
    warn(
        f"the forward writes parameter {names[0]}; every rank must write the same values, or the ranks drift apart "
        "(distributed.desync_steps compares them)"
    )


@torch.no_grad()
def written_parameters(meta_model: nn.Module, inputs: dict[str, Any]) -> list[str]:
    """Returns the names of the parameters that a forward on meta writes in place or replaces."""

    def state(parameter: Tensor) -> tuple[int, int]:
        return parameter._version, storage_key(parameter)

    before = {name: state(parameter) for name, parameter in meta_model.named_parameters()}
    try:
        meta_model(**inputs)
    except Exception:  # models of other libraries may raise anything on meta
        return []
    after = {name: state(parameter) for name, parameter in meta_model.named_parameters()}
    return [name for name in before if after.get(name) != before[name]]
