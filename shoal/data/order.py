"""The global order of samples: pure functions of (seed, epoch), so that nothing has to be stored or communicated.

Training reads one endless sequence of samples: the epochs, one after another. A step takes the next slice of this
sequence, and the ranks split that slice into micro-batches. To resume, the number of samples consumed is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from shoal.config.batch import num_runs, run_start
from shoal.errors import UserError
from shoal.seeding import mix
from shoal.types import BatchPhase

IntArray = NDArray[np.int64]
SampleKey = tuple[int, int]
"""Identifies a sample of a run: (epoch, id)."""

_ROUNDS = 12  # with 8 rounds, the permutations of five elements are visibly not equally likely


def permute(indices: IntArray, size: int, key: int | NDArray[np.uint64]) -> IntArray:
    """Returns where a pseudo-random permutation of `range(size)` sends `indices`; `key` may differ per index.

    This is a Feistel network over pairs (left, right) from a grid of rows × columns that just covers `size`. Every
    round adds a hash of one half to the other half, which can be undone, so the network is a bijection of the grid. An
    index that lands outside `range(size)` goes through the network again until it lands inside ("cycle walking"), which
    makes it a bijection of the range.
    """
    rows = np.uint64(isqrt(size - 1) + 1)
    columns = np.uint64(-(-size // int(rows)))
    keys = np.broadcast_to(np.asarray(key, np.uint64), indices.shape)

    def network(numbers: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = np.divmod(numbers, columns)
        for number in range(0, _ROUNDS, 2):
            left = (left + _hash(right, keys, number)) % rows
            right = (right + _hash(left, keys, number + 1)) % columns
        return left * columns + right

    permuted = network(indices.astype(np.uint64), keys)
    while (outside := np.flatnonzero(permuted >= size)).size:
        permuted[outside] = network(permuted[outside], keys[outside])
    return permuted.astype(np.int64)


def _hash(values: NDArray[np.uint64], keys: NDArray[np.uint64], number: int) -> NDArray[np.uint64]:
    """Returns splitmix64 of (value, key, round number), shifted right by one so that adding to it cannot overflow."""
    state = (values + np.uint64(number << 32)) * np.uint64(0x9E3779B97F4A7C15) + keys
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31))) >> np.uint64(1)


def samples_at(position: int, count: int, epoch_size: int | None, seed: int, shuffle: bool) -> list[SampleKey]:
    """Returns the keys of `count` samples from `position` on, across as many epoch ends as needed.

    A stream has no epoch size: all its samples are in epoch 0, and a sample's id is its position.
    """
    if epoch_size is None:
        return [(0, i) for i in range(position, position + count)]
    epochs, ids = np.divmod(np.arange(position, position + count), epoch_size)
    if shuffle and count:
        first, last = int(epochs[0]), int(epochs[-1])
        keys = np.array([mix(seed, "order", epoch) for epoch in range(first, last + 1)], np.uint64)
        ids = permute(ids, epoch_size, keys[epochs - first])
    return list(zip(epochs.tolist(), ids.tolist(), strict=True))


@dataclass(frozen=True)
class BatchSchedule:
    """The batch sizes of a run, by epoch. A step belongs to the epoch of its first sample; a stream is always in epoch
    0."""

    phases: tuple[BatchPhase, ...]

    def __post_init__(self) -> None:
        first_epochs = [phase.first_epoch for phase in self.phases]
        if first_epochs[:1] != [0] or first_epochs != sorted(set(first_epochs)):
            raise UserError(
                f"training.gradient_accumulation: its epochs are {first_epochs}; they must start at 0 and increase, "
                "such as {0: 8, 5: 4}"
            )
        for phase in self.phases:
            if min(phase.global_batch_size, phase.batch_size) < 1:
                raise UserError(f"training.global_batch_size: batch sizes must be at least 1, not {phase}")

    @classmethod
    def constant(cls, global_batch_size: int, batch_size: int) -> BatchSchedule:
        """Returns a schedule with the same batch sizes in all epochs."""
        return cls((BatchPhase(0, global_batch_size, batch_size),))

    def phase_at(self, position: int, epoch_size: int | None) -> BatchPhase:
        """Returns the batch sizes of the step that starts at `position`."""
        if len(self.phases) == 1:
            return self.phases[0]
        epoch = position // epoch_size if epoch_size else 0
        return next(phase for phase in reversed(self.phases) if phase.first_epoch <= epoch)

    def step_size(self, position: int, epoch_size: int | None, end: int | None = None) -> int:
        """Returns the number of samples in the step that starts at `position`.

        Only at `end`, the end of the run, a step is not as large as the global batch: the last one has what is left. If
        that were a single sample, which a model with BatchNorm cannot train on, it gets another one from the step
        before; for a global batch of 2 it joins that step.
        """
        phase = self.phase_at(position, epoch_size)
        size = phase.global_batch_size
        if end is None:
            return size
        if end - position == size + 1 and self._is_too_small(position + size, epoch_size, phase):
            return size - 1 if size > 2 else size + 1
        return min(size, end - position)

    def _is_too_small(self, last: int, epoch_size: int | None, before: BatchPhase) -> bool:
        """Returns whether the single sample at `last` should not be a step, when `before` is the phase of the step
        before it. Where micro-batches have one sample anyway, it may be."""
        phase = self.phase_at(last, epoch_size)
        return min(phase.batch_size, phase.global_batch_size, before.batch_size, before.global_batch_size) > 1

    def steps_between(self, start: int, end: int, epoch_size: int | None) -> int:
        """Returns how many steps cover the samples [start, end), without going through them one by one."""
        steps, full_end, phase = self._full_steps(start, end, epoch_size)
        if full_end == end:
            return steps
        joins = end - full_end == 1 and phase is not None and phase.global_batch_size == 2
        return steps if joins and phase and self._is_too_small(full_end, epoch_size, phase) else steps + 1

    def end_of_full_steps(self, start: int, end: int, epoch_size: int | None) -> int:
        """Returns where the last step ends that is as large as the global batch, for `dataset.drop_last`."""
        _, full_end, _ = self._full_steps(start, end, epoch_size)
        return full_end

    def _full_steps(self, start: int, end: int, epoch_size: int | None) -> tuple[int, int, BatchPhase | None]:
        """Returns how many whole steps fit into [start, end), where they end, and the phase of the last one."""
        steps, position, last = 0, start, None
        next_phase_starts = [phase.first_epoch * epoch_size for phase in self.phases[1:]] if epoch_size else []
        for phase, phase_end in zip(self.phases, [*next_phase_starts, end], strict=False):
            size = phase.global_batch_size
            begun = -(-max(0, min(phase_end, end) - position) // size)
            full = min(begun, (end - position) // size)
            steps, position, last = steps + full, position + full * size, phase if full else last
            if full < begun:
                break
        return steps, position, last


@lru_cache(maxsize=8)
def micro_batch_slices(step_size: int, batch_size: int, data_size: int, data_rank: int) -> tuple[range, ...]:
    """Returns which samples of a step, counted from its first one, go into each micro-batch of one rank.

    The step is split into runs of `batch_size`: micro-batch 0 of every rank, then micro-batch 1 of every rank, and so
    on. All ranks get the same number of micro-batches, because they run collectives together; the last one may be short
    or empty. Most steps have the same size, so the answer is kept.
    """
    number = -(-num_runs(step_size, batch_size) // data_size)

    def start(run: int) -> int:
        return run_start(run, step_size, batch_size)

    runs = range(data_rank, data_rank + number * data_size, data_size)
    return tuple(range(start(run), start(run + 1)) for run in runs)
