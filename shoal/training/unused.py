"""Finds the trained parameters that take no part in the loss, such as a layer that the forward never calls."""

from __future__ import annotations

from torch import nn

from shoal.checkpoint.peers import Peers
from shoal.strategies import DistributedStrategy


def find_unused(strategy: DistributedStrategy, model: nn.Module) -> list[str]:
    """Returns the trained parameters that have no gradient on any rank. Call it between a backward and its update.

    All ranks call it. DeepSpeed keeps gradients elsewhere, and gathering them costs as much as a step, so it is left
    out.
    """
    if strategy.layout.engine == "deepspeed":
        return []
    used = strategy.gradients(model).keys()
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    mine = {name: name in used for name in trained}
    on_any_rank: dict[str, bool] = {}
    for names in Peers().all_gather(mine):
        for name, has_gradient in names.items():
            on_any_rank[name] = on_any_rank.get(name, False) or has_gradient
    return [name for name, has_gradient in on_any_rank.items() if not has_gradient]
