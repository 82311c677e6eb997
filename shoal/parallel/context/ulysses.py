"""Context parallelism: ranks share the tokens of every sequence.

Layers that treat every token by itself need no communication. In attention each rank trades all heads of its tokens for
all tokens of some heads, and back afterwards (Ulysses, arXiv:2309.14509).
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.parallel.collectives import swap


class HeadExchange:
    """Trades tokens for heads; the attention of `shoal.models.causal_attention` calls it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size = group, dist.get_world_size(group)
        self.paused = False
        """True while all ranks have all tokens, such as in a preview."""

    def to_heads(self, states: Tensor) -> Tensor:
        """Turns (batch, heads, local tokens, size) into (batch, local heads, tokens, size)."""
        if self.paused:
            return states
        if states.shape[1] % self.size:
            raise UserError(
                f"distributed.mesh.cp = {self.size} does not divide the {states.shape[1]} heads that a rank has; "
                "queries, keys and values are exchanged by heads"
            )
        return swap(states, 1, 2, self.group)

    def to_tokens(self, states: Tensor) -> Tensor:
        """Turns (batch, tokens, local heads, size) into (batch, local tokens, heads, size)."""
        return states if self.paused else swap(states, 1, 2, self.group)


def attentions(model: nn.Module) -> list[nn.Module]:
    """Returns the attention modules that can exchange heads; raises UserError if there are none."""
    found = [module for module in model.modules() if hasattr(module, "exchange")]
    if not found:
        raise UserError(
            f"distributed.mesh.cp > 1, but the attention of {type(model).__name__} cannot share a sequence; it works "
            "for transformers models of recipe causal_lm with plain causal attention, such as Llama"
        )
    return found


def apply_context_parallel(model: nn.Module, group: dist.ProcessGroup) -> HeadExchange:
    """Makes every attention of the model exchange heads."""
    exchange = HeadExchange(group)
    for module in attentions(model):
        module.exchange = exchange  # type: ignore[assignment]
    return exchange
