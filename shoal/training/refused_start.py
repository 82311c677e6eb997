"""What a start writes into its run folder before the first step. A start that is refused takes it back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

_MADE = ("config.yaml", "metrics.jsonl", "logs", "tensorboard")
_INSIDE = ("logs/rank_*.log", "tensorboard/events.*")


class StartTraces:
    """Notes what is there before a start, so that what the start has made can be removed again."""

    def __init__(self, folder: Path):
        self.folder = folder.absolute()
        self._before: set[Path] | None = None
        with suppress(OSError):  # whoever writes there says what is wrong
            self._before = {*self._find()}

    def take_back(self) -> None:
        """Removes the config, logs and folders that were not there before; call it after a refusal.

        If the run folder has anything else, nothing is removed: the run has trained, or another one holds the folder.
        """
        with suppress(OSError):
            if self._before is None or self._has_more():
                return
            for path in [path for path in self._find() if path not in self._before]:
                with suppress(OSError):  # a folder that is not empty
                    path.rmdir() if path.is_dir() else path.unlink()

    def _find(self) -> Iterator[Path]:
        """Yields what a start makes and is there now; what is inside of a folder comes before it."""
        inside = chain.from_iterable(map(self.folder.glob, _INSIDE))
        paths = (*(self.folder / name for name in _MADE), self.folder, *self.folder.parents)
        yield from chain(inside, (path for path in paths if path.exists()))

    def _has_more(self) -> bool:
        """Returns whether the folder has metrics, a report, checkpoints, the lock of a run or files of the user."""
        found = {path.name: path for path in self.folder.iterdir()} if self.folder.is_dir() else {}
        return not found.keys() <= {*_MADE} or ("metrics.jsonl" in found and found["metrics.jsonl"].stat().st_size > 0)
