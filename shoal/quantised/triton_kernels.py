"""A Triton kernel that turns 4-bit weights into numbers, with their quantised scales, in one pass.

bitsandbytes needs three kernels where scales are quantised, too. The numbers are the same, bit by bit: products and
sums are rounded one after another (the option `enable_fp_fusion=False`), as there.
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
