"""A log file that survives a full disk: training must not stop because a log line cannot be written."""

from __future__ import annotations

import logging
from pathlib import Path

_warnings = logging.getLogger(__name__)


class RetryingFile:
    """A file to append to. What cannot be written stays in memory and is tried again at the next flush."""

    def __init__(self, path: Path):
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._unwritten = bytearray()
        self._warned = False

    def write(self, data: str | bytes) -> None:
        """Keeps the data in memory until `flush` is called."""
        self._unwritten += data.encode() if isinstance(data, str) else data

    def flush(self) -> None:
        """Writes what is in memory. If that fails, warns once and keeps the rest."""
        try:
            while self._unwritten:
                del self._unwritten[: self._file.write(self._unwritten)]
            self._warned = False
        except OSError as error:
            if not self._warned:
                _warnings.warning("%s cannot be written and will be tried again: %s", self.path, error.strerror)
            self._warned = True

    def close(self) -> None:
        self.flush()
        self._file.close()
