"""Reading one rank's part of each step from a dataset with a length. `stream.py` has those without."""

from __future__ import annotations

import random
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import torch

from shoal.data.order import samples_at, share
from shoal.seeding import mix

Key = tuple[int, int]
"""Which sample: (epoch, id)."""

_LOOK_AHEAD = 4096  # the order is computed in blocks of this many samples, which makes it nearly free


class Part(NamedTuple):
    """What one rank takes of a step."""

    step_size: int
    """The samples of all ranks; smaller than asked for only where a stream ends."""
    micro_batches: list[list[Key]]
    """As many on every rank; the last may be short or empty."""
    spare: list[Key]
    """What to put into an empty one."""


class Reader(Protocol):
    """What the loader needs of a source of samples. Steps are asked for in order and read in order."""

    def part(self, position: int, step_size: int, batch_size: int) -> Part: ...

    def fetch(self, keys: list[Key]) -> list[Any]: ...


@runtime_checkable
class MapDataset(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class MapReader:
    """Reads a dataset by index, each sample under random generators that follow from (seed, epoch, id).

    Seeding costs microseconds per sample, so it stops if the first micro-batch drew no random numbers.
    """

    def __init__(self, dataset: MapDataset, seed: int, shuffle: bool, data_rank: int, data_size: int):
        self._dataset, self._seed, self._shuffle = dataset, seed, shuffle
        self._rank, self._size = data_rank, data_size
        self._order: list[Key] = []
        self._order_start = 0
        self._draws: bool | None = None  # unknown until the first fetch

    def part(self, position: int, step_size: int, batch_size: int) -> Part:
        first = position - self._order_start
        if not 0 <= first <= first + step_size <= len(self._order):
            count = max(step_size, _LOOK_AHEAD)
            epochs, ids = samples_at(position, count, len(self._dataset), self._seed, self._shuffle)
            self._order, self._order_start, first = list(zip(epochs.tolist(), ids.tolist(), strict=True)), position, 0
        line = self._order[first : first + step_size]
        slots = share(step_size, batch_size, self._size, self._rank)
        return Part(step_size, [line[slot.start : slot.stop] for slot in slots], line[:batch_size])

    def fetch(self, keys: list[Key]) -> list[Any]:
        if self._draws is False:
            return [self._dataset[i] for _, i in keys]
        python_state, numpy_state = random.getstate(), np.random.get_state()
        samples, draws = [], bool(self._draws)
        for epoch, i in keys:
            _seed_generators(mix(self._seed, "sample", epoch, i))
            before = None if draws else _generator_states()
            samples.append(self._dataset[i])
            draws = draws or before != _generator_states()
        self._draws = draws
        random.setstate(python_state)  # torch's is not put back: training seeds it before each micro-batch
        np.random.set_state(numpy_state)
        return samples


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


def _generator_states() -> tuple[Any, ...]:
    _, words, *rest = cast(tuple[Any, ...], np.random.get_state())
    return random.getstate(), words.tobytes(), rest, torch.get_rng_state().numpy().tobytes()
