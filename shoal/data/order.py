"""The global order of samples: pure functions of (seed, epoch), so that nothing is stored or communicated.

Training reads one endless line of samples, the epochs laid end to end. A step takes the next slice of it, and
ranks and micro-batches share the slice, so the number of samples consumed is all there is to resume from.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UserError
from shoal.seeding import mix
from shoal.types import BatchPhase

Ints = NDArray[np.int64]
Key = tuple[int, int]
"""Which sample: (epoch, id)."""

_ROUNDS = 12  # with 8, the permutations of five things are visibly not equally likely


def permute(indices: Ints, size: int, key: int | NDArray[np.uint64]) -> Ints:
    """Where a pseudo-random permutation of `range(size)` sends `indices`; `key` may differ per index.

    A Feistel network over pairs (left, right) from a grid of rows × columns that just covers `size`: every round adds
    a hash of one half to the other, which can be undone, so the whole is a bijection of the grid. What lands outside
    `range(size)` walks on along its cycle until it is back inside, which is a bijection of the range.
    """
    rows = np.uint64(isqrt(size - 1) + 1)
    columns = np.uint64(-(-size // int(rows)))
    keys = np.broadcast_to(np.asarray(key, np.uint64), indices.shape)

    def network(numbers: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = np.divmod(numbers, columns)
        for turn in range(0, _ROUNDS, 2):
            left = (left + _hash(right, keys, turn)) % rows
            right = (right + _hash(left, keys, turn + 1)) % columns
        return left * columns + right

    out = network(indices.astype(np.uint64), keys)
    while (outside := np.flatnonzero(out >= size)).size:
        out[outside] = network(out[outside], keys[outside])
    return out.astype(np.int64)


def _hash(values: NDArray[np.uint64], keys: NDArray[np.uint64], turn: int) -> NDArray[np.uint64]:
    """splitmix64 of (value, key, turn), halved so that adding to it cannot overflow."""
    state = (values + np.uint64(turn << 32)) * np.uint64(0x9E3779B97F4A7C15) + keys
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31))) >> np.uint64(1)


def samples_at(position: int, count: int, epoch_size: int | None, seed: int, shuffle: bool) -> list[Key]:
    """The `count` samples from `position` on, across as many epoch ends as it takes.

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
    """Batch sizes by epoch. A step belongs to the epoch of its first sample; a stream stays in epoch 0."""

    phases: tuple[BatchPhase, ...]

    def __post_init__(self) -> None:
        starts = [phase.first_epoch for phase in self.phases]
        if starts[:1] != [0] or starts != sorted(set(starts)):
            raise UserError(f"training.gradient_accumulation: epochs {starts} must rise from 0, such as {{0: 8, 5: 4}}")
        for phase in self.phases:
            if min(phase.global_batch_size, phase.batch_size) < 1:
                raise UserError(f"training.global_batch_size: batch sizes must be at least 1, not {phase}")

    @classmethod
    def constant(cls, global_batch_size: int, batch_size: int) -> BatchSchedule:
        return cls((BatchPhase(0, global_batch_size, batch_size),))

    def at(self, position: int, epoch_size: int | None) -> BatchPhase:
        epoch = position // epoch_size if epoch_size else 0
        return next(phase for phase in reversed(self.phases) if phase.first_epoch <= epoch)

    def step_size(self, position: int, epoch_size: int | None, end: int | None = None) -> int:
        """The samples in the step that starts at `position`; only the run's last step is cut, at `end`."""
        size = self.at(position, epoch_size).global_batch_size
        return size if end is None else min(size, end - position)

    def steps_between(self, start: int, end: int, epoch_size: int | None) -> int:
        """How many steps cover the samples [start, end)."""
        steps, position = 0, start
        following = [phase.first_epoch * epoch_size for phase in self.phases[1:]] if epoch_size else []
        for phase, phase_end in zip(self.phases, [*following, end], strict=False):
            here = -(-max(0, min(phase_end, end) - position) // phase.global_batch_size)
            steps, position = steps + here, position + here * phase.global_batch_size
        return steps


def share(step_size: int, batch_size: int, data_size: int, data_rank: int) -> list[range]:
    """The positions inside a step's slice that each micro-batch of one rank takes.

    The slice is dealt in runs of `batch_size`: micro-batch 0 of every rank, then micro-batch 1 of every rank, and so
    on. All ranks get the same number of micro-batches, so they stay in step; the last may be short or empty.
    """
    starts = range(data_rank * batch_size, step_size + data_rank * batch_size, batch_size * data_size)
    return [range(min(start, step_size), min(start + batch_size, step_size)) for start in starts]
