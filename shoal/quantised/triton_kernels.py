"""The Triton kernel of 4-bit layers, which turns weights into numbers.

It reads quantised scales in the same pass, for which bitsandbytes needs three kernels. The numbers are the same, bit by
bit: products and sums are rounded one after another (the option `enable_fp_fusion=False`), as there.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dequantise(
    packed,
    values,
    statistics,
    out,
    num_bytes,
    DOUBLE: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    NESTED_BLOCK: tl.constexpr,
    NESTED_CODES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """out = values[4-bit codes] · scale of their block, two for each byte, that of the high half first.

    `statistics` are bytes: the scales of the blocks in float32. With DOUBLE they are NESTED_CODES values in float32, a
    nested scale for each NESTED_BLOCK blocks, an offset, and a code of one byte for each block, whose scale is
    values[code] · nested scale + offset. Programs: (groups of BLOCKS,).
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
    # Looked up one by one: both values of a byte at once, in a table of 256 pairs, took a third longer.
    high = tl.load(values + (codes >> 4)) * scale[:, None]
    low = tl.load(values + (codes & 15)) * scale[:, None]
    result = tl.interleave(high, low).to(out.dtype.element_ty)
    places = blocks[:, None].to(tl.int64) * (2 * BLOCK_BYTES) + tl.arange(0, 2 * BLOCK_BYTES)[None, :]
    tl.store(out + places, result, mask=places < 2 * num_bytes)
