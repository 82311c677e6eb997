"""Names a rank that is slower than its peers.

Ranks wait for each other in every step, so all of them have the same step time; what differs is the time that a rank
takes by itself. It is compared when a line of the log is due, in the exchange that gathers metrics anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

MEASURED_STEPS = 5
"""So many steps before each line of the log are measured, and ranks are judged by at least so many."""
_WORTH_NAMING = 0.05
"""A rank is named if its peers lose at least this part of a step by waiting for it."""


@dataclass(frozen=True)
class OwnTimes:
    """What a rank did by itself in some steps, in seconds."""

    host: str
    peers: int
    """Ranks with the same number do the same work; stages of a pipeline do not."""
    data_seconds: float
    """The time in which it waited for its data, in all of the steps."""
    num_steps: int
    computing_seconds: tuple[float, ...]
    """The time in which it prepared batches and ran forwards and, where that can be told apart, backwards: of each step
    that was measured."""

    @property
    def data(self) -> float:
        """The mean time of a step."""
        return self.data_seconds / self.num_steps

    @property
    def computing(self) -> float:
        """The median time of a step."""
        return median(self.computing_seconds)

    @property
    def seconds(self) -> float:
        return self.data + self.computing

    def __add__(self, later: OwnTimes) -> OwnTimes:
        return replace(
            self,
            data_seconds=self.data_seconds + later.data_seconds,
            num_steps=self.num_steps + later.num_steps,
            computing_seconds=self.computing_seconds + later.computing_seconds,
        )


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

    @property
    def lost_seconds(self) -> float:
        """The time for which its peers wait for it in a step."""
        return self.times.seconds - self.peers_seconds


def find_slowest(times: Sequence[OwnTimes]) -> Slowest | None:
    """Returns the slowest of the ranks, whose times come in their order; None if no rank has a peer."""
    found = []
    for rank, own in enumerate(times):
        peers = [other.seconds for peer, other in enumerate(times) if peer != rank and other.peers == own.peers]
        if peers:
            found.append(Slowest(rank, own, median(peers)))
    return max(found, key=lambda slowest: slowest.ratio, default=None)


class Stragglers:
    """Gathers the times of ranks into windows, and names a rank that was too slow in two of them in a row: one may be
    an accident."""

    def __init__(self, factor: float | None):
        self._factor = factor
        self._window: Sequence[OwnTimes] = ()
        self._seconds = 0.0
        self._suspected: int | None = None
        self._named: int | None = None

    def add(self, times: Sequence[OwnTimes], seconds: float) -> str | None:
        """Adds what the ranks, in their order, did in some steps that took so many seconds.

        Returns a warning if a window is full and a rank is to be named; once, until it recovers.
        """
        self._window = [one + more for one, more in zip(self._window, times, strict=True)] if self._window else times
        self._seconds += seconds
        if self._factor is None or len(self._window[0].computing_seconds) < MEASURED_STEPS:
            return None
        slowest, step_seconds = find_slowest(self._window), self._seconds / self._window[0].num_steps
        self._window, self._seconds = (), 0.0
        return self._judge(slowest, step_seconds, self._factor)

    def _judge(self, slowest: Slowest | None, step_seconds: float, factor: float) -> str | None:
        if slowest is None or slowest.ratio < factor or slowest.lost_seconds < _WORTH_NAMING * step_seconds:
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
            f"{own.computing:.3g} s), they take {slowest.peers_seconds:.3g} s (logging.straggler_factor = {factor:g})"
        )
