"""The dropout of adapters, and the product of dropped inputs with an adapter's first matrix as one operator.

Each adapter of a block drops other places of its inputs. Kept for the backward, their masks and what these leave would
take more memory than all else that a block keeps. So which places the operators here drop follows from one random
number, and the backward computes it again. On CUDA devices they are kernels in Triton that read the inputs once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import gcd, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from shoal.operators import give_gradient, operator
from shoal.tensors import autocast_dtype, tiles_ahead, why_no_triton

MAX_RANK = 128
"""The largest rank that the kernels compute; their tiles hold all of it."""
PRODUCT_COLUMNS, PRODUCT_PARTS = 128, 2
"""How a program of `dropped_product` reads its inputs: so many columns at a time, of one of so many parts."""
WEIGHT_ROWS = WEIGHT_COLUMNS = 64
"""The tile of inputs that a program of the gradient of a weight reads at a time."""
_BITS = 0xFFFFFFFF


class AdapterDropout(nn.Dropout):
    """Drops as nn.Dropout does; with `training.kernels: fused` by the operators of this file."""

    fused = False

    def __init__(self, p: float, rank: int) -> None:
        super().__init__(p)
        self.rank = rank

    def use_fused_kernels(self) -> None:
        """Makes the dropout one operation with the product that follows."""
        self.fused = True

    def describe_kernels(self, device: torch.device, dtype: torch.dtype) -> str:
        """Returns whether kernels in Triton compute, and if not, why."""
        reason = why_not(device, dtype, self.rank)
        return "in Triton" if reason is None else f"in PyTorch: {reason}"

    @property
    def drops_fused(self) -> bool:
        """True if the next forward drops by an operator of this file."""
        return self.fused and self.training

    def fused_pays(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Returns whether the operators are better than plain code: their PyTorch keeps less, but takes longer."""
        return why_not(device, dtype, self.rank) is None

    def forward(self, input: Tensor) -> Tensor:
        if not self.drops_fused:
            return super().forward(input)
        return drop(input.to(autocast_dtype(input.device) or input.dtype), draw_seed(input.device, self.p), self.p)


def draw_seed(device: torch.device, p: float) -> Tensor:
    """Returns the random number that decides what one dropout drops, from torch's generator; 0 if it drops nothing."""
    return torch.randint(2**31 - 1, (), device=device) if p else torch.zeros((), dtype=torch.int64, device=device)


def why_not(device: torch.device, dtype: torch.dtype, rank: int = 16) -> str | None:
    """Returns why the kernels cannot compute a product of this type with an adapter, or None if they can."""
    if reason := why_no_triton(device):
        return reason
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the kernels compute in bf16 and fp16, and this run in {str(dtype).removeprefix('torch.')}"
    if rank > MAX_RANK:
        return f"the kernels compute ranks up to {MAX_RANK}, and this one is {rank}"
    return None


def kept_places(shape: Sequence[int], seed: Tensor, p: float) -> Tensor:
    """Returns which places of a tensor (…, columns) are kept, as the kernels do, in plain PyTorch.

    Each row and each column has an odd random number, which depends on the seed, and a place is kept if their product,
    in 32 bits, is not too small.
    """
    seed = seed.to(torch.int64)
    rows = _hashed(torch.arange(prod(shape[:-1]), device=seed.device) ^ seed) | 1
    columns = (column_numbers(shape[-1], seed.device).to(torch.int64) & _BITS ^ _hashed(seed ^ 0x2545F491)) | 1
    return ((rows[:, None] * columns & _BITS) >= _threshold(p)).view(*shape)


@cache
def column_numbers(width: int, device: torch.device) -> Tensor:
    """Returns the table that the numbers of columns are made of, as the bits of int32."""
    with torch.inference_mode(False):  # it is kept for later
        bits = _hashed(torch.arange(width) ^ 0x5851F42D)
        return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).to(device)


def _hashed(bits: Tensor) -> Tensor:
    bits = bits & _BITS
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D & _BITS
    bits = (bits ^ (bits >> 15)) * 0x846CA68B & _BITS
    return bits ^ (bits >> 16)


def _threshold(p: float) -> int:
    """Returns the number of the 2³² hashes that drop a place."""
    return min(round(p * 2**32), _BITS)


