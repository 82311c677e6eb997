"""Datasets without a length: what a stream has to offer, and how a rank reads its part of one.

A stream's position is one count of samples over all ranks, as with any dataset, so it can be resumed on another
number of ranks. Its epoch is always 0, a sample's id is its global position, and shuffling is its own affair.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from shoal.data.order import share
from shoal.data.reader import Key, Part
from shoal.errors import UserError


@runtime_checkable
class OrderedStream(Protocol):
    """One global order that every rank reads in full, keeping its own. It may end, and then the run does too."""

    def open(self, start: int) -> Iterator[Any]:
        """The samples from global position `start` on."""


@runtime_checkable
class ShardedStream(Protocol):
    """Endless shards dealt out in turn: global position p is item p // num_shards of shard p % num_shards.

    A rank opens only its own shards, so `num_shards` has to be a multiple of the data-parallel size.
    """

    num_shards: int

    def open(self, shard: int, offset: int) -> Iterator[Any]:
        """The samples of one shard from its item `offset` on, without end."""


class OrderedReader:
    """Reads the whole slice of each step and keeps what this rank needs of it."""

    def __init__(self, stream: OrderedStream, start: int, data_rank: int, data_size: int):
        self._samples = stream.open(start)
        self._rank, self._size = data_rank, data_size
        self._kept: dict[int, Any] = {}

    def part(self, position: int, step_size: int, batch_size: int) -> Part:
        slots = share(step_size, batch_size, self._size, self._rank)
        wanted = set(range(batch_size)).union(*slots)  # the first ones in case a micro-batch has to be filled
        self._kept, found = {}, 0
        for place, sample in enumerate(islice(self._samples, step_size)):
            found = place + 1
            if place in wanted:
                self._kept[position + place] = sample
        slots = share(found, batch_size, self._size, self._rank)
        keys = [[(0, position + place) for place in slot] for slot in slots]
        return Part(found, keys, [(0, position + place) for place in range(min(found, batch_size))])

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
        end = position + step_size
        first = position + (self._rank - position) % self._size  # shard % ranks is position % ranks
        keys = [(0, i) for i in range(first, end, self._size)]
        per_micro_step = batch_size * self._size
        starts = range(0, -(-step_size // per_micro_step) * batch_size, batch_size)
        # An empty micro-batch repeats the last sample, or looks one ahead, since a shard is not read backwards.
        return Part(step_size, [keys[start : start + batch_size] for start in starts], keys[-1:] or [(0, first)])

    def fetch(self, keys: list[Key]) -> list[Any]:
        return [self._read(*divmod(position, self._stream.num_shards)) for _, position in keys]

    def _read(self, offset: int, shard: int) -> Any:
        if shard not in self._open:
            self._open[shard] = self._stream.open(shard, offset)
            self._last[shard] = (offset - 1, None)
        read, sample = self._last[shard]
        for _ in range(offset - read):
            try:
                sample = next(self._open[shard])
            except StopIteration:
                raise UserError(
                    f"train_data: shard {shard} ended before item {offset}; a shard must start over at its end"
                ) from None
        self._last[shard] = (offset, sample)
        return sample
