"""Progress on the console: a live bar on a terminal, plain lines everywhere else."""

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
from shoal.errors import printable
from shoal.observe.loggers import RetryingFile

_REDRAW_SECONDS = 0.25


class Console(AbstractContextManager["Console"]):
    """Prints metrics and messages, and shows a progress bar if `mode` is `rich`. Ranks other than 0 use `off`.

    `start_step` is the last step before this process started: 0, or the step it resumed from. `copy` is a file that
    gets every line as plain text in every mode.
    """

    def __init__(
        self,
        mode: ConsoleMode,
        start_step: int,
        total_steps: int,
        file: TextIO | None = None,
        copy: TextIO | RetryingFile | None = None,
    ):
        self._file, self._copy = file or sys.stdout, copy
        if mode == "auto":
            mode = "rich" if self._file.isatty() and os.environ.get("TERM") != "dumb" else "plain"
        self._mode = mode
        self._step, self._total_steps = start_step, total_steps
        self._opened_at = time.perf_counter()
        self._rate_start: tuple[int, float] | None = None  # the step and time from which steps per second are counted
        self._redraw_at = 0.0
        self._latest: dict[str, float] = {}
        self._live: Live | None = None
        self._terminal = RichConsole(file=self._file, force_terminal=True)
        if mode == "rich":
            self._live = Live(console=self._terminal, auto_refresh=False, get_renderable=self._bar)
            self._live.start()

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()  # this draws the bar once more
            self._live = None

    def advance(self, step: int) -> None:
        """Notes that step `step` is finished. The training loop calls this in every step, so it must be cheap."""
        self._step = step
        if time.perf_counter() >= self._redraw_at:
            self._redraw()

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints metrics as a line; training metrics go into the bar instead if there is one."""
        self._step = step
        self._latest.update(metrics)
        fields = [f"step {step}/{self._total_steps}", *(_format(name, value) for name, value in metrics.items())]
        if (left := self._seconds_left()) is not None and step < self._total_steps:
            fields.append(f"eta {_clock_time(left)}")
        in_the_bar = all(name.startswith("train/") for name in metrics)
        self.line("  ".join(fields), only_copy=in_the_bar and self._live is not None)

    @property
    def is_off(self) -> bool:
        """True if nothing is printed."""
        return self._mode == "off"

    def line(self, text: str, only_copy: bool = False, to_copy: bool = True) -> None:
        """Prints a line, or writes it only to the copy. A caller may pass several lines as one text."""
        text = printable(text, keep="\n\t")
        if self._copy and to_copy:
            print(text, file=self._copy, flush=True)
        if only_copy:
            return
        if self._live:
            self._terminal.print(text, markup=False, highlight=False, emoji=False)
        elif self._mode == "plain":
            encoding = getattr(self._file, "encoding", None) or "utf-8"
            with suppress(OSError):  # a file on a full disk, or a closed pipe
                print(text.encode(encoding, "backslashreplace").decode(encoding), file=self._file, flush=True)

    def _redraw(self) -> None:
        now = time.perf_counter()
        if self._rate_start is None:  # the first step is not counted, because it compiles and warms up
            self._rate_start = (self._step, now)
        if self._live:
            self._live.refresh()
        self._redraw_at = now + _REDRAW_SECONDS if self._live else math.inf

    def _seconds_left(self) -> float | None:
        if self._rate_start is None or self._step == self._rate_start[0]:
            return None
        first_step, start_time = self._rate_start
        return (time.perf_counter() - start_time) / (self._step - first_step) * (self._total_steps - self._step)

    def _bar(self) -> RenderableType:
        """Returns one line that fits the terminal: the least important fields are dropped first, and the bar takes the
        width that is left."""
        left = self._seconds_left()
        formatted = {name: _format(name, value) for name, value in self._latest.items()}
        fields = [
            f"step {self._step}/{self._total_steps}",
            *(text for name, text in formatted.items() if name == "train/loss"),
            f"left {'-:--' if left is None else _clock_time(left)}",
            *[text for name, text in formatted.items() if name.endswith("_per_second")][-1:],
            f"elapsed {_clock_time(time.perf_counter() - self._opened_at)}",
        ]
        width = self._terminal.width
        while len(fields) > 1 and len("  ".join(fields)) > width:
            fields.pop()
        text = Text("  ".join(fields), no_wrap=True, overflow="crop")
        bar_width = width - len(text) - 2
        if bar_width < 10:
            return text
        row = Table.grid(padding=(0, 1))
        row.add_row(ProgressBar(total=self._total_steps, completed=self._step, width=min(bar_width, 40)), text)
        return row


def _short(value: float) -> str:
    """Formats 8123.0 as `8.1k`."""
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.1f}{suffix}"
    return f"{value:.1f}"


def _clock_time(seconds: float) -> str:
    """Formats 41 as `0:41` and 3725 as `1:02:05`."""
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
    "train/skipped_steps": lambda value: f"{value:g} update{'s' * (value != 1)} skipped",
    "eval/loss": "eval loss {:.4f}".format,
}


def _format(name: str, value: float) -> str:
    if name in _FORMATS:
        return _FORMATS[name](value)
    words = printable(name).removeprefix("train/").replace("/", " ").replace("_", " ")
    if words.endswith(" per second"):
        return f"{_short(value)} {words.removesuffix(' per second')}/s"
    return f"{words} {value:.4g}"
