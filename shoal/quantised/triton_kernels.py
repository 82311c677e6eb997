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
    pairs,
    statistics,
    out,
    num_bytes,
    row_blocks,
    row_gap,
    DOUBLE: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    NESTED_BLOCK: tl.constexpr,
    NESTED_CODES: tl.constexpr,
    BLOCKS: tl.constexpr,
    GAPS: tl.constexpr,
):
    """out = values of 4-bit codes · scale of their block, two for each byte, that of the high half first.

    `pairs` are the two values of each byte as bits of float32, in an int64 so that they are looked up at once.
    `statistics` are bytes: the scales of the blocks in float32. With DOUBLE they are NESTED_CODES values in float32, a
    nested scale for each NESTED_BLOCK blocks, an offset, and a code of one byte for each block, whose scale is
    values[code] · nested scale + offset. With GAPS a row is `row_blocks` blocks, and the next one begins after a gap of
    `row_gap` numbers, which are left as they are. Programs: (groups of BLOCKS,).
    """
    blocks = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    exists = blocks * BLOCK_BYTES < num_bytes
    numbers = statistics.to(tl.pointer_type(tl.float32))
    if DOUBLE:
        nested = numbers + NESTED_CODES
        offset = nested + tl.cdiv(tl.cdiv(num_bytes, BLOCK_BYTES), NESTED_BLOCK)
        codes = tl.load((offset + 1).to(tl.pointer_type(tl.uint8)) + blocks, mask=exists, other=0)
        scale = tl.load(numbers + codes.to(tl.int32)) * tl.load(nested + blocks // NESTED_BLOCK, mask=exists, other=0.0)
        scale = scale + tl.load(offset)
    else:
        scale = tl.load(numbers + blocks, mask=exists, other=0.0)
    places = blocks[:, None].to(tl.int64) * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)[None, :]
    codes = tl.load(packed + places, mask=places < num_bytes, other=0).to(tl.int32)
    found = tl.load(pairs + codes)
    high = found.to(tl.int32).to(tl.float32, bitcast=True) * scale[:, None]
    low = (found >> 32).to(tl.int32).to(tl.float32, bitcast=True) * scale[:, None]
    result = tl.interleave(high, low).to(out.dtype.element_ty)
    places = blocks[:, None].to(tl.int64) * (2 * BLOCK_BYTES) + tl.arange(0, 2 * BLOCK_BYTES)[None, :]
    inside = places < 2 * num_bytes
    if GAPS:
        places += (blocks // row_blocks).to(tl.int64)[:, None] * row_gap
    tl.store(out + places, result, mask=inside)


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
