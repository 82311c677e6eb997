"""Names and messages from outside cannot forge lines of a log, command a terminal, or crash the console."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_SECONDS, ToyRun
from hypothesis import given
from hypothesis import strategies as st
from pool import start_process

from shoal.config import load_run
from shoal.errors import UserError, one_line, printable
from shoal.launch.worker import as_worker
from shoal.observe.console import Console
from shoal.observe.loggers import JsonlLogger, Loggers
from shoal.processes.board import open_board
from shoal.processes.world import World
from shoal.training.observers import Warnings

EVIL = "a\nshoal: error: forged\r\x1b[31mred\x1b]0;title\x07 [red]markup[/] :skull: \u2028\u202e\udcff end"


def assert_harmless(text: str, lines: int) -> None:
    assert len(text.splitlines()) == lines, text
    assert not {"\x1b", "\r", "\x07", "\u202e", "\udcff"} & {*text}, text
    text.encode()
    assert "[red]markup[" in text, "markup is shown as it is"


@given(st.text())
def test_a_printable_text_is_one_line_that_can_be_encoded(text: str) -> None:
    shown = printable(text)
    assert len(shown.splitlines()) <= 1
    assert "\x1b" not in shown
    shown.encode()
    assert printable(shown) == shown
    assert one_line(text)
    assert printable(text, keep="\n").count("\n") == text.count("\n")


@pytest.mark.parametrize("mode", ["plain", "rich", "off"])
def test_the_console_shows_names_without_obeying_them(mode: Any, tmp_path: Path) -> None:
    file, copy = io.StringIO(), io.StringIO()
    warn = Warnings(tmp_path / "log")
    with Console(mode, 0, 10, file=file, copy=copy) as console:
        warn.show_on(console)
        console.metrics(1, {f"eval/{EVIL}": 1.0})
        warn(f"checkpoint {EVIL} is damaged")
    warn.close()
    assert_harmless(copy.getvalue(), lines=1)
    assert_harmless((tmp_path / "log").read_text(), lines=1)
    if mode == "plain":
        assert file.getvalue() == copy.getvalue() + (tmp_path / "log").read_text()
    if mode == "rich":  # the bar itself is drawn by commands to the terminal
        assert "\x1b]0;title" not in file.getvalue()
        assert ":skull:" in file.getvalue()
        assert not any(line.startswith("shoal: error") for line in file.getvalue().splitlines())


def test_a_terminal_that_cannot_show_all_characters_is_no_reason_to_end() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with Console("plain", 0, 10, file=file) as console:
        console.line("4 × 2 ─ ok")
    file.seek(0)
    assert file.read() == "4 \\xd7 2 \\u2500 ok\n"


def test_metrics_are_one_json_object_a_line_whatever_their_names(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path, 0)
    logger.log(1, {EVIL: 1.0})
    logger.text(1, "preview", EVIL)
    logger.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": 1, EVIL: 1.0}, {"step": 1, "preview": EVIL}]


def test_a_logger_that_fails_is_reported_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def log(self, *_: object) -> None:
            raise ValueError(EVIL)

    with caplog.at_level(logging.WARNING):
        Loggers([Failing()]).log(1, {})  # type: ignore[list-item]
    assert_harmless(caplog.messages[0], lines=1)


def test_a_run_with_such_a_name(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is the run folder's name as well. Slashes, and what is not Unicode, are refused."""
    name = EVIL.replace("/", "").replace("\udcff", "")
    monkeypatch.chdir(toy.folder)
    text = toy.config.read_text().replace(f"{{output_dir: {toy.output}}}", json.dumps({"name": name}))
    toy.config.write_text(text)
    result = toy.call("train", "run.yaml", "training.max_steps=2")
    assert result.returncode == 0, result.stderr
    for line in [*result.stdout.split("\n"), *result.stderr.split("\n")]:
        assert printable(line) == line
        assert not line.startswith("shoal: error")
    (report,) = (toy.folder / "runs").glob("*/report.txt")
    assert not any(line.startswith("shoal: error") for line in report.read_text().splitlines())


def test_an_error_in_one_process(toy: ToyRun) -> None:
    result = toy.call("train", f"{EVIL}.yaml")
    assert result.returncode == 2
    assert_harmless(result.stderr, lines=1)


def fail_as_worker(config: Path, kind: str) -> None:
    board = open_board("127.0.0.1", 0, loopback_only=True)
    board.set(", start 0, roll 1/rank 1", "")  # or rank 0 would wait for it
    world = World(0, 2, 0, 2, address="127.0.0.1", port=board.port, launcher_keeps_board=True)
    with as_worker(load_run(config, []), world):
        raise (UserError if kind == "user" else ValueError)(EVIL)


@pytest.mark.parametrize("kind", ["user", pytest.param("other", marks=pytest.mark.slow)])
def test_an_error_in_one_of_several_processes(toy: ToyRun, kind: str) -> None:
    err = toy.folder / "err"
    process = start_process(fail_as_worker, toy.config, kind, err=err)
    process.join(PATIENCE_SECONDS)
    if kind == "user":
        assert_harmless(err.read_text(), lines=1)
        assert process.exitcode == 2
        assert not toy.output.exists()  # a refusal leaves no log
    else:
        log = (toy.output / "logs" / "rank_0.log").read_text()
        assert err.read_text().removeprefix("shoal: rank 0 failed\n") == log
        assert "\n  shoal: error: forged" in log
        assert not any(line.startswith("shoal:") for line in log.splitlines())
        assert "\x1b" not in log
        assert process.exitcode == 1
