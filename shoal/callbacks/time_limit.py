"""Ends a run when it has trained for a given time, restarts included."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from shoal.callbacks.callback import Callback
from shoal.config import Section

if TYPE_CHECKING:
    from shoal.callbacks.run_handle import RunHandle

Duration = Annotated[float, Field(gt=0)]


class TimeLimit(Callback):
    """Adds up the time from the start of each process to its last checkpoint."""

    class Config(Section):
        hours: Duration | None = None
        """End the run after this many hours of training, over all restarts. Give this or `minutes`."""
        minutes: Duration | None = None
        """The same in minutes."""

        def contradictions(self) -> Sequence[tuple[bool, str]]:
            both = (self.hours, self.minutes)
            return (((both.count(None) != 1), "give either hours or minutes"),)

    def __init__(self, config: Any = None):
        super().__init__(config)
        self._limit_seconds = 60 * (self.config.minutes or 60 * self.config.hours)
        self._earlier_seconds = 0.0
        """The time that earlier processes of this run have trained, up to the checkpoint that it resumes from."""
        self._started = time.monotonic()

    def on_start(self, run: RunHandle) -> None:
        self._started = time.monotonic()

    def _seconds(self) -> float:
        return self._earlier_seconds + time.monotonic() - self._started

    def after_step(self, run: RunHandle) -> None:
        if self._seconds() >= self._limit_seconds:  # clocks differ; the first rank stops all of them
            run.stop(f"the time limit of {self._limit_seconds / 60:g} minutes is over")

    def state(self) -> dict[str, Any]:
        return {"seconds": self._seconds()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._earlier_seconds = float(state["seconds"])
