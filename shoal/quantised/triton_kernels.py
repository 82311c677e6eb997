"""Triton kernels of 4-bit layers: `dequantise` turns weights into numbers, `add_product` adds an adapter's output.

`dequantise` reads quantised scales in the same pass, for which bitsandbytes needs three kernels. The numbers are the
same, bit by bit: products and sums are rounded one after another (the option `enable_fp_fusion=False`), as there.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dequantise(
    packed,
    values,
    scales,
    scale_values,
    nested_scales,
    offset,
    out,
    num_bytes,
    DOUBLE: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    NESTED_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """out = values[4-bit codes] · scale of their block, two for each byte, the high half first.

    With DOUBLE a scale is scale_values[its 8-bit code] · its nested scale + offset. Programs: (groups of BLOCKS,).
    """
    blocks = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    exists = blocks * BLOCK_BYTES < num_bytes
    scale = tl.load(scales + blocks, mask=exists, other=0)
    if DOUBLE:
        scale = tl.load(scale_values + scale.to(tl.int32)) * tl.load(
            nested_scales + blocks // NESTED_BLOCK, mask=exists, other=0.0
        )
        scale = scale + tl.load(offset)
    places = blocks[:, None].to(tl.int64) * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)[None, :]
    codes = tl.load(packed + places, mask=places < num_bytes, other=0).to(tl.int32)
    high = tl.load(values + (codes >> 4)) * scale[:, None]
    low = tl.load(values + (codes & 15)) * scale[:, None]
    numbers = tl.interleave(high, low).to(out.dtype.element_ty)
    places = blocks[:, None].to(tl.int64) * (2 * BLOCK_BYTES) + tl.arange(0, 2 * BLOCK_BYTES)[None, :]
    tl.store(out + places, numbers, mask=places < 2 * num_bytes)


@triton.jit
def add_product(
    left,
    right,
    out,
    tokens,
    width,
    rank,
    columns_each,
    WHOLE: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out += left @ right.T for left (tokens, rank), right (width, rank) and out (tokens, width).

    A rank is small, so this takes as long as `out` takes to be read and written. A program keeps the rows of `left`
    while it goes through `columns_each` columns. Programs: (tiles of tokens, groups of columns). WHOLE says that all
    of each tile exists.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ranks = tl.arange(0, RANK)
    row, exists, has_rank = rows[:, None].to(tl.int64), (rows < tokens)[:, None], (ranks < rank)[None, :]
    if WHOLE:
        factor = tl.load(left + row * rank + ranks[None, :])
    else:
        factor = tl.load(left + row * rank + ranks[None, :], mask=exists & has_rank, other=0.0)
    begin = tl.program_id(1) * columns_each
    for first in tl.range(begin, begin + columns_each, COLUMNS, num_stages=STAGES):
        columns = first + tl.arange(0, COLUMNS)
        weights, places = right + columns[:, None] * rank + ranks[None, :], out + row * width + columns[None, :]
        if WHOLE:
            total = tl.dot(factor, tl.trans(tl.load(weights))) + tl.load(places)
            tl.store(places, total.to(out.dtype.element_ty))
        else:
            inside = exists & (columns < width)[None, :]
            weight = tl.load(weights, mask=(columns < width)[:, None] & has_rank, other=0.0)
            total = tl.dot(factor, tl.trans(weight)) + tl.load(places, mask=inside, other=0.0)
            tl.store(places, total.to(out.dtype.element_ty), mask=inside)
