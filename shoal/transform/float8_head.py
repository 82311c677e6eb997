"""The products of a head with its weight in fp8: the logits, and the gradients of its inputs.

The gradient of the weight stays in bf16: it is added up over chunks of tokens where a product ends, which fp8 products
cannot do. Scales are torchao's: one for a tensor, from its largest number.
"""

from __future__ import annotations

from collections.abc import Callable

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


class Float8Weight:
    """The weight of a head (embd, vocab) in fp8, in the order of memory that each product needs."""

    def __init__(
        self, weight: Tensor, to_float8: Callable[[Tensor], tuple[Tensor, Tensor]], for_gradients: bool
    ) -> None:
        if any(size % ALIGNMENT for size in weight.shape):
            embd, vocabulary = weight.shape
            raise UserError(
                f"training.fp8_head = true: products in fp8 need sizes that are multiples of {ALIGNMENT}, and the head "
                f"has {embd} inputs and {vocabulary} outputs on this rank; set it to false"
            )
        self._to_float8 = to_float8
        rounded, self._inverse = to_float8(weight.mT)
        self._by_token = rounded.contiguous()  # (vocab, embd)
        self._by_channel = self._by_token.mT.contiguous() if for_gradients else None  # (embd, vocab)

    def logits(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        """Returns hidden @ weight + bias, in the dtype of hidden."""
        rounded, inverse = self._to_float8(hidden)
        return scaled_product(rounded, self._by_token.mT, inverse, self._inverse, hidden.dtype, bias, quick_sums=True)

    def to_hidden(self, to_logits: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Returns the gradient of hidden, from that of the logits in fp8 and the scale of the loss."""
        assert self._by_channel is not None
        inverse = torch.full((), 1 / torch.finfo(GRADIENT_TYPE).max, device=to_logits.device)
        inverse = inverse if scale is None else inverse * scale.float()
        return scaled_product(to_logits, self._by_channel.mT, inverse, self._inverse, dtype)
