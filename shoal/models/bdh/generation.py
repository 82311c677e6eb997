"""What generation needs beyond the model: the memory that replaces earlier tokens, and the choice of the next one."""

from __future__ import annotations

import torch
from torch import Tensor


class Memory:
    """All that one level keeps of earlier tokens: the sum over them of rope(s)ᵀ x, (heads, batch, neurons, embd).

    Without a softmax, attending to the past is a product with this sum, so a token costs the same however
    many came before. It is kept in at least float32: in bf16 a long sum would stop taking new terms.
    """

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def recall(self, keys: Tensor) -> Tensor | float:
        """What the tokens before this chunk contribute to it: (heads, batch, time, embd)."""
        return 0.0 if self.total is None else keys @ self.total.to(keys.dtype)

    def store(self, keys: Tensor, values: Tensor) -> None:
        written = keys.mT @ values
        if self.total is None:
            self.total = written.to(torch.promote_types(written.dtype, torch.float32))
        else:
            self.total += written


class State:
    """Where a sequence stands: how many tokens were read, and the memory of each level."""

    def __init__(self, num_levels: int) -> None:
        self.position = 0
        self.memories = [Memory() for _ in range(num_levels)]


def sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """(batch, vocab) → one token each, (batch, 1). Temperature 0 takes the most likely."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    vocab = logits.shape[-1]
    values, tokens = logits.float().topk(min(top_k or vocab, vocab))  # exactly k, also among equal logits
    drawn = torch.multinomial((values / temperature).softmax(-1), 1, generator=generator)
    return tokens.gather(-1, drawn)
