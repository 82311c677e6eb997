"""Prompts of the evaluation data with their reference answers, to show beside what a model answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.data.instructions.chat_tokenizer import ChatTokenizer
from shoal.data.instructions.prepare import Prepared

_PLAIN_PROMPT_TOKENS = 32
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True)
class Exchange:
    """A prompt, (time), and the tokens of the reference answer to it."""

    prompt: Tensor
    reference: list[int]

    def describe(self, tokenizer: ChatTokenizer, answer: Sequence[int]) -> str:
        """Returns prompt, answer and reference as text. The answer is cut after the token that ends the reference."""
        end = self.reference[-1]
        stopped = end in answer
        kept = [*answer][: [*answer].index(end)] if stopped else [*answer]
        prompt = _shorten(tokenizer.decode_lines(self.prompt.tolist()), keep_end=True)
        shown = _shorten(tokenizer.decode(kept, skip_special_tokens=True))
        reference = _shorten(tokenizer.decode(self.reference, skip_special_tokens=True))
        return f"prompt:    {prompt}\nanswer:    {shown}{'' if stopped else ' …'}\nreference: {reference}"


def _shorten(text: str, keep_end: bool = False) -> str:
    text = text.strip()
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"… {text[-_SHOWN_CHARACTERS:]}" if keep_end else f"{text[:_SHOWN_CHARACTERS]} …"


def first_exchanges(prepared: Prepared, number: int) -> list[Exchange]:
    """Returns the last answer of each of the first evaluation samples, with all that comes before it."""
    if prepared.evaluation is None:
        return []
    samples = prepared.samples("eval")
    return [_last_exchange(*samples.tokens(index)) for index in range(min(number, len(samples)))]


def _last_exchange(tokens: np.ndarray, counted: np.ndarray) -> Exchange:
    end = int(np.flatnonzero(counted)[-1]) + 1
    before = np.flatnonzero(~counted[:end])
    start = int(before[-1]) + 1
    if start == 1:  # a text without a prompt
        start = max(1, min(_PLAIN_PROMPT_TOKENS, end // 2))
    return Exchange(torch.from_numpy(tokens[:start]), tokens[start:end].tolist())
