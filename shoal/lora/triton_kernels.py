"""Triton kernels of an adapter's dropout: products of dropped inputs that are never written to memory.

The inputs of adapters are as large as all else that a block computes with, and each of the seven adapters of a block
drops other places. A kernel reads the inputs, drops while they are on the chip, and multiplies. `kept_places` in
dropout.py says in PyTorch which places are kept; the backward computes that again and needs no mask.
Shapes: x (tokens, width), weight (rank, width), column_numbers (width,). Sums are kept in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _hashed(bits):
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _row_numbers(rows, seed):
    """Returns an odd random number for each row: a hash of its index and of the seed."""
    return _hashed(rows.to(tl.uint32) ^ seed) | 1


@triton.jit
def _load(pointers, mask, WHOLE: tl.constexpr):
    """Loads a tile. WHOLE says that all of it exists: masks would take the registers that dropping needs."""
    if WHOLE:
        return tl.load(pointers)
    return tl.load(pointers, mask=mask, other=0)


@triton.jit
def _column_numbers(pointers, mask, seed, WHOLE: tl.constexpr):
    """Returns an odd random number for each column: a table's, mixed with a hash of the seed."""
    return (_load(pointers, mask, WHOLE).to(tl.uint32) ^ _hashed(seed ^ 0x2545F491)) | 1


_KEEP_TWO: tl.constexpr = tl.constexpr("""{
    .reg .pred first, second;
    .reg .b32 low, high;
    setp.ge.u32 first, $2, $4;
    setp.ge.u32 second, $3, $5;
    selp.b32 low, 0x0000FFFF, 0, first;
    selp.b32 high, 0xFFFF0000, 0, second;
    lop3.b32 $0, low, high, $1, 0xA8;
}""")
"""Sets those of two neighbours of 16 bits to 0 whose random number is below the threshold: (low | high) & values."""


@triton.jit
def _dropped(values, row_numbers, column_numbers, THRESHOLD: tl.constexpr):
    """Returns the values of a tile in 16 bits, with 0 in the places that are dropped.

    These kernels wait for arithmetic, so it is one product for a place, and two places at a time afterwards. Triton's
    own `where` would take numbers of 16 bits out of their registers and put them back.
    """
    numbers = row_numbers[:, None] * column_numbers[None, :]
    threshold = tl.full((1, 1), THRESHOLD, tl.uint32)
    return tl.inline_asm_elementwise(
        _KEEP_TWO, "=r,r,r,r,r,r", [values, numbers, threshold], values.dtype, is_pure=True, pack=2
    )


