"""Reading one rank's part of each step, from a dataset with a length or from a stream."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import torch

from shoal.data.order import Key, samples_at, share
from shoal.data.stream import OrderedStream, ShardedStream
from shoal.errors import UserError
from shoal.seeding import mix

_LOOK_AHEAD = 4096  # the order is computed in blocks of this many samples, which makes it nearly free


@runtime_checkable
class MapDataset(Protocol):
    def __len__(self) -> int:
        """The number of samples."""

    def __getitem__(self, index: int) -> Any:
        """One sample."""


Dataset = MapDataset | OrderedStream | ShardedStream


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

    def part(self, position: int, step_size: int, batch_size: int) -> Part:
        """This rank's part of the step that starts at `position`."""

    def fetch(self, keys: list[Key]) -> list[Any]:
        """The samples."""


def open_reader(dataset: Dataset, start: int, seed: int, shuffle: bool, data_rank: int, data_size: int) -> Reader:
    if isinstance(dataset, MapDataset):
        return MapReader(dataset, seed, shuffle, data_rank, data_size)
    if isinstance(dataset, ShardedStream):
        return ShardedReader(dataset, data_rank, data_size)
    return OrderedReader(dataset, start, data_rank, data_size)


def _deal(step: list[Key], batch_size: int, data_size: int, data_rank: int) -> Part:
    slots = share(len(step), batch_size, data_size, data_rank)
    return Part(len(step), [step[slot.start : slot.stop] for slot in slots], step[:batch_size])


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
            self._order = samples_at(position, count, len(self._dataset), self._seed, self._shuffle)
            self._order_start, first = position, 0
        return _deal(self._order[first : first + step_size], batch_size, self._size, self._rank)

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


class OrderedReader:
    """Reads the whole slice of each step and keeps what this rank needs of it."""

    def __init__(self, stream: OrderedStream, start: int, data_rank: int, data_size: int):
        self._samples = stream.open(start)
        self._rank, self._size = data_rank, data_size
        self._kept: dict[int, Any] = {}

    def part(self, position: int, step_size: int, batch_size: int) -> Part:
        slots = share(step_size, batch_size, self._size, self._rank)
        wanted = set(range(batch_size)).union(*slots)  # the first ones in case a micro-batch has to be filled
        self._kept, end = {}, position
        for place, sample in enumerate(islice(self._samples, step_size)):
            if place in wanted:
                self._kept[end] = sample
            end += 1
        return _deal([(0, i) for i in range(position, end)], batch_size, self._size, self._rank)

    def fetch(self, keys: list[Key]) -> list[Any]:
        return [self._kept[i] for _, i in keys]


class ShardedReader:
    """Reads only the shards whose number is this rank modulo the number of ranks, each strictly forward."""

    def __init__(self, stream: ShardedStream, data_rank: int, data_size: int):
        shards = stream.num_shards
        if shards < 1 or shards % data_size:
            raise UserError(
                f"train_data: {shards} shards cannot be dealt equally to {data_size} data-parallel ranks "
                f"({shards} = {shards // data_size} × {data_size} + {shards % data_size}); "
                f"set num_shards to a multiple of {data_size}"
            )
        self._stream, self._rank, self._size = stream, data_rank, data_size
        self._open: dict[int, Iterator[Any]] = {}
        self._last: dict[int, tuple[int, Any]] = {}  # per shard: offset and value of the sample read last

    def part(self, position: int, step_size: int, batch_size: int) -> Part:
        first = position + (self._rank - position) % self._size  # shard % ranks is position % ranks
        keys = [(0, i) for i in range(first, position + step_size, self._size)]
        num_micro_batches = -(-step_size // (batch_size * self._size))
        starts = range(0, num_micro_batches * batch_size, batch_size)
        # An empty micro-batch repeats the last sample, or looks one ahead, since a shard is not read backwards.
        return Part(step_size, [keys[start : start + batch_size] for start in starts], keys[-1:] or [(0, first)])

    def fetch(self, keys: list[Key]) -> list[Any]:
        return [self._read(*divmod(position, self._stream.num_shards)) for _, position in keys]

    def _read(self, offset: int, shard: int) -> Any:
        if shard not in self._open:
            self._open[shard] = self._stream.open(shard, offset)
            self._last[shard] = (offset - 1, None)
        read, sample = self._last[shard]
        try:
            for _ in range(offset - read):
                sample = next(self._open[shard])
        except StopIteration:
            raise UserError(
                f"train_data: shard {shard} ended before item {offset}; a shard must start over at its end"
            ) from None
        self._last[shard] = (offset, sample)
        return sample
