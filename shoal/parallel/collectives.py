"""Collectives that are part of a forward. The backward of each function here is another one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup
# New names of torch 2.13, which warns of the old ones.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
TOKENS = 1
"""The dimension of tokens in hidden states (batch, time, embd)."""


def _all_reduce(tensor: Tensor, group: Group) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total.view_as(total)  # torch 2.11 compiles a returned tensor that was written in place as a constant


def _all_gather(tensor: Tensor, group: Group) -> Tensor:
    part = tensor.movedim(TOKENS, 0).contiguous()
    whole = part.new_empty(part.shape[0] * dist.get_world_size(group), *part.shape[1:])
    all_gather_single(whole, part, group=group)
    return whole.movedim(0, TOKENS)


def _reduce_scatter(tensor: Tensor, group: Group) -> Tensor:
    whole = tensor.movedim(TOKENS, 0).contiguous()
    part = whole.new_empty(whole.shape[0] // dist.get_world_size(group), *whole.shape[1:])
    _reduce_scatter_single(part, whole, group=group)
    return part.movedim(0, TOKENS)


def _function(there: Callable[..., Tensor], back: Callable[..., Tensor]) -> Callable[[Tensor, Group], Tensor]:
    """Returns a function that computes `there` in the forward and `back`, of the gradient, in the backward."""

    class Collective(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
            ctx.group = group
            return there(tensor, group)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            return back(gradient, ctx.group), None

    return Collective.apply


sum_gradients = _function(lambda tensor, group: tensor.view_as(tensor), _all_reduce)
"""Returns the tensor unchanged; the backward sums its gradient over ranks."""

sum_over = _function(_all_reduce, lambda gradient, group: gradient)
"""Returns the sum over ranks, which every rank then uses in the same way."""

gather_tokens = _function(_all_gather, _reduce_scatter)
"""Gathers the tokens of all ranks; each rank then uses all of them for its part of the work."""

scatter_tokens = _function(_reduce_scatter, _all_gather)
"""Sums over ranks and returns this rank's tokens of the sum."""


def gather_vocabulary(logits: Tensor, vocabulary: int, group: Group) -> Tensor:
    """Gathers logits along the last dimension, the vocabulary; the last rank may have fewer than the others.

    Every rank then uses all logits in the same way, so the gradient of a rank's logits is a slice of what it gets.
    """
    return _GatherVocabulary.apply(logits, vocabulary, group)


def swap(tensor: Tensor, split: int, join: int, group: Group) -> Tensor:
    """All-to-all: ranks that each have a part along `join` get all of it, for an equal part along `split`."""
    return _Swap.apply(tensor, split, join, group)


class _GatherVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, vocabulary: int, group: Group) -> Tensor:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        chunk = -(-vocabulary // size)
        ctx.own = slice(rank * chunk, rank * chunk + logits.shape[-1])
        padded = torch.nn.functional.pad(logits, (0, chunk - logits.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(parts, padded, group=group)
        return torch.cat(parts, dim=-1)[..., :vocabulary]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[..., ctx.own], None, None


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, split: int, join: int, group: Group) -> Tensor:
        ctx.dimensions, ctx.group = (join, split), group
        return _all_to_all(tensor, split, join, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        join, split = ctx.dimensions
        return _all_to_all(gradient, join, split, ctx.group), None, None, None


def _all_to_all(tensor: Tensor, split: int, join: int, group: Group) -> Tensor:
    sent = torch.stack(tensor.chunk(dist.get_world_size(group), dim=split))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), dim=join)
