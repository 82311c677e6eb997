"""A file that outlives a full disk: a run must not end because nobody can write down how it goes."""

from __future__ import annotations

import logging
from pathlib import Path

_warnings = logging.getLogger(__name__)


class PatientFile:
    """Appends. What does not fit is kept in memory, and tried again with what comes next."""

    def __init__(self, path: Path):
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._left = bytearray()
        self._warned = False

    def write(self, data: str | bytes) -> None:
        self._left += data.encode() if isinstance(data, str) else data

    def flush(self) -> None:
        try:
            while self._left:
                del self._left[: self._file.write(self._left)]
            self._warned = False
        except OSError as error:
            if not self._warned:
                _warnings.warning("%s has to wait until it can be written: %s", self.path, error.strerror)
            self._warned = True

    def close(self) -> None:
        self.flush()
        self._file.close()
