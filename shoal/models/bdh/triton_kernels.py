"""Triton kernels of the heads of BDH: matrix products that finish their tiles while these are still on the chip.

Tensors over neurons are the largest by far, and a pass over one of them costs about half as much as the product that
makes it. So ReLU, rotation, gating and their gradients are computed where a product ends, and not in passes of their
own. Products that need nothing of the kind are left to cuBLAS (`triton_heads.py`), and so are those between tokens:
cuBLAS is so much faster at these that a pass after it costs less than tiles that are finished here. gluon_kernels.py
has faster ones for some sizes.

What is loaded comes as a descriptor, whose `load` takes the place of a block and reads 0 outside of the tensor. What a
loop stores comes as a pointer: before it stores by a descriptor, Triton 3.6 waits until the last block has left.
Shapes: x (batch, time, embd), weights (heads, embd, neurons) or (heads, neurons, embd), what is over neurons (heads,
batch, time, neurons), cos and sin (time, neurons / 2). Sums are kept in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rotated(values, cos, sin, SEQUENCES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rotates the pairs (2i, 2i + 1) of the columns of a tile; its sequences share cos and sin."""
    even, odd = tl.split(tl.reshape(values, (SEQUENCES, ROWS, COLUMNS // 2, 2)))
    cos, sin = cos.to(tl.float32)[None], sin.to(tl.float32)[None]
    pairs = tl.join(even * cos - odd * sin, odd * cos + even * sin)
    return tl.reshape(pairs, (SEQUENCES * ROWS, COLUMNS))


@triton.jit
def _hashed(index, seed):
    """Returns 32 random bits for each index: two rounds of folding and multiplying."""
    bits = index.to(tl.uint32) ^ seed
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _places(head, sequence, row, batch, time, N, SEQUENCES: tl.constexpr, ROWS: tl.constexpr):
    """Returns where the rows of a tile begin in a tensor (heads, batch, time, N), and which of them exist."""
    index = tl.arange(0, SEQUENCES * ROWS)[:, None]
    sequences, rows = sequence + index // ROWS, row + index % ROWS
    return ((head * batch + sequences) * time + rows).to(tl.int64) * N, (sequences < batch) & (rows < time)


@triton.jit
def encode(
    x,
    encoder,
    cos,
    sin,
    neurons,
    keys,
    batch,
    time,
    N,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    SEQUENCES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """neurons = relu(x @ encoder), keys = rotated neurons.

    A program keeps the tokens of a tile on the chip while it goes through a chunk of the weight's columns. A tile has
    the same positions of several sequences. Programs: (tiles, heads, chunks).
    """
    tiles = tl.cdiv(time, ROWS)
    row, sequence = tl.program_id(0) % tiles * ROWS, tl.program_id(0) // tiles * SEQUENCES
    head, first = tl.program_id(1), tl.program_id(2) * CHUNK
    places, inside = _places(head, sequence, row, batch, time, N, SEQUENCES, ROWS)
    inputs = tl.reshape(x.load([sequence, row, 0]), (SEQUENCES * ROWS, D))
    for column in tl.range(first, first + CHUNK, COLUMNS, num_stages=STAGES):
        weight = tl.reshape(encoder.load([head, 0, column]), (D, COLUMNS))
        c, s = cos.load([row, column // 2]), sin.load([row, column // 2])
        found = tl.maximum(tl.dot(inputs, weight), 0.0).to(tl.bfloat16)
        rotated = _rotated(found.to(tl.float32), c, s, SEQUENCES, ROWS, COLUMNS).to(tl.bfloat16)
        columns = places + column + tl.arange(0, COLUMNS)
        tl.store(neurons + columns, found, mask=inside)
        tl.store(keys + columns, rotated, mask=inside)


@triton.jit
def gate(
    normed,
    encoder_v,
    neurons,
    gated,
    seed,
    threshold,
    scale,
    batch,
    time,
    N,
    D: tl.constexpr,
    DROPS: tl.constexpr,
    CHUNK: tl.constexpr,
    SEQUENCES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """gated = dropout(neurons · relu(normed @ encoder_v)). Programs as in `encode`.

    Two neighbours share a hash, of which each takes 16 bits; an element is dropped if its bits are below `threshold`.
    """
    tiles = tl.cdiv(time, ROWS)
    row, sequence = tl.program_id(0) % tiles * ROWS, tl.program_id(0) // tiles * SEQUENCES
    head, first = tl.program_id(1), tl.program_id(2) * CHUNK
    places, inside = _places(head, sequence, row, batch, time, N, SEQUENCES, ROWS)
    inputs = tl.reshape(normed.load([head, sequence, row, 0]), (SEQUENCES * ROWS, D))
    row_seeds = _hashed(places // N, tl.load(seed).to(tl.uint32))
    for column in tl.range(first, first + CHUNK, COLUMNS, num_stages=STAGES):
        weight = tl.reshape(encoder_v.load([head, 0, column]), (D, COLUMNS))
        active = tl.reshape(neurons.load([head, sequence, row, column]), (SEQUENCES * ROWS, COLUMNS))
        result = active.to(tl.float32) * tl.maximum(tl.dot(inputs, weight), 0.0)
        if DROPS:
            bits = _hashed(column // 2 + tl.arange(0, COLUMNS // 2)[None, :], row_seeds)
            even, odd = tl.split(tl.reshape(result, (SEQUENCES * ROWS, COLUMNS // 2, 2)))
            even = tl.where((bits & 0xFFFF) < threshold, 0.0, even * scale)
            odd = tl.where((bits >> 16) < threshold, 0.0, odd * scale)
            result = tl.reshape(tl.join(even, odd), (SEQUENCES * ROWS, COLUMNS))
        tl.store(gated + places + column + tl.arange(0, COLUMNS), result.to(tl.bfloat16), mask=inside)


@triton.jit
def gate_backward(
    x,
    to_y,
    encoder,
    decoder,
    gated,
    to_gates,
    to_neurons,
    scale,
    batch,
    time,
    N,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    SEQUENCES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The gradients of gates and, through the gating, of neurons, which are computed again. Programs as in `encode`.

    Gates are gated / neurons, which is exact up to rounding where neurons are not 0; elsewhere they do not matter. What
    was dropped is 0 in `gated`, so nothing needs to know the dropout mask.

    Where a neuron is 0, its gradient is -0.0, and elsewhere adding 0.0 makes a 0.0 of a -0.0. So `neurons_backward`
    need not read neurons.
    """
    tiles = tl.cdiv(time, ROWS)
    row, sequence = tl.program_id(0) % tiles * ROWS, tl.program_id(0) // tiles * SEQUENCES
    head, first = tl.program_id(1), tl.program_id(2) * CHUNK
    places, inside = _places(head, sequence, row, batch, time, N, SEQUENCES, ROWS)
    inputs = tl.reshape(x.load([sequence, row, 0]), (SEQUENCES * ROWS, D))
    to_outputs = tl.reshape(to_y.load([sequence, row, 0]), (SEQUENCES * ROWS, D))
    for column in tl.range(first, first + CHUNK, COLUMNS, num_stages=STAGES):
        first_weight = tl.reshape(encoder.load([head, 0, column]), (D, COLUMNS))
        last_weight = tl.reshape(decoder.load([head, column, 0]), (COLUMNS, D))
        result = tl.reshape(gated.load([head, sequence, row, column]), (SEQUENCES * ROWS, COLUMNS)).to(tl.float32)
        active = tl.maximum(tl.dot(inputs, first_weight), 0.0).to(tl.bfloat16).to(tl.float32)
        to_gated = tl.where(result > 0.0, tl.dot(to_outputs, tl.trans(last_weight)), 0.0)
        columns = places + column + tl.arange(0, COLUMNS)
        tl.store(to_gates + columns, (to_gated * active * scale).to(tl.bfloat16), mask=inside)
        gates = result / tl.where(active > 0.0, active, 1.0)
        # As bits, because Triton takes a -0.0 in the code for 0.0.
        bits = tl.where(active > 0.0, (to_gated * gates + 0.0).to(tl.int32, bitcast=True), -2147483648)
        tl.store(to_neurons + columns, bits.to(tl.float32, bitcast=True).to(tl.bfloat16), mask=inside)


@triton.jit
def neurons_backward(
    to_keys,
    to_neurons,
    cos,
    sin,
    result,
    time,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """result = to_neurons + to_keys rotated back; 0 where to_neurons is the -0.0 that `gate_backward` leaves.

    Programs: (tiles of positions · heads · sequences, tiles of neurons).
    """
    tiles = tl.cdiv(time, ROWS)
    row, sequence = tl.program_id(0) % tiles * ROWS, tl.program_id(0) // tiles
    column = tl.program_id(1) * COLUMNS
    total = tl.reshape(to_keys.load([sequence, row, column]), (ROWS, COLUMNS)).to(tl.float32)
    total = _rotated(total, cos.load([row, column // 2]), -sin.load([row, column // 2]), 1, ROWS, COLUMNS)
    marked = tl.reshape(to_neurons.load([sequence, row, column]), (ROWS, COLUMNS))
    total = tl.where(marked.to(tl.int16, bitcast=True) != -32768, total + marked.to(tl.float32), 0.0).to(tl.bfloat16)
    result.store([sequence, row, column], tl.reshape(total, (1, ROWS, COLUMNS)))
