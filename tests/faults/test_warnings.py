"""Warnings leave a trace, whatever the console shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ToyRun

from shoal.checkpoint import find_latest_checkpoint
from shoal.errors import UserError

PASSED_OVER = "warning: checkpoint step_00000010 is damaged and passed over: "


def damage(folder: Path, step: int) -> None:
    path = folder / "checkpoints" / f"step_{step:08d}" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("console", ["off", "plain"])
def test_a_damaged_checkpoint_that_is_passed_over(
    toy: ToyRun, console: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert toy.train().step == 10
    assert not (toy.output / "logs").exists(), "a run of one process without warnings has no log"
    damage(toy.output, 10)
    capsys.readouterr()
    assert toy.train(f"logging.console={console}").first_step == 8
    out, err = capsys.readouterr()
    (line,) = (toy.output / "logs" / "rank_0.log").read_text().splitlines()
    assert line.startswith(PASSED_OVER)
    assert "model.safetensors" in line
    if console == "off":
        assert out == ""
        assert err == f"shoal: {line}\n"
    else:
        assert out.splitlines().count(line) == 1
        assert err == ""


def test_warnings_of_a_run_that_fails_before_there_is_a_console(
    toy: ToyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.train("training.max_steps=4", "logging.console=off")
    damage(toy.output, 2)
    damage(toy.output, 4)
    with pytest.raises(UserError, match="all 2 checkpoints"):
        toy.train()
    lines = (toy.output / "logs" / "rank_0.log").read_text().splitlines()
    assert [line.split()[2] for line in lines] == ["step_00000004", "step_00000002"]
    assert capsys.readouterr().err.splitlines() == [f"shoal: {line}" for line in lines]


@pytest.mark.slow
def test_a_damaged_checkpoint_under_the_launcher(toy: ToyRun) -> None:
    keys = ("launch.procs_per_node=2", "logging.console=off")
    command = [sys.executable, "-m", "shoal", "train", "run.yaml", *keys]
    subprocess.run(command, cwd=toy.folder, check=True)
    (file,) = (toy.output / "checkpoints" / "step_00000010").glob("model-00001*")
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    result = subprocess.run(command, cwd=toy.folder, capture_output=True, text=True, check=True)
    assert [line.startswith(f"shoal: {PASSED_OVER}") for line in result.stderr.splitlines()] == [True]
    assert (toy.output / "logs" / "rank_0.log").read_text().count(PASSED_OVER) == 1
    assert find_latest_checkpoint(toy.output) == toy.output / "checkpoints" / "step_00000010"
