"""Greedy generation with a cache, a fixed number of tokens for several prompts at once."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shoal.models.causal_attention import NAME


@torch.no_grad()
def generate_greedily(model: Any, prompts: Sequence[Tensor], num_tokens: int, filler: int) -> Tensor:
    """Returns `num_tokens` tokens for each prompt, (prompts, tokens), by a transformers model.

    Tokens after the end of an answer are meaningless. The number is fixed, because all ranks of a sharded model have to
    call it equally often. Prompts are padded at their beginnings with `filler`.
    """
    device, longest = prompts[0].device, max(map(len, prompts))
    tokens = torch.full((len(prompts), longest), filler, device=device)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    answers, cache = list[Tensor](), None
    with _attention_with_masks(model):
        for _ in range(num_tokens):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            options = {"position_ids": positions} if takes_positions else {}
            output = model(input_ids=tokens, attention_mask=mask, past_key_values=cache, use_cache=True, **options)
            cache, tokens = output.past_key_values, output.logits[:, -1:].argmax(-1)
            mask = torch.cat([mask, torch.ones_like(tokens)], 1)
            answers.append(tokens)
    return torch.cat(answers, 1)


@contextmanager
def _attention_with_masks(model: Any) -> Iterator[None]:
    """Gives a model with shoal's attention without masks the attention of transformers: padded prompts need masks."""
    if model.config.get_text_config()._attn_implementation != NAME:
        yield
        return
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(NAME)
