"""Ctrl-C, SIGTERM and SIGUSR1: a handler only sets a flag; the loop saves and ends.

Before the first step there is nothing to save, and while data is prepared nobody can look at a flag.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stopped(SystemExit):
    """Raised when a signal ends a run before its first step; uncaught, the process exits with 128 + the signal."""

    def __init__(self, number: int, agreed: bool = False):
        """`agreed` is True if all ranks end, and not this one alone."""
        super().__init__(128 + number)
        self.signal, self.agreed = signal.Signals(number), agreed


class StopFlag:
    """A flag that the first SIGINT, SIGTERM or SIGUSR1 sets; a later one has its usual effect.

    A second signal within one second is ignored as a duplicate: launchers, terminals and the kernel may each pass on
    the same one.
    """

    SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))

    def __init__(self) -> None:
        self.signal = 0
        self._set_at = 0.0
        self._ends_at_once = False
        self._before: dict[signal.Signals, Any] = {}

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """In this context a signal raises Stopped at once; one that was received before raises it on entry."""
        self._ends_at_once = True
        try:
            if self.signal:
                raise Stopped(self.signal)
            yield
        finally:
            self._ends_at_once = False

    def __enter__(self) -> StopFlag:
        if self.is_possible():
            self._before = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    @staticmethod
    def is_possible() -> bool:
        """Returns whether this thread may handle signals: Python lets only the main one."""
        return threading.current_thread() is threading.main_thread()

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.signal:
            self.signal, self._set_at = number, time.monotonic()
            if self._ends_at_once:
                raise Stopped(number)
        elif time.monotonic() > self._set_at + 1:
            signal.signal(number, self._before[signal.Signals(number)])
            signal.raise_signal(number)
