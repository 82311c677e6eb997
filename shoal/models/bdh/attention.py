"""What a token gets of earlier ones, for sequences so long that it is computed chunk by chunk.

Without a softmax, what comes from earlier chunks is a product with the sum of keysᵀ @ values over them, as in `Memory`.
So a token takes the same work at any length, while scores between all tokens take more for every token that is added.
`attend` in model.py does the same with autograd. These operators keep less for the backward, which they also compute,
and torch.compile does not unroll their loops.

Shapes: keys (heads, batch, time, neurons), values (batch, time, embd).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.utils.flop_counter import register_flop_formula

from shoal.models.bdh.model import CHUNK


@custom_op("shoal::bdh_attend_in_chunks", mutates_args=())
def attend_in_chunks(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns three tensors: what each token gets of the earlier ones, (heads, batch, time, embd); its scores with the
    tokens of its own chunk, (heads, batch, time, CHUNK); and for each chunk but the first the sum over the chunks
    before it, (heads, batch, chunks - 1, neurons, embd). The backward needs the last two."""
    heads, batch, time, neurons = keys.shape
    shape = (heads, batch, *values.shape[1:])
    keys, values = keys.flatten(0, 1), values.expand(shape).flatten(0, 1)
    chunks = _chunks(time)
    attended, scores = torch.empty_like(values), keys.new_zeros(len(keys), time, CHUNK)
    sums = keys.new_empty(len(keys), len(chunks) - 1, neurons, values.shape[-1])
    total = _zero_sum(sums)
    for i, chunk in enumerate(chunks):
        own_keys, own_values = keys[:, chunk], values[:, chunk]
        own_scores = torch.bmm(own_keys, own_keys.mT).tril_(-1)
        scores[:, chunk, : own_scores.shape[-1]] = own_scores
        result = torch.bmm(own_scores, own_values, out=attended[:, chunk])
        if i:
            result.baddbmm_(own_keys, sums[:, i - 1])
        if i < len(chunks) - 1:
            sums[:, i] = total.add_(torch.bmm(own_keys.mT, own_values))
    return attended.view(shape), scores.unflatten(0, (heads, batch)), sums.unflatten(0, (heads, batch))


@attend_in_chunks.register_fake
def _(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    *by_sequence, time, neurons = keys.shape
    embd = values.shape[-1]
    shapes = ((time, embd), (time, CHUNK), (len(_chunks(time)) - 1, neurons, embd))
    attended, scores, sums = (keys.new_empty(*by_sequence, *shape) for shape in shapes)
    return attended, scores, sums


@custom_op("shoal::bdh_chunks_backward", mutates_args=())
def chunks_backward(
    keys: Tensor, values: Tensor, scores: Tensor, sums: Tensor, to_attended: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of keys, like keys, and of the values of each head, (heads, batch, time, embd).

    From the last chunk to the first, with the sum of keysᵀ @ to_attended over the chunks after it.
    """
    shape = to_attended.shape
    values = values.expand(shape).flatten(0, 1)
    keys, scores, sums, to_attended = (tensor.flatten(0, 1) for tensor in (keys, scores, sums, to_attended))
    to_keys, to_values = torch.empty_like(keys), torch.empty_like(to_attended)
    chunks, total = _chunks(shape[2]), _zero_sum(sums)
    for i, chunk in reversed([*enumerate(chunks)]):
        own_keys, own_values, to_own = keys[:, chunk], values[:, chunk], to_attended[:, chunk]
        to_scores = torch.bmm(to_own, own_values.mT).tril_(-1)
        # Queries and keys are one tensor.
        to_own_keys = torch.bmm(to_scores + to_scores.mT, own_keys, out=to_keys[:, chunk])
        to_own_values = torch.bmm(scores[:, chunk, : to_scores.shape[-1]].mT, to_own, out=to_values[:, chunk])
        if i:
            to_own_keys.baddbmm_(to_own, sums[:, i - 1].mT)
        if i < len(chunks) - 1:
            later = total.to(keys.dtype)
            to_own_keys.baddbmm_(own_values, later.mT)
            to_own_values.baddbmm_(own_keys, later)
        if i:
            total += torch.bmm(own_keys.mT, to_own)
    return to_keys.unflatten(0, shape[:2]), to_values.view(shape)


@chunks_backward.register_fake
def _(keys: Tensor, values: Tensor, scores: Tensor, sums: Tensor, to_attended: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(keys), torch.empty_like(to_attended)


@register_flop_formula(torch.ops.shoal.bdh_attend_in_chunks)
def _(keys: Sequence[int], values: Sequence[int], *rest: Any, **options: Any) -> int:
    return _flops(keys, values, own=(1, 1), of_sums=2)


@register_flop_formula(torch.ops.shoal.bdh_chunks_backward)
def _(keys: Sequence[int], values: Sequence[int], *rest: Any, **options: Any) -> int:
    return _flops(keys, values, own=(1, 2), of_sums=4)


def _flops(keys: Sequence[int], values: Sequence[int], own: tuple[int, int], of_sums: int) -> int:
    """`own`: products of the tokens of a chunk over neurons and over channels. Of the products with sums, half is for
    all chunks but the first, the others for all but the last."""
    *by_sequence, time, neurons = keys
    lengths = [chunk.stop - chunk.start for chunk in _chunks(time)]
    between_tokens = sum(length**2 for length in lengths) * (own[0] * neurons + own[1] * values[-1])
    with_sums = of_sums // 2 * (2 * time - lengths[0] - lengths[-1]) * neurons * values[-1]
    return 2 * prod(by_sequence) * (between_tokens + with_sums)


def _chunks(time: int) -> list[slice]:
    return [slice(first, min(first + CHUNK, time)) for first in range(0, time, CHUNK)]


def _zero_sum(sums: Tensor) -> Tensor:
    """Returns a sum of no chunks, in at least float32, for the reason that `Memory` gives."""
    dtype = torch.promote_types(sums.dtype, torch.float32)
    return torch.zeros_like(sums[:, 0], dtype=dtype, memory_format=torch.contiguous_format)
