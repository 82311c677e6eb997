"""Cross-entropy in chunks of tokens, so that the logits of a whole batch never exist at once.

With a large vocabulary they are by far the largest tensor of a step, in float32 and several times over. Here each
chunk's loss and gradients are computed at once and its logits forgotten; the backward only multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import custom_op
from torch.utils.flop_counter import register_flop_formula

from shoal.errors import UserError
from shoal.forward import add_layer
from shoal.parallel.tensor.tensor_parallel import TensorParallel, local
from shoal.transform.compile import GraphChoice
from shoal.transform.float8_head import GRADIENT_TYPE, Float8Gradient, Float8Weight, check_sizes, to_float8
from shoal.types import IGNORED_LABEL, ParallelPlan


class Scores(NamedTuple):
    """What follows from the logits of a chunk."""

    loss: Tensor
    """The sum over its tokens."""
    to_logits: Tensor | None = None
    """The gradient with respect to the logits, times the scale of the loss; None if nobody needs it."""
    in_float8: Float8Gradient | None = None
    """The same for a head in fp8."""


Scoring = Callable[[Tensor, Tensor, Tensor | None, torch.dtype | None, bool], Scores]


def check_head(plan: ParallelPlan, chunks: int) -> None:
    """Refuses to compute the loss in chunks if the plan of the whole model names no head."""
    if plan.head is None and chunks > 1:
        raise UserError(
            f"training.loss_chunks = {chunks}, but the recipe's plan names no head to make logits of some tokens at a "
            "time; set it to 1, or name the head in the recipe's parallel_plan"
        )


class ChunkedHead:
    """Makes a head return the loss inside of `scoring`, and its logits elsewhere."""

    def __init__(
        self,
        model: nn.Module,
        plan: ParallelPlan,
        chunks: int,
        choice: GraphChoice | None = None,
        tensor: TensorParallel | None = None,
        float8: bool = False,
    ) -> None:
        """With `choice` the loss is compiled. `tensor` is given if ranks share the vocabulary: each then computes the
        logits of some tokens. `float8` says that products with the weight are computed in fp8."""
        self.cause, self.advice = f"training.loss_chunks = {chunks}", "set it to 1"
        """Which setting makes the head compute the loss, and what to change otherwise; for errors."""
        check_head(plan, chunks)
        assert plan.head is not None
        if tensor is not None:  # also with one chunk
            self.cause = f"distributed.mesh.tp = {tensor.size} splits the head {plan.head!r}, which then gives the loss"
            self.advice = "take its style vocabulary, and the embedding's, out of the recipe's parallel_plan"
        module = model.get_submodule(plan.head)
        plain = nn.Linear.forward
        self._linear = module if isinstance(module, nn.Linear) and type(module).forward is plain else None
        if self._linear is None and next(module.parameters(), None) is not None:
            raise UserError(
                f"{self.cause}: this needs a head that is an nn.Linear or has no parameters, and {plan.head!r} is a "
                f"{type(module).__name__}; {self.advice}"
            )
        if float8 and self._linear is not None:
            part = -(-self._linear.out_features // (tensor.size if tensor is not None else 1))
            for vocabulary in {part, self._linear.out_features % part or part}:  # the last rank's may be smaller
                check_sizes(self._linear.in_features, vocabulary)
        self.num_scored = 0
        """How often the head returned a loss, as proof that it engaged."""
        self.is_float8 = float8
        """Whether the logits and the gradients of the head's inputs are computed in fp8."""
        self._chunks = chunks
        # One for training and one for evaluation: both are called where gradients are off, in an autograd function.
        self._scores: dict[bool, Scoring] = {
            with_gradient: _score if choice is None else choice.compile(_score) for with_gradient in (True, False)
        }
        self._to_float8 = (to_float8 if choice is None else choice.compile(to_float8)) if float8 else None
        self._tensor = tensor
        self._labels: Tensor | None = None
        self._scale: Tensor | None = None
        add_layer(module, self._forward)

    @contextmanager
    def scoring(self, labels: Tensor, scale: Tensor | None = None) -> Iterator[None]:
        """Is entered around one call of the model; the head returns the summed cross-entropy over labels that count.

        `scale` is what the backward will be called with, `loss.backward(scale)`. Gradients are multiplied by it already
        in the forward, because those of fp16 would underflow without.
        """
        self._labels, self._scale = labels, scale
        try:
            yield
        finally:
            self._labels = self._scale = None

    def _forward(self, forward: Callable[..., Tensor], hidden: Tensor, *weight: Tensor) -> Tensor:
        return forward(hidden, *weight) if self._labels is None else self._loss(hidden, *weight)

    @torch.compiler.disable  # if the whole model is compiled, its graph ends here
    def _loss(self, hidden: Tensor, *weights: Tensor) -> Tensor:
        assert self._labels is not None
        self.num_scored += 1
        bias: Tensor | None = None
        score = self._scores[torch.is_grad_enabled()]
        if self._linear is not None:
            whole, bias = (self._linear._parameters[name] for name in ("weight", "bias"))  # not tp's views of them
            assert whole is not None
            vocabulary, weight, bias = len(whole), local(whole).mT, local(bias)
        else:
            vocabulary = weights[0].shape[-1]
            weight = local(weights[0])
        if self._tensor is not None:
            hidden = self._tensor.enter(hidden)
            first = self._tensor.rank * -(-vocabulary // self._tensor.size)
            score = partial(_score_part, group=self._tensor.group, first=first)
        hidden, labels = hidden.flatten(0, -2), self._labels.flatten()
        if len(hidden) != len(labels):
            raise UserError(
                f"{self.cause}, but the head is called on {len(hidden)} tokens for {len(labels)} labels; {self.advice}"
            )
        # Under no_grad, requires_grad of a parameter is still true.
        wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias)]
        options = self._scale, self._chunks, wanted, score, self._to_float8
        loss = _ChunkedLoss.apply(hidden, weight, bias, labels, *options)
        assert isinstance(loss, Tensor)
        return loss


