"""Datasets without a length: what a stream has to offer.

A stream's position is one count of samples over all ranks, as with any dataset, so it can be resumed on another
number of ranks. Its epoch is always 0, a sample's id is its global position, and shuffling is its own affair.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable


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
