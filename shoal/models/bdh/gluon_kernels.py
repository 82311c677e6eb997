"""Kernels of the heads of BDH in Gluon, the language below Triton's, which says where each number is.

They compute what those in triton_kernels.py compute, for the sizes of the published BDH. What differs:

- A program is three groups of warps. One loads tiles into a ring in shared memory; each of the two others multiplies
  and finishes tiles for tokens of its own. They wait for tiles and not for each other, so that the tensor cores work
  for one of them while the other finishes a tile.
- Tokens stay in registers, as the left operand of the products: the tensor cores read only the right one from shared
  memory, and weights are read once for twice as many tokens.
- A product leaves two neighbours of a row, every eight columns, with each thread. So weights come with their columns in
  another order (`interleaved` in gluon_heads.py): what a thread then has are eight neighbours, which it loads and
  stores at once. `keys_backward`, whose right operand is no weight, exchanges them between threads instead.
- Neighbours 2i and 2i + 1 are two tensors, (sequences, rows, pairs). Stored tensors are int32, a pair of bf16 each.

Shapes as in triton_kernels.py; `N` is the number of neurons in a head.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait


@gluon.constexpr_function
def _tile_layout(sequences, rows, columns):
    """Says which of 128 threads has what of a tile: of 32 columns a quarter, of 16 rows two."""
    lanes = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    outer = [[0, 2**i, 0] for i in range(4, rows.bit_length() - 1)]
    outer += [[2**i, 0, 0] for i in range(sequences.bit_length() - 1)]
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4]] + [[0, 0, 2**i] for i in range(5, columns.bit_length() - 1)]
    registers += [[0, 8, 0], *outer[2:]]
    return gl.DistributedLinearLayout(registers, lanes, outer[:2], [], [sequences, rows, columns])


@gluon.constexpr_function
def _pair_layout(sequences, rows, columns):
    """Says the same of (sequences, rows, pairs of columns)."""
    tile = _tile_layout(sequences, rows, columns)
    registers, lanes, outer = (
        [[a, b, c // 2] for a, b, c in bases] for bases in (tile.reg_bases[1:], tile.lane_bases, tile.warp_bases)
    )
    return gl.DistributedLinearLayout(registers, lanes, outer, [], [sequences, rows, columns // 2])


@gluon.constexpr_function
def _product_layout(columns):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def _pairs(tile, SEQUENCES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Returns the first and the second neurons of the pairs of a tile."""
    PAIRS: gl.constexpr = _pair_layout(SEQUENCES, ROWS, COLUMNS)
    first, second = gl.split(gl.reshape(tile, [SEQUENCES, ROWS, COLUMNS // 2, 2]))
    return gl.convert_layout(first, PAIRS), gl.convert_layout(second, PAIRS)


@gluon.jit
def _ordered(product, SEQUENCES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Returns the pairs of a product with interleaved weights, with its columns in order. No number moves."""
    tile = gl.permute(gl.reshape(product, [SEQUENCES, ROWS, COLUMNS // 32, 4, 4, 2]), [0, 1, 2, 4, 3, 5])
    return _pairs(gl.reshape(tile, [SEQUENCES, ROWS, COLUMNS]), SEQUENCES, ROWS, COLUMNS)


@gluon.jit
def _loaded(tile, SEQUENCES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Returns the pairs of a tile in shared memory, in float32."""
    first, second = _pairs(tile.load(_tile_layout(SEQUENCES, ROWS, COLUMNS)), SEQUENCES, ROWS, COLUMNS)
    return first.to(gl.float32), second.to(gl.float32)


@gluon.jit
def _table(tile, SEQUENCES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Returns a tile of cos or sin, (rows, pairs) in shared memory, for all sequences, in float32."""
    PAIRS: gl.constexpr = _pair_layout(SEQUENCES, ROWS, COLUMNS)
    return gl.expand_dims(tile.load(gl.SliceLayout(0, PAIRS)).to(gl.float32), 0)


@gluon.jit
def _packed(first, second):
    """Returns pairs rounded to bf16, the first in the lower half of an int32."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [first, second], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _packed_relu(first, second):
    return gl.inline_asm_elementwise(
        "cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,r,r", [first, second], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _unpacked(pairs):
    return (pairs << 16).to(gl.float32, bitcast=True), (pairs & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _marked(gradients, neurons):
    """Returns gradients with -0.0 where a neuron is 0. Elsewhere adding 0.0 makes a 0.0 of a -0.0.

    As bits, because Triton takes a -0.0 in the code for 0.0.
    """
    bits = gl.where(neurons > 0.0, (gradients + 0.0).to(gl.int32, bitcast=True), -2147483648)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _where_active(gradients, marked):
    """Returns gradients where `marked` is not the -0.0 of a neuron that is 0, else 0."""
    return gl.where(marked.to(gl.int32, bitcast=True) != -2147483648, gradients, 0.0)


@gluon.jit
def _inverse(values):
    """Returns 1 / values up to the last bit of float32; for values below the smallest normal one, that of it."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [gl.maximum(values, 2.0**-126)], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _hashed(index, seed):
    """Returns 32 random bits for each index, those of triton_kernels.py."""
    bits = index.to(gl.uint32) ^ seed
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@gluon.jit
def _indices(SEQUENCES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Returns the three indices of the pairs of a tile."""
    PAIRS: gl.constexpr = _pair_layout(SEQUENCES, ROWS, COLUMNS)
    a = gl.arange(0, SEQUENCES, gl.SliceLayout(1, gl.SliceLayout(2, PAIRS)))
    b = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, PAIRS)))
    c = gl.arange(0, COLUMNS // 2, gl.SliceLayout(0, gl.SliceLayout(1, PAIRS)))
    a, b = gl.expand_dims(gl.expand_dims(a, 1), 2), gl.expand_dims(gl.expand_dims(b, 0), 2)
    return a, b, gl.expand_dims(gl.expand_dims(c, 0), 1)


@gluon.jit
def _places(sequence, row, batch, time, N, SEQUENCES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Returns where the pairs of a tile are, from its first one on, and which of them exist."""
    sequences, rows, pairs = _indices(SEQUENCES, ROWS, COLUMNS)
    places = sequences * (time * (N // 2)) + rows * (N // 2) + pairs
    return places, (sequence + sequences < batch) & (row + rows < time)


@gluon.jit
def _operand(
    tokens,
    sequence,
    row,
    batch,
    time,
    width,
    D: gl.constexpr,
    SEQUENCES: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """Loads tokens (batch, time, width) into registers, as the left operand of a product; 0 past the end."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, _product_layout(COLUMNS), 2)
    index = gl.expand_dims(gl.arange(0, SEQUENCES * ROWS, gl.SliceLayout(1, LEFT)), 1)
    channel = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, LEFT)), 0)
    sequences, rows = sequence + index // ROWS, row + index % ROWS
    inside = (sequences < batch) & (rows < time) & (channel < width)
    return gl.load(tokens + (sequences.to(gl.int64) * time + rows) * width + channel, mask=inside, other=0.0)


@gluon.jit
def _begun(left, right, COLUMNS: gl.constexpr):
    """Begins a product; `_done` waits for it."""
    nothing = gl.zeros([left.shape[0], COLUMNS], gl.float32, _product_layout(COLUMNS))
    return warpgroup_mma(left, right, nothing, use_acc=False, is_async=True)


@gluon.jit
def _done(product):
    return warpgroup_mma_wait(0, deps=(product,))


@gluon.jit
def _barriers(STAGES: gl.constexpr, COUNT: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit
def _wait(bars, i, STAGES: gl.constexpr):
    """Waits until tile i has been loaded, and returns where it is."""
    mbarrier.wait(bars.index(i % STAGES), i // STAGES & 1)
    return i % STAGES


@gluon.jit
def _wait_free(bars, i, STAGES: gl.constexpr):
    """Waits until the place of tile i is free, and returns it."""
    mbarrier.wait(bars.index(i % STAGES), i // STAGES & 1 ^ 1)
    return i % STAGES


@gluon.jit
def _release(bar):
    """Says that no warp of this group needs a tile any more."""
    gl.thread_barrier()
    mbarrier.arrive(bar, count=1)


@gluon.jit
def _encode_load(inputs, D: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr):
    encoder, cos, sin, shared, head, row, N = inputs
    weights, coss, sins, full, free = shared
    for i in range(N // COLUMNS):
        slot = _wait_free(free, i, STAGES)
        bar = full.index(slot)
        mbarrier.expect(bar, (D + ROWS) * COLUMNS * 2)
        tma.async_copy_global_to_shared(encoder, [head * D, i * COLUMNS], bar, weights.index(slot))
        tma.async_copy_global_to_shared(cos, [row, i * (COLUMNS // 2)], bar, coss.index(slot))
        tma.async_copy_global_to_shared(sin, [row, i * (COLUMNS // 2)], bar, sins.index(slot))


@gluon.jit
def _encode_part(
    inputs,
    PART: gl.constexpr,
    D: gl.constexpr,
    SEQUENCES: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):
    x, neurons, keys, shared, head, sequence, row, batch, time, N = inputs
    weights, coss, sins, full, free = shared
    sequence += PART * SEQUENCES
    tokens = _operand(x, sequence, row, batch, time, D, D, SEQUENCES, ROWS, COLUMNS)
    places, inside = _places(sequence, row, batch, time, N, SEQUENCES, ROWS, COLUMNS)
    begin = ((head * batch + sequence).to(gl.int64) * time + row) * (N // 2)
    for i in range(N // COLUMNS):
        slot = _wait(full, i, STAGES)
        first, second = _ordered(_done(_begun(tokens, weights.index(slot), COLUMNS)), SEQUENCES, ROWS, COLUMNS)
        found = _packed_relu(first, second)
        first, second = _unpacked(found)
        c, s = _table(coss.index(slot), SEQUENCES, ROWS, COLUMNS), _table(sins.index(slot), SEQUENCES, ROWS, COLUMNS)
        _release(free.index(slot))
        at = begin + i * (COLUMNS // 2) + places
        gl.store(neurons + at, found, mask=inside)
        gl.store(keys + at, _packed(first * c - second * s, second * c + first * s), mask=inside)


@gluon.jit(do_not_specialize=["batch", "time"])
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
    D: gl.constexpr,
    SEQUENCES: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """neurons = relu(x @ encoder), with interleaved weights, keys = rotated neurons.

    Each of the two groups has SEQUENCES · ROWS tokens. Programs: (tiles of tokens, heads).
    """
    tiles = gl.cdiv(time, ROWS)
    row, sequence = gl.program_id(0) % tiles * ROWS, gl.program_id(0) // tiles * (2 * SEQUENCES)
    head = gl.program_id(1)
    weights = gl.allocate_shared_memory(gl.bfloat16, [STAGES, D, COLUMNS], encoder.layout)
    coss = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, COLUMNS // 2], cos.layout)
    sins = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, COLUMNS // 2], cos.layout)
    full, free = _barriers(STAGES, 1), _barriers(STAGES, 2)
    shared = (weights, coss, sins, full, free)
    inputs = (x, neurons, keys, shared, head, sequence, row, batch, time, N)
    loaded = (encoder, cos, sin, shared, head, row, N)
    gl.warp_specialize(
        [
            (_encode_part, (inputs, 0, D, SEQUENCES, ROWS, COLUMNS, STAGES)),
            (_encode_part, (inputs, 1, D, SEQUENCES, ROWS, COLUMNS, STAGES)),
            (_encode_load, (loaded, D, ROWS, COLUMNS, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _gate_load(inputs, D: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr):
    encoder_v, neurons, shared, bars, head, first, row, N = inputs
    weights, actives = shared
    full, free, full_actives, free_actives = bars
    for i in range(N // COLUMNS):
        slot = _wait_free(free_actives, i, AHEAD)
        bar = full_actives.index(slot)
        mbarrier.expect(bar, actives.numel // AHEAD * 2)
        tma.async_copy_global_to_shared(neurons, [first, row, i * COLUMNS], bar, actives.index(slot))
        slot = _wait_free(free, i, STAGES)
        bar = full.index(slot)
        mbarrier.expect(bar, weights.numel // STAGES * 2)
        tma.async_copy_global_to_shared(encoder_v, [head * D, i * COLUMNS], bar, weights.index(slot))


@gluon.jit
def _gate_part(
    inputs,
    PART: gl.constexpr,
    D: gl.constexpr,
    DROPS: gl.constexpr,
    SEQUENCES: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
):
    normed, gated, seed, threshold, scale, shared, bars, head, sequence, row, batch, time, N = inputs
    weights, actives = shared
    full, free, full_actives, free_actives = bars
    sequence += PART * SEQUENCES
    begin = head * batch + sequence
    tokens = _operand(normed, begin, row, (head + 1) * batch, time, D, D, SEQUENCES, ROWS, COLUMNS)
    places, inside = _places(sequence, row, batch, time, N, SEQUENCES, ROWS, COLUMNS)
    sequences, rows, pairs = _indices(SEQUENCES, ROWS, COLUMNS)
    row_seeds = _hashed((begin + sequences) * time + row + rows, gl.load(seed).to(gl.uint32))
    gated += (begin.to(gl.int64) * time + row) * (N // 2)
    for i in range(N // COLUMNS):
        slot = _wait(full, i, STAGES)
        product = _done(_begun(tokens, weights.index(slot), COLUMNS))
        _release(free.index(slot))
        first, second = _ordered(product, SEQUENCES, ROWS, COLUMNS)
        slot = _wait(full_actives, i, AHEAD)
        one, other = _loaded(actives.index(slot).slice(PART * SEQUENCES, SEQUENCES, 0), SEQUENCES, ROWS, COLUMNS)
        _release(free_actives.index(slot))
        first, second = one * gl.maximum(first, 0.0), other * gl.maximum(second, 0.0)
        if DROPS:
            bits = _hashed(i * (COLUMNS // 2) + pairs, row_seeds)
            first = gl.where((bits & 0xFFFF) < threshold, 0.0, first * scale)
            second = gl.where((bits >> 16) < threshold, 0.0, second * scale)
        gl.store(gated + i * (COLUMNS // 2) + places, _packed(first, second), mask=inside)


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
    AHEAD: gl.constexpr,
):
    """gated = dropout(neurons · relu(normed @ encoder_v)), with interleaved weights. Programs as in `encode`.

    STAGES tiles of weights are loaded ahead, and AHEAD tiles of neurons, which come from further away.
    """
    tiles = gl.cdiv(time, ROWS)
    row, sequence = gl.program_id(0) % tiles * ROWS, gl.program_id(0) // tiles * (2 * SEQUENCES)
    head = gl.program_id(1)
    weights = gl.allocate_shared_memory(gl.bfloat16, [STAGES, D, COLUMNS], encoder_v.layout)
    actives = gl.allocate_shared_memory(gl.bfloat16, [AHEAD, 2 * SEQUENCES, ROWS, COLUMNS], neurons.layout)
    bars = (_barriers(STAGES, 1), _barriers(STAGES, 2), _barriers(AHEAD, 1), _barriers(AHEAD, 2))
    shared, first = (weights, actives), head * batch + sequence
    inputs = (normed, gated, seed, threshold, scale, shared, bars, head, sequence, row, batch, time, N)
    loaded = (encoder_v, neurons, shared, bars, head, first, row, N)
    gl.warp_specialize(
        [
            (_gate_part, (inputs, 0, D, DROPS, SEQUENCES, ROWS, COLUMNS, STAGES, AHEAD)),
            (_gate_part, (inputs, 1, D, DROPS, SEQUENCES, ROWS, COLUMNS, STAGES, AHEAD)),
            (_gate_load, (loaded, D, COLUMNS, STAGES, AHEAD)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _gate_backward_load(inputs, D: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr):
    encoder, decoder, gated, shared, bars, head, first, row, N = inputs
    encoders, decoders, results = shared
    full, free, full_results, free_results = bars
    for i in range(N // COLUMNS):
        slot = _wait_free(free_results, i, AHEAD)
        bar = full_results.index(slot)
        mbarrier.expect(bar, results.numel // AHEAD * 2)
        tma.async_copy_global_to_shared(gated, [first, row, i * COLUMNS], bar, results.index(slot))
        slot = _wait_free(free, i, STAGES)
        bar = full.index(slot)
        mbarrier.expect(bar, 2 * D * COLUMNS * 2)
        tma.async_copy_global_to_shared(encoder, [head * D, i * COLUMNS], bar, encoders.index(slot))
        at = [head * (N // 32) + i * (COLUMNS // 32), 0, 0, 0, 0]
        tma.async_copy_global_to_shared(decoder, at, bar, decoders.index(slot))


@gluon.jit
def _gate_backward_part(
    inputs,
    PART: gl.constexpr,
    D: gl.constexpr,
    SEQUENCES: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
):
    x, to_y, to_gates, to_neurons, scale, shared, bars, head, sequence, row, batch, time, N = inputs
    encoders, decoders, results = shared
    full, free, full_results, free_results = bars
    sequence += PART * SEQUENCES
    tokens = _operand(x, sequence, row, batch, time, D, D, SEQUENCES, ROWS, COLUMNS)
    to_tokens = _operand(to_y, sequence, row, batch, time, D, D, SEQUENCES, ROWS, COLUMNS)
    places, inside = _places(sequence, row, batch, time, N, SEQUENCES, ROWS, COLUMNS)
    begin = ((head * batch + sequence).to(gl.int64) * time + row) * (N // 2)
    for i in range(N // COLUMNS):
        slot = _wait(full, i, STAGES)
        neurons = _begun(tokens, encoders.index(slot), COLUMNS)
        coming = _begun(to_tokens, decoders.index(slot).reshape([COLUMNS, D]).permute([1, 0]), COLUMNS)
        neurons, coming = warpgroup_mma_wait(1, deps=(neurons, coming))
        one, other = _ordered(neurons, SEQUENCES, ROWS, COLUMNS)
        # Rounded like those of `encode`, so that they are 0 in the same places.
        one, other = _unpacked(_packed_relu(one, other))
        result_slot = _wait(full_results, i, AHEAD)
        own = results.index(result_slot).slice(PART * SEQUENCES, SEQUENCES, 0)
        result, another = _loaded(own, SEQUENCES, ROWS, COLUMNS)
        _release(free_results.index(result_slot))
        product = _done(coming)
        _release(free.index(slot))
        at = begin + i * (COLUMNS // 2) + places
        first, second = _ordered(product, SEQUENCES, ROWS, COLUMNS)
        first, second = gl.where(result > 0.0, first, 0.0), gl.where(another > 0.0, second, 0.0)
        gl.store(to_gates + at, _packed(first * one * scale, second * other * scale), mask=inside)
        first, second = first * (result * _inverse(one)), second * (another * _inverse(other))
        gl.store(to_neurons + at, _packed(_marked(first, one), _marked(second, other)), mask=inside)


@gluon.jit(do_not_specialize=["batch", "time"])
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
    D: gl.constexpr,
    SEQUENCES: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """The gradients of gates and, through the gating, of neurons, which are computed again. Programs as in `encode`.

    Where a neuron is 0, its gradient is -0.0, so that `keys_backward` need not read neurons. `encoder` is interleaved;
    `decoder` comes as (heads · neurons / 32, 4, 4, 2, embd), in the order of interleaved columns. STAGES and AHEAD as
    in `gate`.
    """
    tiles = gl.cdiv(time, ROWS)
    row, sequence = gl.program_id(0) % tiles * ROWS, gl.program_id(0) // tiles * (2 * SEQUENCES)
    head = gl.program_id(1)
    encoders = gl.allocate_shared_memory(gl.bfloat16, [STAGES, D, COLUMNS], encoder.layout)
    decoders = gl.allocate_shared_memory(gl.bfloat16, [STAGES, COLUMNS // 32, 4, 4, 2, D], decoder.layout)
    results = gl.allocate_shared_memory(gl.bfloat16, [AHEAD, 2 * SEQUENCES, ROWS, COLUMNS], gated.layout)
    bars = (_barriers(STAGES, 1), _barriers(STAGES, 2), _barriers(AHEAD, 1), _barriers(AHEAD, 2))
    shared, first = (encoders, decoders, results), head * batch + sequence
    inputs = (x, to_y, to_gates, to_neurons, scale, shared, bars, head, sequence, row, batch, time, N)
    loaded = (encoder, decoder, gated, shared, bars, head, first, row, N)
    gl.warp_specialize(
        [
            (_gate_backward_part, (inputs, 0, D, SEQUENCES, ROWS, COLUMNS, STAGES, AHEAD)),
            (_gate_backward_part, (inputs, 1, D, SEQUENCES, ROWS, COLUMNS, STAGES, AHEAD)),
            (_gate_backward_load, (loaded, D, COLUMNS, STAGES, AHEAD)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _keys_load(inputs, DEPTH: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr):
    keys, to_neurons, cos, sin, shared, bars, sequence, row, N = inputs
    rights, parts, coss, sins = shared
    full, free, full_parts, free_parts = bars
    for i in range(N // COLUMNS + 1):  # the product after the last tile is begun and thrown away
        slot, column = _wait_free(free, i, STAGES), i * COLUMNS % N
        bar = full.index(slot)
        mbarrier.expect(bar, DEPTH * COLUMNS * 2)
        tma.async_copy_global_to_shared(keys, [sequence, 0, column], bar, rights.index(slot))
        if i < N // COLUMNS:  # nobody would wait for more, and no copy may arrive after the program has ended
            slot = _wait_free(free_parts, i, 2)
            bar = full_parts.index(slot)
            mbarrier.expect(bar, 4 * ROWS * COLUMNS * 2)
            tma.async_copy_global_to_shared(to_neurons, [sequence, row, column], bar, parts.index(slot))
            tma.async_copy_global_to_shared(cos, [row, column // 2], bar, coss.index(slot))
            tma.async_copy_global_to_shared(sin, [row, column // 2], bar, sins.index(slot))


@gluon.jit
def _keys_part(
    inputs,
    PART: gl.constexpr,
    DEPTH: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):
    scores, result, shared, bars, sequence, row, time, N = inputs
    rights, parts, coss, sins = shared
    full, free, full_parts, free_parts = bars
    PAIRS: gl.constexpr = _pair_layout(1, ROWS, COLUMNS)
    row += PART * ROWS
    own = _operand(scores, sequence, row, sequence + 1, time, time, DEPTH, 1, ROWS, COLUMNS)
    places, inside = _places(0, row, 1, time, N, 1, ROWS, COLUMNS)
    result += (sequence.to(gl.int64) * time + row) * (N // 2)
    coming = _begun(own, rights.index(_wait(full, 0, STAGES)).reshape([DEPTH, COLUMNS]), COLUMNS)
    for i in range(N // COLUMNS):
        first, second = gl.split(gl.reshape(_done(coming), [1, ROWS, COLUMNS // 2, 2]))
        _release(free.index(i % STAGES))
        # Packed before the next product begins, because there are registers for one product alone.
        to_keys = gl.convert_layout(_packed(first, second), PAIRS)
        coming = _begun(own, rights.index(_wait(full, i + 1, STAGES)).reshape([DEPTH, COLUMNS]), COLUMNS)
        first, second = _unpacked(to_keys)
        slot = _wait(full_parts, i, 2)
        c = _table(coss.index(slot).slice(PART * ROWS, ROWS, 0), 1, ROWS, COLUMNS)
        s = _table(sins.index(slot).slice(PART * ROWS, ROWS, 0), 1, ROWS, COLUMNS)
        one, other = _loaded(parts.index(slot).slice(PART * ROWS, ROWS, 1), 1, ROWS, COLUMNS)
        _release(free_parts.index(slot))
        first, second = first * c + second * s + one, second * c - first * s + other
        first, second = _where_active(first, one), _where_active(second, other)
        gl.store(result + i * (COLUMNS // 2) + places, _packed(first, second), mask=inside)
    _done(coming)


@gluon.jit(do_not_specialize=["eighths"])
def keys_backward(
    scores,
    keys,
    to_neurons,
    cos,
    sin,
    result,
    eighths,
    N,
    DEPTH: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """result = to_neurons + scores @ keys rotated back; 0 where to_neurons is the -0.0 that `gate_backward` leaves.

    Each of the two groups keeps ROWS rows of the scores of a sequence, up to DEPTH columns, while it goes through all
    neurons. Programs next to each other have other rows of the same sequence, and find its keys in the L2 cache.
    """
    time = eighths * 8  # so that rows of scores are known to begin at multiples of 16 bytes
    tiles = gl.cdiv(time, 2 * ROWS)
    row, sequence = gl.program_id(0) % tiles * (2 * ROWS), gl.program_id(0) // tiles
    rights = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, DEPTH, COLUMNS], keys.layout)
    parts = gl.allocate_shared_memory(gl.bfloat16, [2, 1, 2 * ROWS, COLUMNS], to_neurons.layout)
    coss = gl.allocate_shared_memory(gl.bfloat16, [2, 2 * ROWS, COLUMNS // 2], cos.layout)
    sins = gl.allocate_shared_memory(gl.bfloat16, [2, 2 * ROWS, COLUMNS // 2], cos.layout)
    bars = (_barriers(STAGES, 1), _barriers(STAGES, 2), _barriers(2, 1), _barriers(2, 2))
    shared = (rights, parts, coss, sins)
    inputs = (scores, result, shared, bars, sequence, row, time, N)
    loaded = (keys, to_neurons, cos, sin, shared, bars, sequence, row, N)
    gl.warp_specialize(
        [
            (_keys_part, (inputs, 0, DEPTH, ROWS, COLUMNS, STAGES)),
            (_keys_part, (inputs, 1, DEPTH, ROWS, COLUMNS, STAGES)),
            (_keys_load, (loaded, DEPTH, ROWS, COLUMNS, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )
