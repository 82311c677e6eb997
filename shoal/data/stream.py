"""Datasets without a length: the methods that a stream must have so that shoal can resume it.

The position in a stream is the number of samples that all ranks together have consumed, as with any dataset, so a run
can be resumed on another number of ranks. The epoch of a sample is always 0 and its id is its global position. A stream
shuffles itself, if it wants to, by a generator of its own whose state depends on the position alone. The global
generators are seeded before each sample from (seed, position), for noise that belongs to one sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class OrderedStream(Protocol):
    """A stream with one global order. Every rank reads all of it and keeps only its own samples.

    The stream may end; the run then ends too.
    """

    def open(self, start: int) -> Iterator[Any]:
        """Returns the samples from global position `start` on."""


@runtime_checkable
class ShardedStream(Protocol):
    """A stream of endless shards, read in turn: global position p is item p // num_shards of shard p % num_shards.

    A rank opens only its own shards, so `num_shards` must be a multiple of the data-parallel size.
    """

    num_shards: int

    def open(self, shard: int, offset: int) -> Iterator[Any]:
        """Returns the samples of one shard from item `offset` on; the iterator must not end."""
