"""Reads one rank's samples of each step, from a dataset with a length or from a stream."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable

from shoal.config.batch import run_start
from shoal.data.order import SampleKey, micro_batch_slices, samples_at
from shoal.data.stream import OrderedStream, ShardedStream
from shoal.errors import UserError
from shoal.seeding import mix, mix_after, seed_generators

_ORDER_BLOCK = 4096  # computing the order of this many samples at once makes its cost per sample negligible


@runtime_checkable
class MapDataset(Protocol):
    """A dataset with a length whose samples are read by index."""

    def __len__(self) -> int:
        """Returns the number of samples."""

    def __getitem__(self, index: int) -> Any:
        """Returns one sample."""


Dataset = MapDataset | OrderedStream | ShardedStream


class RankStep(NamedTuple):
    """One rank's samples of a step."""

    step_size: int
    """The number of samples of all ranks; smaller than the requested size only where a stream ends."""
    micro_batches: list[list[SampleKey]]
    """Every rank has the same number of micro-batches; the last one may be short or empty."""
    filler: list[SampleKey]
    """Samples to repeat in an empty micro-batch."""


class Reader(Protocol):
    """What the loader needs from a source of samples. It plans the steps in order and fetches them in order.

    Random numbers that a sample draws from the global generators depend on (seed, epoch, id) alone, for every sample: a
    dataset may draw for some samples only.
    """

    seeds_samples: bool
    """True if generators are seeded for each sample. If it is False, micro-batches can be fetched again."""

    def plan_step(self, position: int, step_size: int, batch_size: int) -> RankStep:
        """Returns this rank's samples of the step that starts at `position`."""

    def fetch(self, keys: list[SampleKey]) -> list[Any]:
        """Returns the samples with these keys, which must belong to the step that was planned last."""


def open_reader(dataset: Dataset, start: int, seed: int, shuffle: bool, data_rank: int, data_size: int) -> Reader:
    """Returns the reader for this kind of dataset, at global position `start`."""
    if isinstance(dataset, MapDataset):
        return MapReader(dataset, seed, shuffle, data_rank, data_size)
    if isinstance(dataset, ShardedStream):
        return ShardedReader(dataset, seed, data_rank, data_size)
    return OrderedReader(dataset, start, seed, data_rank, data_size)


def _split_step(keys: list[SampleKey], batch_size: int, data_size: int, data_rank: int) -> RankStep:
    slices = micro_batch_slices(len(keys), batch_size, data_size, data_rank)
    return RankStep(len(keys), [keys[one.start : one.stop] for one in slices], keys[:batch_size])


class MapReader:
    """Reads a dataset by index. Seeds generators for samples once `seeds_samples` is set."""

    seeds_samples = False

    def __init__(self, dataset: MapDataset, seed: int, shuffle: bool, data_rank: int, data_size: int):
        self._dataset, self._seed, self._shuffle = dataset, seed, shuffle
        self._rank, self._size = data_rank, data_size
        self._order: list[SampleKey] = []
        self._order_start = 0
        self._seed_of = mix_after(seed, "sample")

    def plan_step(self, position: int, step_size: int, batch_size: int) -> RankStep:
        first = position - self._order_start
        if not 0 <= first <= first + step_size <= len(self._order):
            count = max(step_size, _ORDER_BLOCK)
            self._order = samples_at(position, count, len(self._dataset), self._seed, self._shuffle)
            self._order_start, first = position, 0
        return _split_step(self._order[first : first + step_size], batch_size, self._size, self._rank)

    def fetch(self, keys: list[SampleKey]) -> list[Any]:
        if not self.seeds_samples:
            return [self._dataset[i] for _, i in keys]
        samples = []
        for epoch, i in keys:
            seed_generators(self._seed_of(epoch, i))
            samples.append(self._dataset[i])
        return samples


class OrderedReader:
    """Reads all samples of each step and keeps those that this rank needs."""

    seeds_samples = True

    def __init__(self, stream: OrderedStream, start: int, seed: int, data_rank: int, data_size: int):
        seed_generators(mix(seed, "open"))
        self._samples = stream.open(start)
        self._rank, self._size = data_rank, data_size
        self._seed_of = mix_after(seed, "sample", 0)
        self._sample_at: dict[int, Any] = {}  # by position

    def plan_step(self, position: int, step_size: int, batch_size: int) -> RankStep:
        slices = micro_batch_slices(step_size, batch_size, self._size, self._rank)
        # The first batch_size samples are the filler. If the stream ends, runs may begin and end one sample earlier or
        # later.
        needed = set(range(batch_size)).union(*(range(one.start - 1, one.stop + 1) for one in slices))
        self._sample_at, end = {}, position
        for offset in range(step_size):
            # Also for samples that other ranks take: a stream that shuffles must give all ranks the same order.
            seed_generators(self._seed_of(end))
            try:
                sample = next(self._samples)
            except StopIteration:
                break
            if offset in needed:
                self._sample_at[end] = sample
            end += 1
        return _split_step([(0, i) for i in range(position, end)], batch_size, self._size, self._rank)

    def fetch(self, keys: list[SampleKey]) -> list[Any]:
        return [self._sample_at[i] for _, i in keys]


class ShardedReader:
    """Reads only the shards whose number modulo the number of ranks is this rank, each strictly forward."""

    seeds_samples = True

    def __init__(self, stream: ShardedStream, seed: int, data_rank: int, data_size: int):
        shards = stream.num_shards
        if shards < 1 or shards % data_size:
            raise UserError(
                f"train_data: its {shards} shards cannot be divided equally among {data_size} data-parallel ranks "
                f"({shards} = {shards // data_size} × {data_size} + {shards % data_size}); "
                f"set num_shards to a multiple of {data_size}"
            )
        self._stream, self._rank, self._size = stream, data_rank, data_size
        self._seed, self._seed_of = seed, mix_after(seed, "sample", 0)
        self._iterators: dict[int, Iterator[Any]] = {}  # by shard
        self._last_read: dict[int, tuple[int, Any]] = {}  # by shard: the offset of the last sample, and the sample

    def plan_step(self, position: int, step_size: int, batch_size: int) -> RankStep:
        # num_shards is a multiple of the ranks, so a sample's shard belongs to rank position % ranks.
        first = position + (self._rank - position) % self._size
        keys = [(0, i) for i in range(first, position + step_size, self._size)]
        starts = [
            run_start(run, len(keys), batch_size) for run in range(-(-step_size // (batch_size * self._size)) + 1)
        ]
        # The filler is the last sample, or else the next one, because a shard is never read backwards.
        filler = keys[-1:] or [(0, first)]
        return RankStep(step_size, [keys[start:end] for start, end in pairwise(starts)], filler)

    def fetch(self, keys: list[SampleKey]) -> list[Any]:
        return [self._read(*divmod(position, self._stream.num_shards)) for _, position in keys]

    def _read(self, offset: int, shard: int) -> Any:
        if shard not in self._iterators:
            seed_generators(mix(self._seed, "open", shard))
            self._iterators[shard] = self._stream.open(shard, offset)
            self._last_read[shard] = (offset - 1, None)
        last_offset, sample = self._last_read[shard]
        try:
            for item in range(last_offset + 1, offset + 1):
                seed_generators(self._seed_of(item * self._stream.num_shards + shard))
                sample = next(self._iterators[shard])
        except StopIteration:
            raise UserError(
                f"train_data: shard {shard} ended before its item {offset}; a shard must be endless, so start over at "
                "its end"
            ) from None
        self._last_read[shard] = (offset, sample)
        return sample
