import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config.batch import accumulation
from shoal.data.order import BatchSchedule, micro_batch_slices, permute, samples_at
from shoal.errors import UserError
from shoal.seeding import mix
from shoal.types import BatchPhase

schedules = st.builds(
    lambda epochs, sizes: BatchSchedule(
        tuple(BatchPhase(e, g, b) for e, (g, b) in zip(sorted({0, *epochs}), sizes, strict=False))
    ),
    st.sets(st.integers(1, 5), max_size=3),
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=4, max_size=4),
)


@given(size=st.integers(1, 3000), key=st.integers(0, 2**63 - 1))
def test_permute_is_a_bijection(size, key):
    assert sorted(permute(np.arange(size), size, key)) == list(range(size))


@given(size=st.integers(1, 2**40), key=st.integers(0, 2**63 - 1), data=st.data())
def test_permute_needs_no_table(size, key, data):
    indices = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True)))
    out = permute(indices, size, key)
    assert len(set(out.tolist())) == len(indices)
    assert out.min() >= 0
    assert out.max() < size
    assert [permute(indices[i : i + 1], size, key)[0] for i in range(len(indices))] == out.tolist()


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_small_permutations_are_equally_likely(size):
    keys = np.repeat(np.array([mix(k, "test") for k in range(12000)], np.uint64), size)
    drawn = permute(np.tile(np.arange(size), 12000), size, keys).reshape(-1, size)
    counts = Counter(map(tuple, drawn.tolist()))
    expected = 12000 / math.factorial(size)
    assert len(counts) == math.factorial(size)
    assert all(abs(count - expected) < 6 * math.sqrt(expected) for count in counts.values())


def test_large_permutations_look_random():
    size = 50_000
    out = permute(np.arange(size), size, mix(1, "test"))
    noise = 5 / math.sqrt(size)
    assert abs(np.corrcoef(out, np.arange(size))[0, 1]) < noise
    assert abs(np.corrcoef(out[1:], out[:-1])[0, 1]) < noise
    assert np.abs(np.bincount(out[: size // 2] % 16) - size / 32).max() < 6 * math.sqrt(size / 32)
    assert (out == permute(np.arange(size), size, mix(2, "test"))).mean() < 0.001


@given(
    epoch_size=st.integers(1, 50), position=st.integers(0, 300), count=st.integers(0, 200), seed=st.integers(0, 2**40)
)
def test_samples_at_returns_a_slice_of_the_concatenated_epochs(epoch_size, position, count, seed):
    num_epochs = (position + count) // epoch_size + 1
    sequence = [
        (e, int(i))
        for e in range(num_epochs)
        for i in permute(np.arange(epoch_size), epoch_size, mix(seed, "order", e))
    ]
    assert samples_at(position, count, epoch_size, seed, shuffle=True) == sequence[position : position + count]
    unshuffled = samples_at(position, count, epoch_size, seed, shuffle=False)
    assert unshuffled == [divmod(p, epoch_size) for p in range(position, position + count)]
    assert samples_at(position, count, None, seed, shuffle=True) == [(0, position + i) for i in range(count)]


def test_epochs_and_seeds_differ():
    first, second, other_seed = (
        [i for _, i in samples_at(position, 100, 100, seed, True)] for position, seed in ((0, 7), (100, 7), (0, 8))
    )
    assert first != second
    assert first != other_seed


@given(
    batches=schedules,
    epoch_size=st.none() | st.integers(1, 60),
    start=st.integers(0, 300),
    length=st.integers(0, 300),
)
def test_steps_between_agrees_with_stepping(batches, epoch_size, start, length):
    end, position, steps = start + length, start, 0
    while position < end:
        size = batches.step_size(position, epoch_size, end)
        epoch = position // epoch_size if epoch_size else 0
        phase = [phase for phase in batches.phases if phase.first_epoch <= epoch][-1]
        wanted, left = phase.global_batch_size, end - position
        assert size == min(wanted, left) or left == wanted + 1
        assert size > 1 or 1 in (left, phase.batch_size, wanted) or steps_before_a_small_phase(batches)
        position, steps = position + size, steps + 1
    assert position == max(start, end)
    assert batches.steps_between(start, end, epoch_size) == steps


def steps_before_a_small_phase(batches):
    return any(1 in (phase.batch_size, phase.global_batch_size) for phase in batches.phases)


def sizes_until(end, global_batch_size, batch_size=2):
    batches, position, sizes = BatchSchedule.constant(global_batch_size, batch_size), 0, []
    while position < end:
        sizes.append(batches.step_size(position, None, end))
        position += sizes[-1]
    assert batches.steps_between(0, end, None) == len(sizes)
    return sizes


def test_the_last_step_of_a_run_never_has_a_single_sample():
    assert sizes_until(25, 8) == [8, 8, 7, 2]
    assert sizes_until(9, 8) == [7, 2]
    assert sizes_until(5, 2) == [2, 3]
    assert sizes_until(24, 8) == [8, 8, 8]
    assert sizes_until(1, 8) == [1]
    assert sizes_until(25, 8, batch_size=1) == [8, 8, 8, 1]  # every micro-batch has a single one


@given(batches=schedules, epoch_size=st.none() | st.integers(1, 60), start=st.integers(0, 99), left=st.integers(0, 300))
def test_full_steps_end_where_the_last_one_of_the_global_batch_does(batches, epoch_size, start, left):
    position = start
    while (size := batches.step_size(position, epoch_size)) <= start + left - position:
        position += size
    assert batches.end_of_full_steps(start, start + left, epoch_size) == position


def test_steps_between_does_not_count_one_by_one():
    batches = BatchSchedule((BatchPhase(0, 1, 1), BatchPhase(10**6, 2, 1)))
    assert batches.steps_between(0, 3 * 10**15, 10**9) == 10**15 + 10**15


def test_a_step_that_begins_before_a_phase_keeps_its_size():
    batches = BatchSchedule((BatchPhase(0, 8, 2), BatchPhase(1, 4, 2)))
    assert [batches.step_size(p, 10) for p in (0, 8, 16)] == [8, 8, 4]


@pytest.mark.parametrize("epochs", [[], [1], [0, 0], [0, 5, 2]])
def test_bad_schedules_are_refused(epochs):
    with pytest.raises(UserError, match=r"training.gradient_accumulation: .* must start at 0 and increase"):
        BatchSchedule(tuple(BatchPhase(e, 4, 2) for e in epochs))
    with pytest.raises(UserError, match=r"at least 1"):
        BatchSchedule.constant(4, 0)


@given(step=st.integers(0, 200), batch=st.integers(1, 20), ranks=st.integers(1, 9))
def test_ranks_split_a_step_without_gap_or_overlap(step, batch, ranks):
    slices_by_rank = [micro_batch_slices(step, batch, ranks, rank) for rank in range(ranks)]
    (number,) = {len(slices) for slices in slices_by_rank}
    assert number == accumulation(BatchPhase(0, step, batch), ranks)
    assert math.ceil(step / (batch * ranks)) - number in ((0, 1) if batch == 2 else (0,))
    offsets = [offset for slices in zip(*slices_by_rank, strict=True) for one in slices for offset in one]
    assert offsets == list(range(step))
    sizes = [len(one) for slices in zip(*slices_by_rank, strict=True) for one in slices]
    assert max(sizes, default=0) <= batch or (batch, max(sizes)) == (2, 3)
    assert 1 not in sizes or 1 in (step, batch)
    assert sum(size not in (0, batch) for size in sizes) <= 2
