"""Ctrl-C, SIGTERM and SIGUSR1: a handler only sets a flag; the loop saves and leaves."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any


class StopFlag:
    """Set by the first SIGINT, SIGTERM or SIGUSR1 while entered; a later one acts as if we were not here.

    One within a second is the same wish: launchers, terminals and the kernel pass on what others pass on too.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.signal = 0
        self._set_at = 0.0
        self._before: dict[signal.Signals, Any] = {}

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
        elif time.monotonic() > self._set_at + 1:
            signal.signal(number, self._before[signal.Signals(number)])
            signal.raise_signal(number)