def _empty_like(input: Tensor, seed: Tensor, p: float) -> Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@operator("drop", empty=_empty_like)
def drop(input: Tensor, seed: Tensor, p: float) -> Tensor:
    """Returns the input with some places 0 and the others divided by 1 - p. Keeps nothing but the seed."""
    if why_not(input.device, input.dtype) is not None:
        return input.contiguous() * kept_places(input.shape, seed, p) * (1 / (1 - p))
    from shoal.lora import triton_kernels

    x = input.reshape(-1, input.shape[-1]).contiguous()
    out, (tokens, width) = torch.empty_like(x), x.shape
    tiles = _tiles(tokens, 16), _tiles(width, 256)
    triton_kernels.drop[tiles](
        x, seed, column_numbers(width, x.device), out, tokens, width, 1 / (1 - p), _threshold(p), ROWS=16, COLUMNS=256
    )
    return out.view(input.shape)


def _keep_seed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, seed, ctx.p = inputs
    ctx.save_for_backward(seed)


give_gradient("drop", lambda ctx, gradient: (drop(gradient, *ctx.saved_tensors, ctx.p), None, None), keep=_keep_seed)


def _empty_product(input: Tensor, weight: Tensor, factor: Tensor, *args: Any) -> Tensor:
    return input.new_empty(*input.shape[:-1], len(factor))


@operator("dropped_product", empty=_empty_product)
def dropped_product(input: Tensor, weight: Tensor, factor: Tensor, seed: Tensor, p: float, scaling: float) -> Tensor:
    """Returns scaling · dropout(input) @ factor.T. `factor` is the weight (rank, width) cast to the input's dtype.

    The gradient is that of the weight, in its dtype. The cast is made outside, where torch.compile joins it with those
    of other adapters. Keeps input, factor and seed for the backward.
    """
    rank, width = factor.shape
    if why_not(input.device, input.dtype, rank) is not None:
        return F.linear(drop(input, seed, p), factor) * scaling
    from shoal.lora import triton_kernels

    x = input.reshape(-1, width).contiguous()
    tokens, rows, columns = len(x), 64, PRODUCT_COLUMNS
    num_parts = min(PRODUCT_PARTS, _tiles(width, columns))
    columns_each = _tiles(_tiles(width, num_parts), columns) * columns
    parts = x.new_empty(num_parts, tokens, rank, dtype=torch.float32)
    triton_kernels.product[_tiles(tokens, rows), num_parts](
        x,
        factor.contiguous(),
        seed,
        column_numbers(width, x.device),
        parts,
        tokens,
        width,
        rank,
        columns_each,
        _threshold(p),
        WHOLE=columns_each * num_parts == width and not (tokens % rows or rank != _padded(rank)),
        RANK=_padded(rank),
        ROWS=rows,
        COLUMNS=columns,
        STAGES=tiles_ahead(_padded(rank)),
    )
    return _sum_of(parts, x.new_empty(*input.shape[:-1], rank), scaling / (1 - p))


def _empty_weight(input: Tensor, gradient: Tensor, *args: Any) -> Tensor:
    dtype = torch.promote_types(input.dtype, torch.float32)
    return input.new_empty(gradient.shape[-1], input.shape[-1], dtype=dtype)


@operator("dropped_product_to_weight", empty=_empty_weight)
def _to_weight(input: Tensor, gradient: Tensor, seed: Tensor, p: float, scaling: float) -> Tensor:
    """Returns the gradient of the weight, in at least float32.

    Its parts are added up here: torch.compile would choose the order of a sum by timing, and equal runs would differ.
    """
    rank, width = gradient.shape[-1], input.shape[-1]
    x, outputs = input.reshape(-1, width), gradient.reshape(-1, rank).contiguous()
    tokens, rows, columns = len(x), WEIGHT_ROWS, WEIGHT_COLUMNS
    if why_not(input.device, input.dtype, rank) is not None:
        product = outputs.mT @ drop(input, seed, p).reshape(-1, width)
        return product.to(torch.promote_types(product.dtype, torch.float32)) * scaling
    from shoal.lora import triton_kernels

    x = x.contiguous()
    num_parts = _num_weight_parts(tokens, width)
    rows_each = _tiles(_tiles(tokens, num_parts), rows) * rows
    parts = x.new_empty(num_parts, rank, width, dtype=torch.float32)
    triton_kernels.product_backward_weight[(_tiles(width, columns), num_parts)](
        x,
        outputs,
        seed,
        column_numbers(width, x.device),
        parts,
        tokens,
        width,
        rank,
        rows_each,
        scaling / (1 - p),
        _threshold(p),
        WHOLE=rows_each * num_parts == tokens and not (width % columns or rank != _padded(rank)),
        RANK=_padded(rank),
        ROWS=rows,
        COLUMNS=columns,
        STAGES=4,
    )
    return _sum_of(parts, parts.new_empty(rank, width), 1.0)


