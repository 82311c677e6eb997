from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import threading
import types
from collections.abc import Callable

import pytest

from shoal.observe.console import Console

TRAIN = {
    "train/loss": 3.21012,
    "train/learning_rate": 1e-3,
    "train/grad_norm": 1.234,
    "train/samples_per_second": 31.7,
    "train/tokens_per_second": 8123.0,
}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("shoal.observe.console.time", types.SimpleNamespace(perf_counter=clock))
    return clock


def train(console: Console, clock: Clock, first: int, last: int, seconds_per_step: float) -> None:
    for step in range(first, last + 1):
        clock.now += seconds_per_step
        console.advance(step)


def test_plain_lines(clock: Clock) -> None:
    file = io.StringIO()  # not a terminal, so auto is plain
    with Console("auto", 0, 200, file=file) as console:
        console.line("resuming [bold]nothing[/bold]")
        clock.now += 300  # the first step compiles; the estimate must not count it
        train(console, clock, 1, 1, 0.0)
        console.metrics(1, {"train/loss": float("nan")})
        train(console, clock, 2, 20, 0.2278)
        console.metrics(20, TRAIN)
        console.metrics(20, {"eval/loss": 3.5, "eval/token_accuracy": 0.12345})
        console.metrics(20, {"train/mfu": 0.4123, "train/data_seconds": 0.0021, "train/memory_gib": 7.26})
        train(console, clock, 21, 119, 60)
        console.metrics(119, {})
    assert file.getvalue().splitlines() == [
        "resuming [bold]nothing[/bold]",
        "step 1/200  loss nan",
        "step 20/200  loss 3.2101  lr 1.0e-03  grad norm 1.23  31.7 samples/s  8.1k tokens/s  eta 0:41",
        "step 20/200  eval loss 3.5000  eval token accuracy 0.1235  eta 0:41",
        "step 20/200  mfu 41.2%  data 0.002s  7.3 GiB  eta 0:41",
        "step 119/200  eta 1:08:00",
    ]


def test_the_remaining_time_is_estimated_from_the_steps_of_this_process(clock: Clock) -> None:
    file = io.StringIO()
    console = Console("plain", 1000, 1100, file=file)
    train(console, clock, 1001, 1051, 2.0)
    console.metrics(1051, {})
    train(console, clock, 1052, 1100, 2.0)
    console.metrics(1100, {"eval/loss": 1.0})
    assert file.getvalue() == "step 1051/1100  eta 1:38\nstep 1100/1100  eval loss 1.0000\n"


def test_off_is_silent() -> None:
    file = io.StringIO()
    with Console("off", 0, 2, file=file) as console:
        console.advance(1)
        console.metrics(1, TRAIN)
        console.line("hello")
    assert file.getvalue() == ""


def test_a_copy_gets_every_line_without_the_bar() -> None:
    file, copy = io.StringIO(), io.StringIO()
    with Console("rich", 0, 2, file=file, copy=copy) as console:
        console.line("hello")
        console.advance(1)
        console.metrics(1, {"train/loss": 1.0})
    assert copy.getvalue() == "hello\nstep 1/2  loss 1.0000\n"
    assert "hello" in file.getvalue()


def on_terminal(use: Callable[[io.TextIOWrapper], None]) -> str:
    """Returns what `use` writes to a pseudo-terminal. A thread reads it, because a full terminal blocks its writer."""
    reader, writer = pty.openpty()
    output = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # raised when the other end is closed
            while chunk := os.read(reader, 65536):
                output.extend(chunk)

    thread = threading.Thread(target=read)
    thread.start()
    with open(writer, "w", encoding="utf-8") as file:  # noqa: PTH123 (a descriptor, not a path)
        use(file)
    thread.join()
    os.close(reader)
    return output.decode()


def frames(output: str) -> list[str]:
    """Returns the lines that were drawn, in order, without control sequences."""
    drawn = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output))
    return [line.rstrip() for line in drawn if line.strip()]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (120, "step 20/200  loss 3.2101  left 0:41  8.1k tokens/s  elapsed 0:05"),
        (60, "step 20/200  loss 3.2101  left 0:41  8.1k tokens/s"),
        (30, "step 20/200  loss 3.2101"),
        (8, "step 20/"),
    ],
)
def test_live_bar_fits_the_terminal(clock: Clock, columns: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))

    def use(file: io.TextIOWrapper) -> None:
        with Console("auto", 0, 200, file=file) as console:
            train(console, clock, 1, 19, 0.2278)
            console.metrics(19, TRAIN)
            train(console, clock, 20, 20, 0.2278)
            console.line("[b]")

    output = on_terminal(use)
    drawn = frames(output)
    assert "[b]" in drawn, "messages must not be read as markup"
    assert drawn[-1].endswith(expected)
    assert all(len(line) <= columns for line in drawn)
    assert ("━" in drawn[-1]) == (columns == 120)
    assert output.endswith("\x1b[?25h"), "the cursor must be visible again"


def test_live_bar_prints_evaluations_above_it_and_redraws_rarely(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")

    def use(file: io.TextIOWrapper) -> None:
        with Console("rich", 0, 1000, file=file) as console:
            train(console, clock, 1, 1000, 0.001)  # one second: four redraws, plus one at the start and one at the end
            console.metrics(1000, TRAIN)
            console.metrics(1000, {"eval/loss": 2.0})

    drawn = frames(on_terminal(use))
    assert "step 1000/1000  eval loss 2.0000" in drawn
    assert not any(line.startswith("step 1000/1000  loss") for line in drawn)
    assert 5 <= len([line for line in drawn if "left" in line]) <= 8


def test_rich_mode_works_without_a_terminal() -> None:
    file = io.StringIO()
    with Console("rich", 0, 10, file=file) as console:
        console.advance(1)
    assert "\x1b[" in file.getvalue()


def test_advance_does_nothing_between_redraws(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console("plain", 0, 10, file=io.StringIO())
    console.advance(1)
    monkeypatch.setattr(Console, "_redraw", lambda self: pytest.fail("plain output never redraws"))
    train(console, clock, 2, 10, 3600)
