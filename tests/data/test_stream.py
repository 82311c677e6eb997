import random
from itertools import count, islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import BatchSchedule, Loader
from shoal.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Ordered:
    def __init__(self, length=None):
        self.length = length

    def open(self, start):
        return iter(range(start, self.length)) if self.length is not None else count(start)


class Noisy:
    """Draws for some of its samples, from the global generators."""

    def open(self, start):
        for position in count(start):
            noise = (random.random(), np.random.rand(), torch.rand(1).item()) if position > 10 else None
            yield position, noise


class NoisyShards:
    num_shards = 4

    def open(self, shard, offset):
        for item in count(offset):
            yield shard, item, random.random(), np.random.rand(), torch.rand(1).item()


class Sharded:
    def __init__(self, num_shards, shard_length=None):
        self.num_shards, self.shard_length, self.opened = num_shards, shard_length, []

    def open(self, shard, offset):
        self.opened.append(shard)
        items = ((shard, item) for item in count(offset))
        return items if self.shard_length is None else islice(items, self.shard_length - offset)


def as_is(samples):
    return samples


def samples_of(ranks):
    """Returns (id, data) of the samples of one step, without fillers, in order of id."""
    assert len({len(step) for step in ranks}) == 1
    return sorted(
        pair for step in ranks for micro in step if micro.weight for pair in zip(micro.ids, micro.data, strict=True)
    )


segments = st.lists(
    st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 5), st.integers(1, 30), st.integers(0, 4)),
    min_size=1,
    max_size=4,
)


@settings(deadline=None)
@given(segments=segments, length=st.none() | st.integers(0, 120), sharded=st.booleans())
def test_streams_keep_their_order_when_ranks_and_batches_change(segments, length, sharded):
    position, received = 0, []
    for ranks, batch_size, global_batch_size, num_steps in segments:
        batches = BatchSchedule.constant(global_batch_size, batch_size)
        streams = [Sharded(12) if sharded else Ordered(length) for _ in range(ranks)]
        loaders = [
            Loader(stream, as_is, batches, seed=0, data_rank=r, data_size=ranks, position=position)
            for r, stream in enumerate(streams)
        ]
        for steps in islice(zip(*loaders, strict=True), num_steps):
            received += samples_of(steps)
            assert all(m.weight or len(m.data) == batch_size for step in steps for m in step)
        position = loaders[0].position
        if sharded:
            assert all({s % ranks for s in stream.opened} <= {r} for r, stream in enumerate(streams))
            assert all(len(stream.opened) == len(set(stream.opened)) for stream in streams)
    if sharded:
        assert received == [(p, (p % 12, p // 12)) for p in range(position)]
    else:
        assert received == [(p, p) for p in range(position)]


def test_when_a_stream_ends_the_last_step_is_short_and_the_loader_stops():
    ranks = [
        list(Loader(Ordered(21), as_is, BatchSchedule.constant(8, 2), seed=0, data_rank=r, data_size=2))
        for r in range(2)
    ]
    assert [len(steps) for steps in ranks] == [3, 3]
    assert [len(samples_of(steps)) for steps in zip(*ranks, strict=True)] == [8, 8, 5]


@pytest.mark.parametrize("stream", [Ordered(50), Sharded(4)], ids=["ordered", "sharded"])
def test_workers_change_nothing(stream):
    def run(num_workers, position=0, end=50):
        batches = BatchSchedule.constant(7, 2)
        loader = Loader(
            stream,
            as_is,
            batches,
            seed=0,
            data_rank=1,
            data_size=2,
            position=position,
            end=end,
            num_workers=num_workers,
        )
        steps = [[(list(m.ids), m.data, m.weight, list(m.epochs)) for m in step] for step in loader]
        assert loader.position == end
        return steps

    alone = run(0)
    assert run(1) == alone
    assert run(3) == alone
    assert run(3, end=21) + run(2, position=21) == alone


@pytest.mark.parametrize("stream", [Noisy(), NoisyShards()], ids=["ordered", "sharded"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_numbers_belong_to_the_position_in_the_stream(stream, num_workers):
    def samples(position=0, ranks=1):
        random.seed(), np.random.seed(), torch.seed()  # another process has other states
        batches = BatchSchedule.constant(8, 2)
        loaders = [
            Loader(
                stream, as_is, batches, seed=0, data_rank=rank, data_size=ranks, position=position, end=40,
                num_workers=num_workers,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        return [pair for steps in zip(*loaders, strict=True) for pair in samples_of(steps)]

    whole = samples()
    assert samples() == whole
    assert samples(position=24, ranks=2) == whole[24:]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_number_of_shards_must_be_a_multiple_of_the_ranks(num_workers):
    loader = Loader(Sharded(10), as_is, BatchSchedule.constant(8, 2), seed=0, data_size=4, num_workers=num_workers)
    with pytest.raises(UserError, match=r"10 = 2 × 4 \+ 2.*multiple of 4"):
        next(iter(loader))


def test_a_shard_must_be_endless():
    loader = Loader(Sharded(2, shard_length=3), as_is, BatchSchedule.constant(4, 2), seed=0)
    with pytest.raises(UserError, match="shard 0 ended before its item 3"):
        list(islice(loader, 10))