def _sum_of(parts: Tensor, out: Tensor, scale: float) -> Tensor:
    """Writes the scaled sum over the first dimension into `out`, by a kernel in Triton."""
    from shoal.lora import triton_kernels

    size, each = out.numel(), 1024
    triton_kernels.add_parts[(_tiles(size, each),)](parts, out, size, scale, PARTS=len(parts), SIZE=each)
    return out


def _num_weight_parts(tokens: int, width: int) -> int:
    """Returns into how many parts the tokens are split: enough programs for a large GPU, but not by its size, because
    the sum must not depend on that."""
    return max(1, min(_tiles(256, _tiles(width, WEIGHT_COLUMNS)), _tiles(tokens, WEIGHT_ROWS)))


def _empty_input(gradient: Tensor, factor: Tensor, *args: Any) -> Tensor:
    return gradient.new_empty(*gradient.shape[:-1], factor.shape[1])


@operator("dropped_product_to_input", empty=_empty_input)
def _to_input(gradient: Tensor, factor: Tensor, seed: Tensor, p: float, scaling: float) -> Tensor:
    """Returns the gradient of the input."""
    rank, width = factor.shape
    if why_not(gradient.device, gradient.dtype, rank) is not None:
        return drop(gradient @ factor * scaling, seed, p)
    from shoal.lora import triton_kernels

    outputs = gradient.reshape(-1, rank).contiguous()
    tokens, rows, columns = len(outputs), 64, 64
    columns_each = 1024 if width % columns else gcd(width, 1024)
    out = outputs.new_empty(tokens, width)
    triton_kernels.product_backward_input[_tiles(tokens, rows), _tiles(width, columns_each)](
        outputs,
        factor.contiguous(),
        seed,
        column_numbers(width, out.device),
        out,
        tokens,
        width,
        rank,
        columns_each,
        scaling / (1 - p),
        _threshold(p),
        WHOLE=not (tokens % rows or width % columns_each or rank != _padded(rank)),
        RANK=_padded(rank),
        ROWS=rows,
        COLUMNS=columns,
        STAGES=3,
    )
    return out.view(*gradient.shape[:-1], width)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, factor, seed, *ctx.options = inputs
    ctx.dtype = weight.dtype
    ctx.save_for_backward(input, factor, seed)


def _product_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():  # for a second derivative, which would lack terms
        raise RuntimeError(
            "fused adapters have no second derivatives, which backward(create_graph=True) asks for; set "
            "training.kernels: plain"
        )
    input, factor, seed = ctx.saved_tensors
    to_input = to_weight = None
    if ctx.needs_input_grad[0]:
        to_input = _to_input(gradient, factor, seed, *ctx.options)
    if ctx.needs_input_grad[1]:
        to_weight = _to_weight(input, gradient, seed, *ctx.options).to(ctx.dtype)
    return to_input, to_weight, None, None, None, None


give_gradient("dropped_product", _product_backward, keep=_keep_for_backward)


def _tiles(size: int, of: int) -> int:
    return -(-size // of)


def _padded(rank: int) -> int:
    """Returns the columns of a tile that holds the rank: a power of 2, and no less than a product on the chip needs."""
    return max(16, 1 << (rank - 1).bit_length())


@register_flop_formula([torch.ops.shoal.dropped_product, torch.ops.shoal.dropped_product_to_input])
def _(left: tuple[int, ...], factor: tuple[int, ...], *args: Any, **options: Any) -> int:
    return 2 * prod(left[:-1]) * prod(factor)


@register_flop_formula(torch.ops.shoal.dropped_product_to_weight)
def _(input: tuple[int, ...], gradient: tuple[int, ...], *args: Any, **options: Any) -> int:
    return 2 * prod(input) * gradient[-1]
