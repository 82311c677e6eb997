"""Ctrl-C, SIGTERM and SIGUSR1: a handler only sets a flag; the loop saves and leaves.

Before the first step there is nothing to save, and while data is prepared nobody can look at a flag.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stopped(SystemExit):
    """A signal ended the run before its first step. Unless it is caught, the process leaves with the code for that."""

    def __init__(self, number: int, agreed: bool = False):
        """`agreed`: all ranks leave, and not this one alone."""
        super().__init__(128 + number)
        self.signal, self.agreed = signal.Signals(number), agreed


class StopFlag:
    """Set by the first SIGINT, SIGTERM or SIGUSR1 while entered; a later one acts as if we were not here.

    One within a second is the same wish: launchers, terminals and the kernel pass on what others pass on too.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.signal = 0
        self._set_at = 0.0
        self._ends_at_once = False
        self._before: dict[signal.Signals, Any] = {}

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within, a signal raises Stopped wherever the process is, as Ctrl-C does in any Python program."""
        self._ends_at_once = True
        try:
            yield
        finally:
            self._ends_at_once = False

    def __enter__(self) -> StopFlag:
        for number in self.SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

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
