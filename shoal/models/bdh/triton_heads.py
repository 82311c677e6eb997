"""The heads of a level on Hopper GPUs: kernels in Triton, and cuBLAS for the other products.

For the sizes of the published BDH, kernels in Gluon (gluon_heads.py) compute some of it in less time.

`Heads` in model.py says what is computed, and fused.py has the same gradients in plain PyTorch. For the backward a
level keeps two tensors over neurons: keys, and gated neurons after dropout. Neurons are computed again: the product
takes less time than to read them, or to rotate them again. Gates are gated neurons divided by neurons.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from math import gcd, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op
from torch.utils.flop_counter import register_flop_formula

from shoal.models.bdh import gluon_heads
from shoal.models.bdh.attention import attend_in_chunks, chunks_backward
from shoal.models.bdh.gradients import norm_with_deviation, through_norm
from shoal.models.bdh.model import LONGEST_AT_ONCE, norm


class Tile(NamedTuple):
    """The size of what one program computes at a time, and how it does it."""

    sequences: int
    rows: int
    columns: int
    stages: int
    num_warps: int
    max_registers: int | None = None


# The fastest of about ten each, measured on an H200 with 32 × 512 tokens of the published BDH.
ENCODE = Tile(2, 64, 32, 3, 8)
GATE = Tile(2, 64, 32, 3, 8)
GATE_BACKWARD = Tile(1, 64, 32, 3, 4, 168)
CHUNK = 8192
"""The most columns of a weight that one program goes through."""


@torch.compiler.assume_constant_result
def why_not(device: torch.device, dtype: torch.dtype, embd: int, neurons: int) -> str | None:
    """Returns why these kernels cannot compute a level with so many neurons in a head, or None if they can."""
    if device.type != "cuda":
        return f"Triton needs a CUDA device, and this is {device.type}"
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"the kernels are made for Hopper (H100, H200), and this is {torch.cuda.get_device_name(device)}"
    if dtype != torch.bfloat16:
        return f"the kernels compute in bf16, and this run in {str(dtype).removeprefix('torch.')}"
    if embd not in (16, 32, 64, 128, 256):
        return f"the kernels need n_embd to be a power of 2 from 16 to 256, and it is {embd}"
    if neurons % 64:
        return f"the kernels need a multiple of 64 neurons in a head, and there are {neurons}"
    return None


class TritonHeads(torch.autograd.Function):
    """x (batch, time, embd), encoder and encoder_v (heads, embd, neurons), decoder (heads, neurons, embd) → y like x.

    Tensors over neurons are (heads, batch, time, neurons).
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
        seed: Tensor,
        *prepared: Tensor,
    ) -> Tensor:
        """`prepared` is what `prepare_shared` returned, or nothing."""
        values, dtypes = x.to(torch.bfloat16), [tensor.dtype for tensor in (x, encoder, encoder_v, decoder)]
        shared = prepared or prepare_shared(encoder, encoder_v, decoder.flatten(0, 1), cos, sin)
        arranged, arranged_v, encoder, encoder_v, decoder, cos, sin = shared
        neurons, keys = encode(values, arranged, cos, sin)
        if x.shape[1] > LONGEST_AT_ONCE:
            attended, scores, sums = attend_in_chunks(keys, values)
        else:
            scores, sums = earlier_scores(keys).tril(-1), keys.new_empty(len(keys), 0)
            attended = scores @ values
        gated = gate(norm(attended).to(values.dtype), arranged_v, neurons, dropout, seed)
        y = torch.bmm(gated.flatten(1, 2), decoder).sum(0).view_as(x)
        kept = (arranged, encoder, encoder_v, decoder, keys, scores, sums, attended, gated)
        ctx.save_for_backward(values, cos, sin, *kept)
        ctx.dropout, ctx.dtypes, ctx.num_inputs = dropout, dtypes, 8 + len(prepared)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, to_y: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients, of some heads at a time: what a backward needs for a moment is as large as what a
        level keeps, and would decide how much memory a step takes."""
        values, cos, sin, *kept = ctx.saved_tensors
        to_y = to_y.to(torch.bfloat16).contiguous()
        by_head = zip(*(tensor.split(-(-len(tensor) // 2)) for tensor in kept), strict=True)
        wanted, scale = ctx.needs_input_grad[1:4], 1 / (1 - ctx.dropout)
        parts = [_gradients(values, to_y, cos, sin, scale, wanted, *some) for some in by_head]
        to_x, *to_weights = zip(*parts, strict=True)
        gradients = (
            None if to_it[0] is None else torch.cat([part.to(dtype) for part in to_it])
            for to_it, dtype in zip(to_weights, ctx.dtypes[1:], strict=True)
        )
        return sum(to_x).to(ctx.dtypes[0]), *gradients, *[None] * (ctx.num_inputs - 4)


def _gradients(
    x: Tensor,
    to_y: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    wanted: Sequence[bool],
    arranged: Tensor,
    encoder: Tensor,
    encoder_v: Tensor,
    decoder: Tensor,
    keys: Tensor,
    scores: Tensor,
    sums: Tensor,
    attended: Tensor,
    gated: Tensor,
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of x, and of those weights that are wanted, through some heads.

    A name `to_gates` is the gradient with respect to `gates` before their ReLU.
    """
    heads = len(decoder)
    tokens, to_tokens = (tensor.flatten(0, 1).expand(heads, -1, -1) for tensor in (x, to_y))
    to_decoder = torch.bmm(gated.flatten(1, 2).mT, to_tokens) if wanted[2] else None
    to_gates, to_neurons = gate_backward(x, to_y, arranged, decoder, gated, scale)
    to_gates = to_gates.flatten(1, 2)
    normed, deviation = norm_with_deviation(attended)
    # By itself, this product takes cuBLAS 15% less time transposed; in a training, where the GPU computes at its power
    # limit, it takes a little longer.
    to_encoder_v = torch.bmm(normed.to(x.dtype).flatten(1, 2).mT, to_gates) if wanted[1] else None
    to_normed = torch.bmm(to_gates, encoder_v.mT).view_as(attended)
    del to_gates

    to_attended = through_norm(to_normed, normed, deviation).to(x.dtype)
    if x.shape[1] > LONGEST_AT_ONCE:
        to_keys, to_values = chunks_backward(keys, x, scores, sums, to_attended)
        to_neurons = neurons_backward(to_keys, to_neurons, cos, sin).flatten(1, 2)
        del to_keys
    else:
        to_values = scores.mT @ to_attended
        to_scores = (to_attended @ x.mT).tril(-1)
        to_scores = to_scores + to_scores.mT  # queries and keys are one tensor
        to_neurons = keys_backward(to_scores, keys, to_neurons, cos, sin).flatten(1, 2)
    to_encoder = torch.bmm(tokens.mT, to_neurons) if wanted[0] else None
    to_x = (torch.bmm(to_neurons, encoder.mT).float() + to_values.flatten(1, 2)).sum(0)
    return to_x.view_as(x), to_encoder, to_encoder_v, to_decoder


