"""Progress for people: a live bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import TextIO

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal.config.schema import ConsoleMode
from shoal.observe.patient_file import PatientFile

_REDRAW_SECONDS = 0.25


class Console(AbstractContextManager["Console"]):
    """`first_step` is the last step done before this process started: 0, or the step resumed from.

    `off` prints nothing at all: it is also what the other ranks use. `copy` gets every line, plain, whatever the mode.
    """

    def __init__(
        self,
        mode: ConsoleMode,
        first_step: int,
        total_steps: int,
        file: TextIO | None = None,
        copy: TextIO | PatientFile | None = None,
    ):
        self._file, self._copy = file or sys.stdout, copy
        if mode == "auto":
            mode = "rich" if self._file.isatty() and os.environ.get("TERM") != "dumb" else "plain"
        self._mode = mode
        self._step, self._total_steps = first_step, total_steps
        self._opened = time.perf_counter()
        self._clock: tuple[int, float] | None = None
        self._redraw_at = 0.0
        self._shown: dict[str, float] = {}
        self._live: Live | None = None
        self._terminal = RichConsole(file=self._file, force_terminal=True)
        if mode == "rich":
            self._live = Live(console=self._terminal, auto_refresh=False, get_renderable=self._bar)
            self._live.start()

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()  # draws once more
            self._live = None

    def advance(self, step: int) -> None:
        """Step `step` is done. Called in the hot loop: a store and a comparison, except when a redraw is due."""
        self._step = step
        if time.perf_counter() >= self._redraw_at:
            self._redraw()

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step
        self._shown.update(metrics)
        fields = [f"step {step}/{self._total_steps}", *(_format(name, value) for name, value in metrics.items())]
        if (left := self._seconds_left()) is not None:
            fields.append(f"eta {_clock_time(left)}")
        on_the_bar = all(name.startswith("train/") for name in metrics)  # evaluations and the like get a line
        self.line("  ".join(fields), shown=on_the_bar and self._live is not None)

    def line(self, text: str, shown: bool = False) -> None:
        """`shown`: the person sees it already, so that only the copy gets it."""
        if self._copy:
            print(text, file=self._copy, flush=True)
        if shown:
            return
        if self._live:
            self._terminal.print(text, markup=False, highlight=False)
        elif self._mode == "plain":
            with suppress(OSError):  # it goes to a file on a full disk, or nobody reads it any more
                print(text, file=self._file, flush=True)

    def _redraw(self) -> None:
        now = time.perf_counter()
        if self._clock is None:  # time counts from the end of the first step, which compiles and warms up
            self._clock = (self._step, now)
        if self._live:
            self._live.refresh()
        self._redraw_at = now + _REDRAW_SECONDS if self._live else math.inf

    def _seconds_left(self) -> float | None:
        if self._clock is None or self._step == self._clock[0]:
            return None
        first_step, started = self._clock
        seconds_per_step = (time.perf_counter() - started) / (self._step - first_step)
        return seconds_per_step * (self._total_steps - self._step)

    def _bar(self) -> RenderableType:
        """One line that always fits: what matters least goes first, and the bar takes the room that is left."""
        left = self._seconds_left()
        shown = {name: _format(name, value) for name, value in self._shown.items()}
        fields = [
            f"step {self._step}/{self._total_steps}",
            *(text for name, text in shown.items() if name == "train/loss"),
            f"left {'-:--' if left is None else _clock_time(left)}",
            *[text for name, text in shown.items() if name.endswith("_per_second")][-1:],
            f"elapsed {_clock_time(time.perf_counter() - self._opened)}",
        ]
        width = self._terminal.width
        while len(fields) > 1 and len("  ".join(fields)) > width:
            fields.pop()
        words = Text("  ".join(fields), no_wrap=True, overflow="crop")
        room = width - len(words) - 2
        if room < 10:
            return words
        row = Table.grid(padding=(0, 1))
        row.add_row(ProgressBar(total=self._total_steps, completed=self._step, width=min(room, 40)), words)
        return row


def _short(value: float) -> str:
    """8123.0 as `8.1k`."""
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.1f}{suffix}"
    return f"{value:.1f}"


def _clock_time(seconds: float) -> str:
    """41 as `0:41`, 3725 as `1:02:05`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


_FORMATS: dict[str, Callable[[float], str]] = {
    "train/loss": "loss {:.4f}".format,
    "train/learning_rate": "lr {:.1e}".format,
    "train/grad_norm": "grad norm {:.2f}".format,
    "train/mfu": "mfu {:.1%}".format,
    "train/data_seconds": "data {:.3f}s".format,
    "train/memory_gib": "{:.1f} GiB".format,
    "eval/loss": "eval loss {:.4f}".format,
}


def _format(name: str, value: float) -> str:
    if name in _FORMATS:
        return _FORMATS[name](value)
    words = name.removeprefix("train/").replace("/", " ").replace("_", " ")
    if words.endswith(" per second"):
        return f"{_short(value)} {words.removesuffix(' per second')}/s"
    return f"{words} {value:.4g}"
