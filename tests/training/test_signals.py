"""A signal before the first step: there is nothing to save, and the run leaves at once."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest
from conftest import ToyRun

from shoal.cli.train import _print_stopped
from shoal.config import load_run
from shoal.training.signals import StopFlag, Stopped

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]


@pytest.mark.parametrize("number", SIGNALS)
def test_while_data_is_prepared(toy: ToyRun, change_recipe: Callable[[str, str], None], number: signal.Signals) -> None:
    told_and_left = f"os.kill(os.getpid(), {int(number)}); time.sleep(5); assert False, 'nobody heard it'"
    change_recipe("    def build_model", f"    def prepare_data(self):\n        {told_and_left}\n\n    def build_model")
    change_recipe("import torch\n", "import os, time\nimport torch\n")
    handlers = [signal.getsignal(other) for other in SIGNALS]
    with pytest.raises(Stopped) as stopped:
        toy.train()
    assert (stopped.value.code, stopped.value.signal) == (128 + number, number)
    assert [signal.getsignal(other) for other in SIGNALS] == handlers
    assert not (toy.output / "run.lock").exists()


@pytest.mark.parametrize("phase", ["train_data", "build_model"])
def test_while_the_run_is_built(toy: ToyRun, change_recipe: Callable[[str, str], None], phase: str) -> None:
    """Other ranks may be about to talk to this one, so the phase ends first."""
    signature = f"    def {phase}(self):\n"
    change_recipe(signature, f"{signature}        os.kill(os.getpid(), {int(signal.SIGTERM)})\n")
    change_recipe("import torch\n", "import os\nimport torch\n")
    with pytest.raises(Stopped) as stopped:
        toy.train()
    assert stopped.value.code == 128 + signal.SIGTERM
    assert not (toy.output / "report.txt").exists()


def test_just_before_data_is_prepared() -> None:
    with StopFlag() as stop:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped) as stopped, stop.at_once():
            pytest.fail("the data would be prepared")
    assert stopped.value.signal == signal.SIGTERM


def test_the_flag_alone_while_something_is_to_be_saved() -> None:
    with StopFlag() as stop:
        with stop.at_once():
            pass
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)  # within a second it is the same wish
        assert stop.signal == signal.SIGUSR1


def test_the_user_sees_one_line(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    preparing = "pathlib.Path('preparing').touch(); time.sleep(60)"
    change_recipe("    def build_model", f"    def prepare_data(self):\n        {preparing}\n\n    def build_model")
    change_recipe("import torch\n", "import pathlib, time\nimport torch\n")
    process = toy.fork("train", "run.yaml")
    while not (toy.folder / "preparing").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate()
    assert process.returncode == 128 + signal.SIGUSR1
    assert (out, err) == ("stopped by SIGUSR1 before the first step; nothing to save\n", "")


def test_a_stopped_run_with_checkpoints_says_how_to_resume(toy: ToyRun, capsys: pytest.CaptureFixture[str]) -> None:
    toy.train("training.max_steps=2", "checkpoint.every=1")
    capsys.readouterr()
    _print_stopped(signal.SIGINT, load_run(toy.config), ["shoal", "train", "run.yaml"])
    first, second = capsys.readouterr().out.splitlines()
    assert first == "stopped by SIGINT before the first step; the last checkpoint is still step_00000002"
    assert second == "resume with  shoal train run.yaml"