@torch.no_grad()
def prepare_shared(encoder: Tensor, encoder_v: Tensor, decoder: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Returns both encoders as `encode` and `gate` want them, and then all in bf16, the decoder as (heads, neurons,
    embd). All levels share them, so a model prepares them once."""
    by_head = decoder.unflatten(0, (len(encoder), -1))
    encoder, encoder_v, decoder, cos, sin = (t.to(torch.bfloat16) for t in (encoder, encoder_v, by_head, cos, sin))
    return _arranged(encoder), _arranged(encoder_v), encoder, encoder_v, decoder, cos, sin


def _arranged(weight: Tensor) -> Tensor:
    """Returns a weight (heads, embd, neurons) as `encode` and `gate` want it: interleaved if there are kernels in Gluon
    for these sizes. Of an interleaved weight it returns the weight."""
    return gluon_heads.interleaved(weight) if _has_gluon(weight.shape[1], weight.shape[2]) else weight


@torch.compiler.assume_constant_result
def _has_gluon(embd: int, neurons: int) -> bool:
    return gluon_heads.why_not(embd, neurons) is None


@custom_op("shoal::bdh_earlier_scores", mutates_args=())
def earlier_scores(keys: Tensor) -> Tensor:
    """Returns keys @ keys.mT, (heads, batch, time, time). What is above the diagonal may be any number.

    Some rows at a time, each with the keys up to the last of them: of 512 tokens that leaves out a quarter.
    """
    *by_sequence, time, _ = keys.shape
    keys = keys.flatten(0, 1)
    scores = keys.new_empty(len(keys), time, time)
    for first, end in _row_groups(time):
        torch.bmm(keys[:, first:end], keys[:, :end].mT, out=scores[:, first:end, :end])
    return scores.view(*by_sequence, time, time)


@earlier_scores.register_fake
def _(keys: Tensor) -> Tensor:
    return keys.new_empty(*keys.shape[:-1], keys.shape[-2])


def _row_groups(time: int) -> list[tuple[int, int]]:
    """Returns the first row and the end of each group of rows: 256, so that the products are quick."""
    return [(first, min(first + 256, time)) for first in range(0, time, 256)]


@register_flop_formula(torch.ops.shoal.bdh_earlier_scores)
def _(keys: Sequence[int], *rest: Any, **options: Any) -> int:
    heads, batch, time, neurons = keys
    return sum(2 * heads * batch * (end - first) * end * neurons for first, end in _row_groups(time))


@custom_op("shoal::bdh_encode", mutates_args=())
def encode(x: Tensor, encoder: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Returns neurons = relu(x @ encoder), and the same rotated. `_arranged` has made the weight ready."""
    if gluon_heads.fits(x.shape[-2], x.shape[-1], encoder.shape[-1]):
        return gluon_heads.encode(x, encoder, cos, sin)
    from shoal.models.bdh import triton_kernels

    (batch, time, embd), (heads, _, width) = x.shape, encoder.shape
    encoder = _arranged(encoder)  # sequences are too long for the kernel in Gluon
    neurons, keys = (x.new_empty(heads, batch, time, width) for _ in range(2))
    tile = _fitted(ENCODE, width)
    triton_kernels.encode[_programs(tile, heads, batch, time, width)](
        _described(x, (tile.sequences, tile.rows, embd)),
        _described(encoder, (1, embd, tile.columns)),
        *(_described(table, (tile.rows, tile.columns // 2)) for table in (cos, sin)),
        neurons,
        keys,
        batch,
        time,
        width,
        D=embd,
        CHUNK=_chunk(width),
        **_options(tile),
    )
    return neurons, keys


@encode.register_fake
def _(x: Tensor, encoder: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    neurons = x.new_empty(len(encoder), *x.shape[:2], encoder.shape[2])
    return neurons, torch.empty_like(neurons)


@custom_op("shoal::bdh_gate", mutates_args=())
def gate(normed: Tensor, encoder_v: Tensor, neurons: Tensor, dropout: float, seed: Tensor) -> Tensor:
    """Returns dropout(neurons · relu(normed @ encoder_v)); `seed` is one number of int64. The weight as in `encode`."""
    if gluon_heads.fits(normed.shape[-2], normed.shape[-1], neurons.shape[-1]):
        return gluon_heads.gate(normed, encoder_v, neurons, dropout, seed)
    from shoal.models.bdh import triton_kernels

    heads, batch, time, width = neurons.shape
    encoder_v = _arranged(encoder_v)  # as in `encode`
    gated, embd = torch.empty_like(neurons), normed.shape[-1]
    tile = _fitted(GATE, width)
    triton_kernels.gate[_programs(tile, heads, batch, time, width)](
        _described(normed, (1, tile.sequences, tile.rows, embd)),
        _described(encoder_v, (1, embd, tile.columns)),
        _described(neurons, (1, tile.sequences, tile.rows, tile.columns)),
        gated,
        seed,
        round(dropout * 65536),
        1 / (1 - dropout),
        batch,
        time,
        width,
        D=embd,
        DROPS=dropout > 0,
        CHUNK=_chunk(width),
        **_options(tile),
    )
    return gated


@gate.register_fake
def _(normed: Tensor, encoder_v: Tensor, neurons: Tensor, dropout: float, seed: Tensor) -> Tensor:
    return torch.empty_like(neurons)


@custom_op("shoal::bdh_gate_backward", mutates_args=())
def gate_backward(
    x: Tensor, to_y: Tensor, encoder: Tensor, decoder: Tensor, gated: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns the gradient of gates, and that of neurons through the gating alone; `scale` is dropout's.

    Neurons are computed again. Where one is 0, its gradient is -0.0, which tells `keys_backward` so. The encoder as in
    `encode`.
    """
    if gluon_heads.fits(x.shape[-2], x.shape[-1], gated.shape[-1]):
        return gluon_heads.gate_backward(x, to_y, encoder, decoder, gated, scale)
    from shoal.models.bdh import triton_kernels

    heads, batch, time, width = gated.shape
    embd = to_y.shape[-1]
    encoder = _arranged(encoder)  # as in `encode`
    outputs = tuple(torch.empty_like(gated) for _ in range(2))
    tile = _fitted(GATE_BACKWARD, width)
    triton_kernels.gate_backward[_programs(tile, heads, batch, time, width)](
        *(_described(tensor, (tile.sequences, tile.rows, embd)) for tensor in (x, to_y)),
        _described(encoder, (1, embd, tile.columns)),
        _described(decoder, (1, tile.columns, embd)),
        _described(gated, (1, tile.sequences, tile.rows, tile.columns)),
        *outputs,
        scale,
        batch,
        time,
        width,
        D=embd,
        CHUNK=_chunk(width),
        **_options(tile),
    )
    return outputs[0], outputs[1]


@gate_backward.register_fake
def _(x: Tensor, to_y: Tensor, encoder: Tensor, decoder: Tensor, gated: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gated), torch.empty_like(gated)


@custom_op("shoal::bdh_keys_backward", mutates_args=())
def keys_backward(scores: Tensor, keys: Tensor, to_neurons: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns the gradient of neurons before their ReLU: scores @ keys rotated back, and that through the gating."""
    if gluon_heads.fits_keys(keys):
        return gluon_heads.keys_backward(scores, keys, to_neurons, cos, sin)
    result: Tensor = neurons_backward(scores @ keys, to_neurons, cos, sin)
    return result


@keys_backward.register_fake
def _(scores: Tensor, keys: Tensor, to_neurons: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.empty_like(keys)


@custom_op("shoal::bdh_neurons_backward", mutates_args=())
def neurons_backward(to_keys: Tensor, to_neurons: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns the gradient of neurons before their ReLU: that of keys rotated back, and that through the gating."""
    from shoal.models.bdh import triton_kernels

    heads, batch, time, width = to_keys.shape
    result = torch.empty_like(to_neurons)
    rows = columns = 64
    tensors = (tensor.flatten(0, 1) for tensor in (to_keys, to_neurons, result))
    *inputs, output = (_described(tensor, (1, rows, columns)) for tensor in tensors)
    tables = (_described(table, (rows, columns // 2)) for table in (cos, sin))
    triton_kernels.neurons_backward[(-(-time // rows) * heads * batch, width // columns)](
        *inputs, *tables, output, time, ROWS=rows, COLUMNS=columns, num_warps=4
    )
    return result


@neurons_backward.register_fake
def _(to_keys: Tensor, to_neurons: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.empty_like(to_neurons)


@register_flop_formula([torch.ops.shoal.bdh_encode, torch.ops.shoal.bdh_gate])
def _flops(tokens: Sequence[int], weight: Sequence[int], *rest: Any, **options: Any) -> int:
    heads, rows, columns = weight
    return 2 * tokens[-3] * tokens[-2] * heads * rows * columns


@register_flop_formula(torch.ops.shoal.bdh_gate_backward)
def _(x: Sequence[int], to_y: Sequence[int], encoder: Sequence[int], *rest: Any, **options: Any) -> int:
    return 2 * _flops(x, encoder)


@register_flop_formula(torch.ops.shoal.bdh_keys_backward)
def _(scores: Sequence[int], keys: Sequence[int], *rest: Any, **options: Any) -> int:
    return 2 * prod(scores) * keys[-1]


def dropout_mask(seed: int, shape: Sequence[int], dropout: float) -> Tensor:
    """Returns which elements (heads, batch, time, neurons) `gate` keeps, by the same hash, in plain PyTorch."""
    *rows, width = shape
    row_seeds = _hashed(torch.arange(torch.Size(rows).numel()), torch.tensor(seed))
    bits = _hashed(torch.arange(width // 2), row_seeds[:, None])
    return (torch.stack((bits & 0xFFFF, bits >> 16), -1) >= round(dropout * 65536)).view(*shape)


def _hashed(index: Tensor, seed: Tensor) -> Tensor:
    bits = (index ^ seed) & 0xFFFFFFFF
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    bits = (bits ^ (bits >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return bits ^ (bits >> 16)


def _described(tensor: Tensor, block: Sequence[int]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(tensor.contiguous(), [*block])


def _fitted(tile: Tile, width: int) -> Tile:
    """Returns a tile whose columns divide the neurons of a head."""
    return tile._replace(columns=gcd(tile.columns, width))


def _chunk(width: int) -> int:
    return gcd(CHUNK, width)


def _programs(tile: Tile, heads: int, batch: int, time: int, width: int) -> tuple[int, int, int]:
    return -(-time // tile.rows) * -(-batch // tile.sequences), heads, width // _chunk(width)


def _options(tile: Tile) -> dict[str, int | None]:
    sizes = {"SEQUENCES": tile.sequences, "ROWS": tile.rows, "COLUMNS": tile.columns, "STAGES": tile.stages}
    return {**sizes, "num_warps": tile.num_warps, "maxnreg": tile.max_registers}
