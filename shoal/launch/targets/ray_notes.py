"""What is known of a Ray run besides its workers. An actor of Ray has it, so this file imports nothing large."""

from __future__ import annotations


class Notes:
    """Outlives the workers: counts their starts, and keeps an error that would come again."""

    def __init__(self) -> None:
        self._starts = 0
        self._final_error = ""

    def count_start(self) -> int:
        """Returns how often the run was started before."""
        self._starts += 1
        return self._starts - 1

    def end_with(self, error: str) -> None:
        """Notes an error after which the run is not started again. The first one counts."""
        self._final_error = self._final_error or error

    def final_error(self) -> str:
        """Returns the error after which the run is not started again, or an empty text."""
        return self._final_error
