"""Generation: the state that replaces earlier tokens, and the choice of the next token."""

from __future__ import annotations

import torch
from torch import Tensor


class Memory:
    """What one level stores about earlier tokens: the sum over them of rope(s)ᵀ x, (heads, batch, neurons, embd).

    Because there is no softmax, attention to earlier tokens is a product with this sum, so the cost of a token does not
    depend on how many came before. The sum is stored in at least float32: in bf16, adding small terms to a large sum
    would have no effect.
    """

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def recall(self, keys: Tensor) -> Tensor | float:
        """Returns what the tokens before this chunk contribute to it: (heads, batch, time, embd)."""
        return 0.0 if self.total is None else keys @ self.total.to(keys.dtype)

    def store(self, keys: Tensor, values: Tensor) -> None:
        """Adds the tokens of this chunk."""
        added = keys.mT @ values
        if self.total is None:
            self.total = added.to(torch.promote_types(added.dtype, torch.float32))
        else:
            self.total += added


class State:
    """The state of a sequence: how many tokens the model has read, and the memory of each level."""

    def __init__(self, num_levels: int) -> None:
        self.position = 0
        self.memories = [Memory() for _ in range(num_levels)]


def sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Draws one token per sequence: (batch, vocab) → (batch, 1). Temperature 0 takes the most likely token."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    vocab = logits.shape[-1]
    values, tokens = logits.float().topk(min(top_k or vocab, vocab))  # exactly k, even if logits are equal
    drawn = torch.multinomial((values / temperature).softmax(-1), 1, generator=generator)
    return tokens.gather(-1, drawn)
