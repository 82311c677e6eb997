"""How much time a run spends on previews: answers that take longer than the evaluation itself are shown less often."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

SHARE = 0.1
"""The part of the time of all evaluations that previews may take."""
FREE_SECONDS = 5.0
"""Previews that take less than this in all are never left out."""


class PreviewBudget:
    """Adds up the seconds of evaluations and of previews."""

    def __init__(self) -> None:
        self._evaluation_seconds = self._preview_seconds = 0.0

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        start = perf_counter()
        yield
        self._evaluation_seconds += perf_counter() - start

    @contextmanager
    def previewing(self) -> Iterator[None]:
        start = perf_counter()
        yield
        self._preview_seconds += perf_counter() - start

    def is_spent(self, any_rank: Callable[[bool], bool]) -> bool:
        """Returns whether previews have taken their share. All ranks call it, and get the same answer."""
        return any_rank(self._preview_seconds > max(FREE_SECONDS, SHARE * self._evaluation_seconds))
