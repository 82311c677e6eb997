"""The global order of samples: pure functions of (seed, epoch), so that nothing has to be stored or communicated.

Training reads one endless sequence of samples: the epochs, one after another. A step takes the next slice of this
sequence, and the ranks split that slice into micro-batches. To resume, the number of samples consumed is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

import numpy as np
from numpy.typing import NDArray

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
        """Returns the number of samples in the step that starts at `position`. Only the last step of a run is shorter
        than the global batch: it stops at `end`."""
        size = self.phase_at(position, epoch_size).global_batch_size
        return size if end is None else min(size, end - position)

    def steps_between(self, start: int, end: int, epoch_size: int | None) -> int:
        """Returns how many steps cover the samples [start, end), without going through them one by one."""
        steps, position = 0, start
        next_phase_starts = [phase.first_epoch * epoch_size for phase in self.phases[1:]] if epoch_size else []
        for phase, phase_end in zip(self.phases, [*next_phase_starts, end], strict=False):
            steps_in_phase = -(-max(0, min(phase_end, end) - position) // phase.global_batch_size)
            steps, position = steps + steps_in_phase, position + steps_in_phase * phase.global_batch_size
        return steps


def micro_batch_slices(step_size: int, batch_size: int, data_size: int, data_rank: int) -> list[range]:
    """Returns which samples of a step, counted from its first one, go into each micro-batch of one rank.

    The step is split into runs of `batch_size`: micro-batch 0 of every rank, then micro-batch 1 of every rank, and so
    on. All ranks get the same number of micro-batches, because they run collectives together; the last one may be short
    or empty.
    """
    starts = range(data_rank * batch_size, step_size + data_rank * batch_size, batch_size * data_size)
    return [range(min(start, step_size), min(start + batch_size, step_size)) for start in starts]