class _ChunkedLoss(torch.autograd.Function):
    """Computes the summed cross-entropy of hidden (tokens, embd) @ weight (embd, vocab) + bias and labels (tokens,)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        scale: Tensor | None,
        chunks: int,
        wanted: list[bool],
        score: Scoring,
        to_float8: Callable[[Tensor], tuple[Tensor, Tensor]] | None,
    ) -> Tensor:
        """With `to_float8`, which rounds a tensor, products with the weight are computed in fp8."""
        kind = hidden.device.type
        # As autocast does, but the weight is cast once and not for every chunk.
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]
        hidden, bias = hidden.to(dtype), None if bias is None else bias.to(dtype)
        float8 = Float8Weight(weight, to_float8, for_gradients=wanted[0]) if to_float8 is not None else None
        weight = weight if float8 is not None else weight.to(dtype)
        if scale is not None:
            # The backward divides by the scale, which is 0 for a filler micro-batch.
            scale = torch.where(scale == 0, 1.0, scale)
        total = torch.zeros((), device=hidden.device)
        # Sums over chunks are kept in float32; the gradient of a token's hidden state is no such sum. Gradients have
        # the strides of their weight, so that a transposed weight gets a transposed gradient.
        wide = torch.promote_types(dtype, torch.float32)
        to_hidden = torch.empty_like(hidden) if wanted[0] else None
        to_weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
        to_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and wanted[2] else None
        size = max(1, -(-len(labels) // chunks))
        with torch.autocast(kind, enabled=False):
            for start in range(0, len(labels), size):
                part = slice(start, start + size)
                if float8 is not None:
                    logits = float8.logits(hidden[part], bias)
                else:
                    logits = F.linear(hidden[part], weight.mT, bias)
                gradient_dtype = dtype if any(wanted) else None
                loss, to_logits, in_float8 = score(logits, labels[part], scale, gradient_dtype, float8 is not None)
                total += loss
                if to_logits is None:
                    continue
                if to_hidden is not None and float8 is not None:
                    assert in_float8 is not None
                    to_hidden[part] = float8.to_hidden(in_float8, scale, dtype)
                elif to_hidden is not None:
                    torch.mm(to_logits, weight.mT, out=to_hidden[part])
                if to_weight is not None:
                    _add_product(to_weight, hidden[part].mT, to_logits)
                if to_bias is not None:
                    to_bias += to_logits.sum(0, dtype=wide)
                del logits, to_logits, in_float8  # free their memory before the next chunk
        ctx.gradients, ctx.scale = (to_hidden, to_weight, to_bias), scale
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("a chunked loss allows one backward, because its gradients are not kept")
        gradients, ctx.gradients = ctx.gradients, None
        factor = grad_output if ctx.scale is None else grad_output / ctx.scale
        scaled = (
            None if gradient is None else gradient.mul_(factor).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return *scaled, None, None, None, None, None, None


def _score(
    logits: Tensor, labels: Tensor, scale: Tensor | None, dtype: torch.dtype | None, float8: bool = False
) -> Scores:
    """Returns the loss of a chunk and its gradient with respect to the logits, times `scale` and in `dtype`.

    In float32 and in place: the logits are overwritten. Compiled, the wide numbers never reach memory.
    """
    logits = logits.float()
    counted = labels != IGNORED_LABEL
    chosen = labels.where(counted, 0)[:, None]
    normaliser = logits.logsumexp(-1, keepdim=True)
    right = logits.gather(-1, chosen)
    loss = (normaliser - right)[:, 0].where(counted, 0).sum()
    return _with_gradients(loss, logits, normaliser, right, chosen, counted[:, None], scale, dtype, float8)


def _score_part(
    logits: Tensor,
    labels: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype | None,
    float8: bool = False,
    *,
    group: dist.ProcessGroup,
    first: int,
) -> Scores:
    """Does the same if this rank has the logits of the tokens from `first` on, and other ranks have the others."""
    logits = logits.float()
    counted = labels != IGNORED_LABEL
    chosen = (labels - first)[:, None]
    own = counted[:, None] & (chosen >= 0) & (chosen < logits.shape[-1])
    highest = logits.detach().amax(-1, keepdim=True)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    picked = logits.gather(-1, chosen.where(own, 0)).where(own, 0)
    sums = torch.stack(((logits - highest).exp().sum(-1, keepdim=True), picked))
    dist.all_reduce(sums, group=group)
    normaliser = highest + sums[0].log()
    loss = (normaliser - sums[1])[:, 0].where(counted, 0).sum()
    scores = _with_gradients(loss, logits, normaliser, sums[1], chosen, counted[:, None], scale, dtype, float8)
    if scores.in_float8 is None:
        return scores
    others, words, of_words = scores.in_float8
    return scores._replace(in_float8=Float8Gradient(others, words.where(own[:, 0], 0), of_words.where(own, 0)))


def _with_gradients(
    loss: Tensor,
    logits: Tensor,
    normaliser: Tensor,
    right: Tensor,
    chosen: Tensor,
    counted: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype | None,
    float8: bool,
) -> Scores:
    """Returns a loss with its gradients, if there is a `dtype` for them. Overwrites the logits.

    `right` are the logits of the labels, which are at `chosen`; all are (tokens, 1) except the logits.
    """
    if dtype is None:
        return Scores(loss)
    weight = counted.float() if scale is None else counted * scale.float()
    # A comparison instead of a scatter at the labels, which cannot be fused and is refused in deterministic mode.
    at_label = torch.arange(logits.shape[-1], device=logits.device) == chosen
    probabilities = logits.sub_(normaliser).exp_()
    in_float8 = None
    if float8:
        others = probabilities.masked_fill(at_label, 0) * (counted * torch.finfo(GRADIENT_TYPE).max)
        in_float8 = Float8Gradient(others.to(GRADIENT_TYPE), chosen[:, 0], (right - normaliser).expm1() * counted)
    return Scores(loss, probabilities.add_(at_label, alpha=-1).mul_(weight).to(dtype), in_float8)


@custom_op("shoal::add_product", mutates_args={"total"}, device_types="cuda")
def _add_product_on_gpu(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right to a total in float32, as one product.

    cuBLAS adds where a product ends; a product of its own and a sum would take three more passes. It is an operator
    because torch (2.11 to 2.13) cannot count the FLOPs of an addmm with `out_dtype`.
    """
    torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


@register_flop_formula(torch.ops.shoal.add_product)
def _(total: tuple[int, ...], left: tuple[int, ...], *args: Any, **options: Any) -> int:
    return 2 * prod(total) * left[-1]


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right to the total, whatever its type and order of strides."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda and total.dtype == torch.float32:
        _add_product_on_gpu(total, left, right)
    elif total.is_contiguous():
        total += left @ right
    else:
        total.mT.add_(right.mT @ left.mT)