@triton.jit
def drop(
    x,
    seed,
    column_numbers,
    out,
    tokens,
    width,
    scale,
    THRESHOLD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out = dropout(x). Programs: (tiles of tokens, tiles of columns)."""
    seed = tl.load(seed).to(tl.uint32)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    places = rows[:, None].to(tl.int64) * width + columns[None, :]
    inside = (rows < tokens)[:, None] & (columns < width)[None, :]
    values = tl.load(x + places, mask=inside, other=0.0)
    values = (values.to(tl.float32) * scale).to(out.dtype.element_ty)
    numbers = _column_numbers(column_numbers + columns, columns < width, seed, False)
    tl.store(out + places, _dropped(values, _row_numbers(rows, seed), numbers, THRESHOLD), mask=inside)


@triton.jit
def product(
    x,
    weight,
    seed,
    column_numbers,
    out,
    tokens,
    width,
    rank,
    columns_each,
    THRESHOLD: tl.constexpr,
    WHOLE: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out[part] = dropout(x) @ weight.T over some of the columns, not scaled, (tokens, rank) in float32.

    `add_parts` adds the parts up. With one program for each tile of tokens there would be too few for a GPU. Programs:
    (tiles of tokens, parts); a part has `columns_each` columns. RANK is a power of 2, at least 16.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    ranks = tl.arange(0, RANK)
    seed = tl.load(seed).to(tl.uint32)
    row_numbers = _row_numbers(rows, seed)
    starts = rows.to(tl.int64) * width
    total = tl.zeros((ROWS, RANK), tl.float32)
    for first in tl.range(part * columns_each, (part + 1) * columns_each, COLUMNS, num_stages=STAGES):
        columns = first + tl.arange(0, COLUMNS)
        inside = columns[None, :] < width
        inputs = _load(x + starts[:, None] + columns[None, :], (rows < tokens)[:, None] & inside, WHOLE)
        factor = _load(weight + ranks[:, None] * width + columns[None, :], (ranks < rank)[:, None] & inside, WHOLE)
        numbers = _column_numbers(column_numbers + columns, columns < width, seed, WHOLE)
        inputs = _dropped(inputs, row_numbers, numbers, THRESHOLD)
        total = tl.dot(inputs, tl.trans(factor), total)
    places = (part * tokens + rows)[:, None].to(tl.int64) * rank + ranks[None, :]
    tl.store(out + places, total, mask=(rows < tokens)[:, None] & (ranks < rank)[None, :])


@triton.jit
def add_parts(parts, out, size, scale, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """out = scale · the sum of PARTS parts of so many numbers, in this order. Programs: (groups of SIZE numbers,)."""
    places = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = places < size
    total = tl.zeros((SIZE,), tl.float32)
    for part in tl.range(PARTS):
        total += tl.load(parts + part * size + places, mask=inside, other=0.0)
    tl.store(out + places, (total * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def product_backward_weight(
    x,
    gradient,
    seed,
    column_numbers,
    out,
    tokens,
    width,
    rank,
    rows_each,
    scale,
    THRESHOLD: tl.constexpr,
    WHOLE: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out[part] = gradient.T @ dropout(x) over some of the tokens, (rank, width) in float32.

    The parts are added up afterwards, in a fixed order, so that equal runs have equal bits. Programs: (tiles of
    columns, parts); a part has `rows_each` tokens.
    """
    seed = tl.load(seed).to(tl.uint32)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    ranks = tl.arange(0, RANK)
    inside = columns[None, :] < width
    numbers = _column_numbers(column_numbers + columns, columns < width, seed, WHOLE)
    total = tl.zeros((RANK, COLUMNS), tl.float32)
    for first in tl.range(part * rows_each, (part + 1) * rows_each, ROWS, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS)
        exists = (rows < tokens)[:, None]
        row = rows[:, None].to(tl.int64)
        inputs = _load(x + row * width + columns[None, :], exists & inside, WHOLE)
        outputs = _load(gradient + row * rank + ranks[None, :], exists & (ranks < rank)[None, :], WHOLE)
        inputs = _dropped(inputs, _row_numbers(rows, seed), numbers, THRESHOLD)
        total = tl.dot(tl.trans(outputs), inputs, total)
    places = (part * rank + ranks)[:, None].to(tl.int64) * width + columns[None, :]
    tl.store(out + places, total * scale, mask=(ranks < rank)[:, None] & inside)


@triton.jit
def product_backward_input(
    gradient,
    weight,
    seed,
    column_numbers,
    out,
    tokens,
    width,
    rank,
    columns_each,
    scale,
    THRESHOLD: tl.constexpr,
    WHOLE: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out = gradient @ weight where places are kept, else 0; (tokens, width).

    A program keeps the gradients of its tokens while it goes through `columns_each` columns. Programs: (tiles of
    tokens, groups of columns).
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ranks = tl.arange(0, RANK)
    seed = tl.load(seed).to(tl.uint32)
    row_numbers = _row_numbers(rows, seed)
    row, exists = rows[:, None].to(tl.int64), (rows < tokens)[:, None]
    outputs = _load(gradient + row * rank + ranks[None, :], exists & (ranks < rank)[None, :], WHOLE)
    begin = tl.program_id(1) * columns_each
    for first in tl.range(begin, begin + columns_each, COLUMNS, num_stages=STAGES):
        columns = first + tl.arange(0, COLUMNS)
        inside = columns[None, :] < width
        factor = _load(weight + ranks[:, None] * width + columns[None, :], (ranks < rank)[:, None] & inside, WHOLE)
        numbers = _column_numbers(column_numbers + columns, columns < width, seed, WHOLE)
        result = (tl.dot(outputs, factor) * scale).to(out.dtype.element_ty)
        result = _dropped(result, row_numbers, numbers, THRESHOLD)
        tl.store(out + row * width + columns[None, :], result, mask=exists & inside)
