"""The products of a head with its weight in fp8: the logits, and the gradients of its inputs.

The gradient of the weight stays in bf16: it is added up over chunks of tokens where a product ends, which fp8 products
cannot do. Scales are torchao's: one for a tensor, from its largest number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.errors import UserError
from shoal.torch_private import scaled_product
from shoal.transform.float8 import ALIGNMENT

VALUE_TYPE, GRADIENT_TYPE = torch.float8_e4m3fn, torch.float8_e5m2
"""Values have the type with more digits. Gradients of logits are probabilities, and have the one with a wide range."""


def to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a tensor in fp8, scaled so that its largest number is that of the type, and the inverse of the scale."""
    rows = x.abs().amax(-1).float()  # by rows first: see `largest_by_rows`
    scale = torch.finfo(VALUE_TYPE).max / rows.amax().clamp(min=1e-30)
    return (x.float() * scale).to(VALUE_TYPE), scale.reciprocal()


def check_sizes(embd: int, vocabulary: int) -> None:
    """Refuses sizes of a head, or of a rank's part of it, that GPUs do not multiply in fp8."""
    if embd % ALIGNMENT or vocabulary % ALIGNMENT:
        raise UserError(
            f"training.fp8_head = true: products in fp8 need sizes that are multiples of {ALIGNMENT}, and the head has "
            f"{embd} inputs and {vocabulary} outputs on this rank; set it to false"
        )


class Float8Gradient(NamedTuple):
    """The gradient of the loss with respect to the logits of a chunk, for a head in fp8.

    It is the probability of each word, less 1 for the label. The label's is by far the largest: rounding it would be
    most of the error, so it stays apart.
    """

    others: Tensor
    """(tokens, vocab) in fp8: the probabilities of all words but the label, times the largest number of fp8."""
    words: Tensor
    """(tokens,): the label, as a place in this rank's vocabulary."""
    of_words: Tensor
    """(tokens, 1) in float32: the gradient there; 0 if the label does not count, or another rank has it."""


class Float8Weight:
    """The weight of a head (embd, vocab) in fp8, in the order of memory that each product needs."""

    def __init__(
        self, weight: Tensor, to_float8: Callable[[Tensor], tuple[Tensor, Tensor]], for_gradients: bool
    ) -> None:
        check_sizes(*weight.shape)
        self._to_float8, self._words = to_float8, weight.mT
        rounded, self._inverse = to_float8(weight.mT)
        self._by_token = rounded.contiguous()  # (vocab, embd)
        self._by_channel = self._by_token.mT.contiguous() if for_gradients else None  # (embd, vocab)

    def logits(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        """Returns hidden @ weight + bias, in the dtype of hidden."""
        rounded, inverse = self._to_float8(hidden.contiguous())
        return scaled_product(rounded, self._by_token.mT, inverse, self._inverse, hidden.dtype, bias, quick_sums=True)

    def to_hidden(self, gradient: Float8Gradient, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Returns the gradient of hidden in float32, times the scale of the loss. The product is in `dtype`."""
        assert self._by_channel is not None
        inverse = torch.full((), 1 / torch.finfo(GRADIENT_TYPE).max, device=self._inverse.device)
        product = scaled_product(gradient.others, self._by_channel.mT, inverse, self._inverse, dtype)
        summed = torch.addcmul(product.float(), gradient.of_words, self._words[gradient.words].float())
        return summed if scale is None else summed.mul_(scale)
