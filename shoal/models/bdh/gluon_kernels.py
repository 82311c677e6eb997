"""Kernels of the heads of BDH in Gluon, the language below Triton's, which says where each number is.

They compute what those in triton_kernels.py compute, for the sizes of the published BDH. What differs:

- The tokens of a tile stay in registers, as the left operand of the products, so that the tensor cores read only
  weights from shared memory; and the next product runs while a tile is finished.
- A product leaves two neighbours of a row, every eight columns, with each thread. So weights come with their columns in
  another order (`interleaved` in gluon_heads.py): what a thread then has are eight neighbours, which it loads and
  stores at once. `keys_backward`, whose right operand is no weight, exchanges them between threads instead.
- What is loaded comes through a ring of tiles in shared memory, some tiles ahead.

Shapes as in triton_kernels.py. A tile is (sequences, rows, columns); `N` is a multiple of two tiles' columns.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait


@gluon.constexpr_function
def _tile_layout(sequences, rows, columns, warps):
    """Says which thread has what of a tile: a quarter of 32 columns, and of 16 rows two."""
    lanes = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    outer = [[0, 2**i, 0] for i in range(4, rows.bit_length() - 1)]
    outer += [[2**i, 0, 0] for i in range(sequences.bit_length() - 1)]
    bits = warps.bit_length() - 1
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4]] + [[0, 0, 2**i] for i in range(5, columns.bit_length() - 1)]
    registers += [[0, 8, 0], *outer[bits:]]
    return gl.DistributedLinearLayout(registers, lanes, outer[:bits], [], [sequences, rows, columns])


@gluon.constexpr_function
def _pair_layout(sequences, rows, columns, warps):
    """Says the same of (sequences, rows, pairs of columns)."""
    tile = _tile_layout(sequences, rows, columns, warps)
    registers, lanes, outer = (
        [[a, b, c // 2] for a, b, c in bases] for bases in (tile.reg_bases[1:], tile.lane_bases, tile.warp_bases)
    )
    return gl.DistributedLinearLayout(registers, lanes, outer, [], [sequences, rows, columns // 2])


@gluon.constexpr_function
def _table_layout(rows, columns, warps):
    """Says what a thread needs of cos and sin, (rows, pairs): warps with other sequences need the same."""
    pairs = _pair_layout(1, rows, columns, warps)
    registers, lanes, outer = (
        [[b, c] for _, b, c in bases] for bases in (pairs.reg_bases, pairs.lane_bases, pairs.warp_bases)
    )
    outer += [[0, 0]] * (warps.bit_length() - 1 - len(outer))
    return gl.DistributedLinearLayout(registers, lanes, outer, [], [rows, columns // 2])


@gluon.constexpr_function
def _product_layout(columns, warps):
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])


@gluon.jit
def _ordered(product, SEQUENCES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Returns a product with interleaved weights as a tile, with its columns in order. No number moves."""
    tile = gl.reshape(product, [SEQUENCES, ROWS, COLUMNS // 32, 4, 4, 2])
    tile = gl.reshape(gl.permute(tile, [0, 1, 2, 4, 3, 5]), [SEQUENCES, ROWS, COLUMNS])
    return gl.convert_layout(tile, _tile_layout(SEQUENCES, ROWS, COLUMNS, gl.num_warps()))


@gluon.jit
def _split(tile, SEQUENCES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Returns the first and the second neurons of the pairs."""
    PAIRS: gl.constexpr = _pair_layout(SEQUENCES, ROWS, COLUMNS, gl.num_warps())
    even, odd = gl.split(gl.reshape(tile, [SEQUENCES, ROWS, COLUMNS // 2, 2]))
    return gl.convert_layout(even, PAIRS), gl.convert_layout(odd, PAIRS)


@gluon.jit
def _joined(even, odd, SEQUENCES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    tile = gl.reshape(gl.join(even, odd), [SEQUENCES, ROWS, COLUMNS])
    return gl.convert_layout(tile, _tile_layout(SEQUENCES, ROWS, COLUMNS, gl.num_warps()))


@gluon.jit
def _rotated(tile, cos, sin, SEQUENCES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Rotates the pairs (2i, 2i + 1) of the columns of a tile; its sequences share cos and sin."""
    PAIRS: gl.constexpr = _pair_layout(SEQUENCES, ROWS, COLUMNS, gl.num_warps())
    even, odd = _split(tile, SEQUENCES, ROWS, COLUMNS)
    c = gl.expand_dims(gl.convert_layout(cos, gl.SliceLayout(0, PAIRS)).to(gl.float32), 0)
    s = gl.expand_dims(gl.convert_layout(sin, gl.SliceLayout(0, PAIRS)).to(gl.float32), 0)
    return _joined(even * c - odd * s, odd * c + even * s, SEQUENCES, ROWS, COLUMNS)


@gluon.jit
def _hashed(index, seed):
    """Returns 32 random bits for each index, those of triton_kernels.py."""
    bits = index.to(gl.uint32) ^ seed
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@gluon.jit
def _quotient(a, b):
    """Returns a / b up to the last bits of float32, in fewer instructions than a division that is exact to them."""
    return gl.inline_asm_elementwise(
        "div.approx.f32 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _indices(LAYOUT: gl.constexpr, A: gl.constexpr, B: gl.constexpr, C: gl.constexpr):
    """Returns the three indices of the elements of a tile (A, B, C)."""
    a = gl.arange(0, A, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    b = gl.arange(0, B, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    c = gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    a, b = gl.expand_dims(gl.expand_dims(a, 1), 2), gl.expand_dims(gl.expand_dims(b, 0), 2)
    return a, b, gl.expand_dims(gl.expand_dims(c, 0), 1)


@gluon.jit
def _places(sequence, row, batch, time, N, SEQUENCES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Returns where the elements of a tile are in (batch, time, N), from its first one on, and which of them exist."""
    LAYOUT: gl.constexpr = _tile_layout(SEQUENCES, ROWS, COLUMNS, gl.num_warps())
    sequences, rows, columns = _indices(LAYOUT, SEQUENCES, ROWS, COLUMNS)
    return sequences * (time * N) + rows * N + columns, (sequence + sequences < batch) & (row + rows < time)


@gluon.jit
def _table_places(row, time, N, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Returns where the elements of a tile of cos or sin are; past the last position, those of the last one."""
    LAYOUT: gl.constexpr = _table_layout(ROWS, COLUMNS, gl.num_warps())
    rows = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), 1)
    pairs = gl.expand_dims(gl.arange(0, COLUMNS // 2, gl.SliceLayout(0, LAYOUT)), 0)
    return gl.minimum(row + rows, time - 1) * (N // 2) + pairs


@gluon.jit
def _barriers(COUNT: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=1)
    return bars


@gluon.jit
def _operand(tokens, sequence, row, D: gl.constexpr, SEQUENCES: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Loads the tokens of a tile into registers, as the left operand of a product."""
    bar = _barriers(1).index(0)
    loaded = gl.allocate_shared_memory(gl.bfloat16, [SEQUENCES, ROWS, D], tokens.layout)
    mbarrier.expect(bar, SEQUENCES * ROWS * D * 2)
    tma.async_copy_global_to_shared(tokens, [sequence, row, 0], bar, loaded)
    mbarrier.wait(bar, 0)
    mbarrier.invalidate(bar)
    return loaded.reshape([SEQUENCES * ROWS, D]).load(gl.DotOperandLayout(0, LAYOUT, 2))


@gluon.jit
def _load_gate(encoder_v, neurons, weights, actives, bars, i, count, place, first, row, COLUMNS: gl.constexpr):
    """Begins to load what tile i needs, if there is such a tile."""
    STAGES: gl.constexpr = weights.shape[0]
    slot, exists = i % STAGES, i < count
    bar = bars.index(slot)
    mbarrier.expect(bar, (weights.numel + actives.numel) // STAGES * 2, pred=exists)
    tma.async_copy_global_to_shared(encoder_v, [place, i * COLUMNS], bar, weights.index(slot), pred=exists)
    tma.async_copy_global_to_shared(neurons, [first, row, i * COLUMNS], bar, actives.index(slot), pred=exists)


@gluon.jit(do_not_specialize=["threshold", "batch", "time"])
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
    D: gl.constexpr,
    DROPS: gl.constexpr,
    SEQUENCES: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """gated = dropout(neurons · relu(normed @ encoder_v)), with interleaved weights. Programs: (tiles, heads)."""
    PRODUCT: gl.constexpr = _product_layout(COLUMNS, gl.num_warps())
    TILE: gl.constexpr = _tile_layout(SEQUENCES, ROWS, COLUMNS, gl.num_warps())
    tiles = gl.cdiv(time, ROWS)
    row, sequence = gl.program_id(0) % tiles * ROWS, gl.program_id(0) // tiles * SEQUENCES
    place, first = gl.program_id(1) * D, gl.program_id(1) * batch + sequence
    tokens = _operand(normed, first, row, D, SEQUENCES, ROWS, PRODUCT)
    places, inside = _places(sequence, row, batch, time, N, SEQUENCES, ROWS, COLUMNS)
    gated += (first.to(gl.int64) * time + row) * N
    PAIRS: gl.constexpr = _pair_layout(SEQUENCES, ROWS, COLUMNS, gl.num_warps())
    sequences, rows, pairs = _indices(PAIRS, SEQUENCES, ROWS, COLUMNS // 2)
    row_seeds = _hashed((first + sequences) * time + row + rows, gl.load(seed).to(gl.uint32))

    weights = gl.allocate_shared_memory(gl.bfloat16, [STAGES, D, COLUMNS], encoder_v.layout)
    actives = gl.allocate_shared_memory(gl.bfloat16, [STAGES, SEQUENCES, ROWS, COLUMNS], neurons.layout)
    bars, count = _barriers(STAGES), N // COLUMNS
    for ahead in gl.static_range(STAGES - 1):
        _load_gate(encoder_v, neurons, weights, actives, bars, ahead, count, place, first, row, COLUMNS)
    nothing = gl.zeros([SEQUENCES * ROWS, COLUMNS], gl.float32, PRODUCT)
    mbarrier.wait(bars.index(0), 0)
    coming = warpgroup_mma(tokens, weights.index(0), nothing, use_acc=False, is_async=True)
    for even in range(0, count, 2):
        for odd in gl.static_range(2):  # two at a time: the registers of their products swap their roles
            i = even + odd
            product = warpgroup_mma_wait(0, deps=(coming,))
            _load_gate(encoder_v, neurons, weights, actives, bars, i + STAGES - 1, count, place, first, row, COLUMNS)
            mbarrier.wait(bars.index((i + 1) % STAGES), (i + 1) // STAGES & 1, pred=i + 1 < count)
            coming = warpgroup_mma(tokens, weights.index((i + 1) % STAGES), nothing, use_acc=False, is_async=True)
            active = actives.index(i % STAGES).load(TILE).to(gl.float32)
            result = active * _ordered(gl.maximum(product, 0.0), SEQUENCES, ROWS, COLUMNS)
            if DROPS:
                bits = _hashed(i * (COLUMNS // 2) + pairs, row_seeds)
                ones, others = _split(result, SEQUENCES, ROWS, COLUMNS)
                ones = gl.where((bits & 0xFFFF) < threshold, 0.0, ones * scale)
                others = gl.where((bits >> 16) < threshold, 0.0, others * scale)
                result = _joined(ones, others, SEQUENCES, ROWS, COLUMNS)
            gl.store(gated + i * COLUMNS + places, result.to(gl.bfloat16), mask=inside)
    warpgroup_mma_wait(0, deps=(coming,))


@gluon.jit
def _load_gate_backward(
    decoder, neurons, gated, weights, actives, results, bars, i, count, place, first, row, COLUMNS: gl.constexpr
):
    STAGES: gl.constexpr = weights.shape[0]
    slot, exists = i % STAGES, i < count
    bar, column = bars.index(slot), i * COLUMNS
    mbarrier.expect(bar, (weights.numel + 2 * actives.numel) // STAGES * 2, pred=exists)
    at = [place + i * (COLUMNS // 32), 0, 0, 0, 0]
    tma.async_copy_global_to_shared(decoder, at, bar, weights.index(slot), pred=exists)
    tma.async_copy_global_to_shared(neurons, [first, row, column], bar, actives.index(slot), pred=exists)
    tma.async_copy_global_to_shared(gated, [first, row, column], bar, results.index(slot), pred=exists)


@gluon.jit
def _decoded(tokens, weight, nothing, D: gl.constexpr, COLUMNS: gl.constexpr):
    """Begins the product of tokens with transposed rows of the decoder."""
    weight = weight.reshape([COLUMNS, D]).permute([1, 0])
    return warpgroup_mma(tokens, weight, nothing, use_acc=False, is_async=True)


@gluon.jit(do_not_specialize=["batch", "time"])
def gate_backward(
    to_y,
    decoder,
    neurons,
    gated,
    cos,
    sin,
    to_gates,
    to_neurons,
    keys,
    scale,
    batch,
    time,
    N,
    D: gl.constexpr,
    SEQUENCES: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The gradients of gates and, through the gating, of neurons; and keys again. Programs: (tiles, heads).

    `decoder` comes as (heads · neurons / 32, 4, 4, 2, embd), in the order of interleaved columns.
    """
    PRODUCT: gl.constexpr = _product_layout(COLUMNS, gl.num_warps())
    TILE: gl.constexpr = _tile_layout(SEQUENCES, ROWS, COLUMNS, gl.num_warps())
    tiles = gl.cdiv(time, ROWS)
    row, sequence = gl.program_id(0) % tiles * ROWS, gl.program_id(0) // tiles * SEQUENCES
    place, first = gl.program_id(1) * (N // 32), gl.program_id(1) * batch + sequence
    tokens = _operand(to_y, sequence, row, D, SEQUENCES, ROWS, PRODUCT)
    places, inside = _places(sequence, row, batch, time, N, SEQUENCES, ROWS, COLUMNS)
    table = _table_places(row, time, N, ROWS, COLUMNS)
    begin = (first.to(gl.int64) * time + row) * N

    weights = gl.allocate_shared_memory(gl.bfloat16, [STAGES, COLUMNS // 32, 4, 4, 2, D], decoder.layout)
    actives = gl.allocate_shared_memory(gl.bfloat16, [STAGES, SEQUENCES, ROWS, COLUMNS], neurons.layout)
    results = gl.allocate_shared_memory(gl.bfloat16, [STAGES, SEQUENCES, ROWS, COLUMNS], neurons.layout)
    bars, count = _barriers(STAGES), N // COLUMNS
    for ahead in gl.static_range(STAGES - 1):
        _load_gate_backward(
            decoder, neurons, gated, weights, actives, results, bars, ahead, count, place, first, row, COLUMNS
        )
    nothing = gl.zeros([SEQUENCES * ROWS, COLUMNS], gl.float32, PRODUCT)
    mbarrier.wait(bars.index(0), 0)
    coming = _decoded(tokens, weights.index(0), nothing, D, COLUMNS)
    for even in range(0, count, 2):
        for odd in gl.static_range(2):
            i = even + odd
            c, s = gl.load(cos + table + i * (COLUMNS // 2)), gl.load(sin + table + i * (COLUMNS // 2))
            product = warpgroup_mma_wait(0, deps=(coming,))
            new = i + STAGES - 1
            _load_gate_backward(
                decoder, neurons, gated, weights, actives, results, bars, new, count, place, first, row, COLUMNS
            )
            mbarrier.wait(bars.index((i + 1) % STAGES), (i + 1) // STAGES & 1, pred=i + 1 < count)
            coming = _decoded(tokens, weights.index((i + 1) % STAGES), nothing, D, COLUMNS)
            at = begin + i * COLUMNS + places
            active = actives.index(i % STAGES).load(TILE).to(gl.float32)
            rotated = _rotated(active, c, s, SEQUENCES, ROWS, COLUMNS)
            gl.store(keys + at, rotated.to(gl.bfloat16), mask=inside)
            result = results.index(i % STAGES).load(TILE).to(gl.float32)
            to_gated = gl.where(result > 0.0, _ordered(product, SEQUENCES, ROWS, COLUMNS), 0.0)
            gl.store(to_gates + at, (to_gated * active * scale).to(gl.bfloat16), mask=inside)
            gates = _quotient(result, gl.where(result > 0.0, active, 1.0))
            gl.store(to_neurons + at, (to_gated * gates).to(gl.bfloat16), mask=inside)
    warpgroup_mma_wait(0, deps=(coming,))


@gluon.jit
def _load_keys(keys, loaded, bars, slot: gl.constexpr, sequence, column, N):
    mbarrier.expect(bars.index(slot), loaded.numel // 2 * 2, pred=column < N)
    tma.async_copy_global_to_shared(keys, [sequence, 0, column], bars.index(slot), loaded.index(slot), pred=column < N)


@gluon.jit
def _load_others(to_neurons, neurons, parts, actives, bars, slot: gl.constexpr, sequence, row, column, N):
    bar, exists = bars.index(slot), column < N
    mbarrier.expect(bar, parts.numel // 2 * 4, pred=exists)
    tma.async_copy_global_to_shared(to_neurons, [sequence, row, column], bar, parts.index(slot), pred=exists)
    tma.async_copy_global_to_shared(neurons, [sequence, row, column], bar, actives.index(slot), pred=exists)


@gluon.jit(do_not_specialize=["time"])
def keys_backward(
    scores,
    keys,
    to_neurons,
    neurons,
    cos,
    sin,
    result,
    time,
    N,
    DEPTH: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """result = to_neurons + scores @ keys rotated back, where neurons are above 0, else 0.

    A program keeps rows of the scores of a sequence, up to DEPTH columns, while it goes through all neurons. Programs
    next to each other have other rows of the same sequence, and find its keys in the L2 cache.
    """
    PRODUCT: gl.constexpr = _product_layout(COLUMNS, gl.num_warps())
    TILE: gl.constexpr = _tile_layout(1, ROWS, COLUMNS, gl.num_warps())
    tiles = gl.cdiv(time, ROWS)
    row, sequence = gl.program_id(0) % tiles * ROWS, gl.program_id(0) // tiles
    own = _operand(scores, sequence, row, DEPTH, 1, ROWS, PRODUCT)
    places, inside = _places(0, row, 1, time, N, 1, ROWS, COLUMNS)
    table = _table_places(row, time, N, ROWS, COLUMNS)
    result += (sequence.to(gl.int64) * time + row) * N

    loaded = gl.allocate_shared_memory(gl.bfloat16, [2, 1, DEPTH, COLUMNS], keys.layout)
    parts = gl.allocate_shared_memory(gl.bfloat16, [2, 1, ROWS, COLUMNS], neurons.layout)
    actives = gl.allocate_shared_memory(gl.bfloat16, [2, 1, ROWS, COLUMNS], neurons.layout)
    bars, others = _barriers(2), _barriers(2)
    _load_keys(keys, loaded, bars, 0, sequence, 0, N)
    _load_keys(keys, loaded, bars, 1, sequence, COLUMNS, N)
    _load_others(to_neurons, neurons, parts, actives, others, 0, sequence, row, 0, N)
    nothing = gl.zeros([ROWS, COLUMNS], gl.float32, PRODUCT)
    mbarrier.wait(bars.index(0), 0)
    weight = loaded.index(0).reshape([DEPTH, COLUMNS])
    coming = warpgroup_mma(own, weight, nothing, use_acc=False, is_async=True)
    for even in range(0, N // COLUMNS, 2):
        for odd in gl.static_range(2):
            column = (even + odd) * COLUMNS
            c, s = gl.load(cos + table + column // 2), gl.load(sin + table + column // 2)
            product = warpgroup_mma_wait(0, deps=(coming,))
            _load_keys(keys, loaded, bars, odd, sequence, column + 2 * COLUMNS, N)
            _load_others(to_neurons, neurons, parts, actives, others, 1 - odd, sequence, row, column + COLUMNS, N)
            mbarrier.wait(bars.index(1 - odd), (even + odd + 1) // 2 & 1, pred=column + COLUMNS < N)
            weight = loaded.index(1 - odd).reshape([DEPTH, COLUMNS])
            coming = warpgroup_mma(own, weight, nothing, use_acc=False, is_async=True)
            to_keys = gl.convert_layout(gl.reshape(product.to(gl.bfloat16), [1, ROWS, COLUMNS]), TILE)
            total = _rotated(to_keys.to(gl.float32), c, -s, 1, ROWS, COLUMNS)
            mbarrier.wait(others.index(odd), even // 2 & 1)
            total += parts.index(odd).load(TILE).to(gl.float32)
            active = actives.index(odd).load(TILE).to(gl.float32)
            gl.store(result + column + places, gl.where(active > 0.0, total, 0.0).to(gl.bfloat16), mask=inside)
    warpgroup_mma_wait(0, deps=(coming,))
