"""The heads of a level as one autograd function, which keeps less for its backward and computes one product fewer.

On GPUs that triton_heads.py has kernels for, the function is the one there; elsewhere it is the one here.

`Heads` in model.py says what is computed. Autograd keeps five tensors over neurons for it: neurons, keys, gates, the
dropout mask, and gated neurons. Two are enough: keys are rotated neurons, gated neurons are a product of the two, and
dropout is applied to the gates, so that a gate is 0 where it is closed or dropped. The backward computes the others
again, which takes no matrix product. Keys and queries are one tensor, so both gradients of the scores are one product.

Everything here is plain PyTorch, so torch.compile fuses what surrounds the products.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models.bdh import gluon_heads
from shoal.models.bdh.attention import attend_in_chunks, chunks_backward
from shoal.models.bdh.gradients import norm_with_deviation, through_norm
from shoal.models.bdh.model import LONGEST_AT_ONCE, Heads, Memory, norm, rotate
from shoal.models.bdh.triton_heads import TritonHeads, prepare_shared, why_not


class FusedHeads(Heads):
    """Computes what `Heads` computes, by the kernels in triton_heads.py where these can.

    With a memory, as in generation, it is the code of `Heads`.
    """

    def describe_kernels(self, device: torch.device, dtype: torch.dtype) -> str:
        """Returns whether kernels in Triton and in Gluon compute, and if not, why."""
        if reason := why_not(device, dtype, self.num_embd, self.num_neurons):
            return f"in PyTorch: {reason}"
        reason = gluon_heads.why_not(self.num_embd, self.num_neurons)
        return "in Triton and Gluon" if reason is None else f"in Triton, and none in Gluon: {reason}"

    def prepare(self, x: Tensor, *shared: Tensor) -> tuple[Tensor, ...]:
        """Returns what the kernels in Triton read in the place of the shared tensors, once for all levels."""
        # Of other kinds of tensors, such as those of tensor parallelism, levels get a part, and prepare that.
        if self._why_not_in_triton(x) is not None or type(shared[0]) not in (Tensor, nn.Parameter):
            return ()
        return prepare_shared(*shared)

    def _why_not_in_triton(self, x: Tensor) -> str | None:
        return why_not(x.device, _compute_dtype(x), self.num_embd, self.num_neurons)

    def forward(
        self,
        x: Tensor,
        encoder: Tensor,
        encoder_v: Tensor,
        decoder: Tensor,
        cos: Tensor,
        sin: Tensor,
        *prepared: Tensor,
        memory: Memory | None = None,
    ) -> Tensor:
        if memory is not None:
            return super().forward(x, encoder, encoder_v, decoder, cos, sin, memory=memory)
        dropout = self.dropout.p if self.dropout.training else 0.0
        inputs = (x, encoder, encoder_v, decoder.unflatten(0, (encoder.shape[0], -1)), cos, sin, dropout)
        if self._why_not_in_triton(x) is None:
            # The kernels draw their random numbers from this one, which torch's generator decides.
            y = TritonHeads.apply(*inputs, torch.randint(2**31, (1,), device=x.device), *prepared)
        else:
            y = _Heads.apply(*inputs)
        assert isinstance(y, Tensor)
        return y


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype that autocast would cast products to, or that of x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class _Heads(torch.autograd.Function):
    """x (batch, time, embd), encoder and encoder_v (heads, embd, neurons), decoder (heads, neurons, embd) → y like x.

    Inside, tensors are (heads, tokens, …) for products with weights, and (heads, batch, time, …) for attention. Nothing
    in the forward works in place, because selective activation checkpointing may keep the output of any product.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        encoder: Tensor,
        encoder_v: Tensor,
        decoder: Tensor,
        cos: Tensor,
        sin: Tensor,
        dropout: float,
    ) -> Tensor:
        # The casts that autocast makes in `Heads`. They are made here because the backward has no autocast.
        dtype = _compute_dtype(x)
        by_sample = x.shape[:2]
        values = x.to(dtype).expand(len(encoder), *x.shape)
        neurons = torch.bmm(values.flatten(1, 2), encoder.to(dtype)).relu()
        keys = rotate(neurons.unflatten(1, by_sample), cos, sin)
        sums = None
        if x.shape[1] > LONGEST_AT_ONCE:
            attended, scores, sums = attend_in_chunks(keys, x.to(dtype))
        else:
            scores = (keys @ keys.mT).tril(-1)
            attended = scores @ values
        gates = torch.bmm(norm(attended).to(dtype).flatten(1, 2), encoder_v.to(dtype)).relu()
        # The same shape and dtype as in `Heads`, and so the same random numbers.
        gates = F.dropout(gates, dropout)
        y = torch.bmm(neurons * gates, decoder.to(dtype)).sum(0)
        ctx.save_for_backward(x, encoder, encoder_v, decoder, cos, sin, neurons, scores, sums, attended, gates)
        ctx.dropout, ctx.dtype = dropout, dtype
        return y.unflatten(0, by_sample)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, to_y: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients. A name `to_gates` is the gradient with respect to `gates` before their ReLU."""
        x, encoder, encoder_v, decoder, cos, sin, neurons, scores, sums, attended, gates = ctx.saved_tensors
        _, needs_encoder, needs_encoder_v, needs_decoder, *_ = ctx.needs_input_grad
        dtype, by_sample = ctx.dtype, x.shape[:2]
        values = x.to(dtype).expand(len(encoder), *x.shape)

        to_y = to_y.to(dtype).flatten(0, 1).expand(len(encoder), -1, -1)
        if torch.compiler.is_compiling():
            neurons = neurons * _one_after(to_y)
        to_decoder = torch.bmm((neurons * gates).mT, to_y) if needs_decoder else None
        to_gated = torch.bmm(to_y, decoder.to(dtype).mT)

        # `gates` has the factor of dropout in it. The gradient of gates has that factor, too; small tensors get it.
        scale = 1 / (1 - ctx.dropout)
        to_gates = _through_relu(to_gated * neurons, gates)
        normed, deviation = norm_with_deviation(attended)
        to_encoder_v = torch.bmm((normed * scale).to(dtype).flatten(1, 2).mT, to_gates) if needs_encoder_v else None
        to_normed = (torch.bmm(to_gates, encoder_v.to(dtype).mT) * scale).unflatten(1, by_sample)
        to_neurons = to_gated.mul_(gates)
        del to_gates, to_gated

        to_attended = through_norm(to_normed, normed, deviation).to(dtype)
        keys = rotate(neurons.unflatten(1, by_sample), cos, sin)
        if sums is not None:
            to_keys, to_values = chunks_backward(keys, x.to(dtype), scores, sums, to_attended)
        else:
            to_values = scores.mT @ to_attended
            to_scores = (to_attended @ values.mT).tril_(-1)
            to_keys = (to_scores + to_scores.mT) @ keys
        del keys
        to_neurons += rotate(to_keys, cos, -sin).flatten(1, 2)
        del to_keys

        to_neurons = _through_relu(to_neurons, neurons)
        to_encoder = torch.bmm(values.flatten(1, 2).mT, to_neurons) if needs_encoder else None
        to_x = torch.baddbmm(to_values.flatten(1, 2), to_neurons, encoder.to(dtype).mT).sum(0).unflatten(0, by_sample)
        gradients = zip((to_x, to_encoder, to_encoder_v, to_decoder), (x, encoder, encoder_v, decoder), strict=True)
        return *(None if to_it is None else to_it.to(it.dtype) for to_it, it in gradients), None, None, None


def _one_after(gradient: Tensor) -> Tensor:
    """Returns the number 1 as a tensor that depends on a gradient.

    torch.compile sees forward and backward together. It would notice that the backward computes keys and gated neurons
    again, and keep those of the forward. What is multiplied by this one exists in the backward alone.
    """
    return gradient[0, 0, 0].isnan().to(gradient.dtype).clamp(min=1)


def _through_relu(gradient: Tensor, output: Tensor) -> Tensor:
    """Returns the gradient where the output of a ReLU is above 0, else 0, in one pass."""
    return torch.ops.aten.threshold_backward(gradient, output, 0)
