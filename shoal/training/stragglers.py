"""Names a rank that is slower than its peers.

Ranks wait for each other in every step, so all of them have the same step time; what differs is the time that a rank
takes by itself. It is compared when a line of the log is due, in the exchange that gathers metrics anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

MEASURED_STEPS = 5
"""So many steps before each line of the log are measured."""
_WORTH_NAMING = 0.05
"""A rank is named if its peers lose at least this part of a step by waiting for it."""


@dataclass(frozen=True)
class OwnTimes:
    """What a rank did by itself in a step of one window, in seconds."""

    host: str
    peers: int
    """Ranks with the same number do the same work; stages of a pipeline do not."""
    data: float
    """The mean time in which it waited for its data."""
    computing: float
    """The median time in which it prepared batches and ran forwards and, where that can be told apart, backwards."""

    @property
    def seconds(self) -> float:
        return self.data + self.computing


@dataclass(frozen=True)
class Slowest:
    """The rank that is slowest in comparison with its peers, in one window."""

    rank: int
    times: OwnTimes
    peers_seconds: float
    """The median of its peers."""

    @property
    def ratio(self) -> float:
        return self.times.seconds / self.peers_seconds if self.peers_seconds else 1.0


def find_slowest(times: Sequence[OwnTimes | None]) -> Slowest | None:
    """Returns the slowest of the ranks, whose times come in their order; None if no rank has a peer."""
    measured = {rank: own for rank, own in enumerate(times) if own is not None}
    found = []
    for rank, own in measured.items():
        peers = [other.seconds for peer, other in measured.items() if peer != rank and other.peers == own.peers]
        if peers:
            found.append(Slowest(rank, own, median(peers)))
    return max(found, key=lambda slowest: slowest.ratio, default=None)


class Stragglers:
    """Remembers which rank was too slow in the last window, because one window may be an accident."""

    def __init__(self, factor: float | None):
        self._factor = factor
        self._suspected: int | None = None
        self._named: int | None = None

    def judge(self, slowest: Slowest | None, step_seconds: float) -> str | None:
        """Returns a warning if the same rank was too slow in two windows, one after the other; once, until it recovers.

        `step_seconds` is the mean time of a step in this window.
        """
        if self._factor is None:
            return None
        too_slow = slowest is not None and slowest.ratio >= self._factor
        if slowest is None or not too_slow or _lost(slowest) < _WORTH_NAMING * step_seconds:
            self._suspected = self._named = None
            return None
        suspected, self._suspected = self._suspected, slowest.rank
        if slowest.rank != suspected or slowest.rank == self._named:
            return None
        self._named = slowest.rank
        own = slowest.times
        return (
            f"rank {slowest.rank} (host {own.host}) is {slowest.ratio:.2f} times slower than its peers, and they wait "
            f"for it: by itself it takes {own.seconds:.3g} s a step (data {own.data:.3g} s, computing "
            f"{own.computing:.3g} s), they take {slowest.peers_seconds:.3g} s (logging.straggler_factor = "
            f"{self._factor:g})"
        )


def _lost(slowest: Slowest) -> float:
    """Returns the seconds that the peers of a rank wait for it in a step."""
    return slowest.times.seconds - slowest.peers_seconds
