"""Processes that die, and runs that are stopped by signals."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Gate, ToyRun
from launched import Launched, catches, listening_addresses, saved, tensors, torchrun

from shoal.checkpoint import find_latest_checkpoint
from shoal.config import load_run
from shoal.training import train

TWO = "launch.procs_per_node=2"


@pytest.fixture
def slow_toy(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> ToyRun:
    """A run whose steps take a fifth of a second, so that there is time to interrupt them."""
    change_recipe('return {"x"', 'import time; time.sleep(0.05); return {"x"')
    return toy


def train_here(config: Path, overrides: list[str]) -> int:
    return train(load_run(config, overrides)).step


def undisturbed(toy: ToyRun, pool: Any, *overrides: str) -> dict[str, bytes]:
    """Returns the final tensors of the same run without an interruption."""
    output = f"experiment.output_dir={toy.folder}/whole"
    step, *_ = pool.run(train_here, toy.config, [*overrides, output], init=False)
    whole = tensors(toy.folder / "whole", step)
    assert len(whole) >= 12  # four tensors in the model, and two moments each
    return whole


@pytest.mark.parametrize("victims", [[1], pytest.param([1, 0], marks=pytest.mark.slow)])
def test_a_killed_rank_is_started_again_and_nothing_is_lost(
    toy: ToyRun, gate: Gate, pool2: Any, change_recipe: Callable[[str, str], None], victims: list[int]
) -> None:
    change_recipe("def build_model(self):", "def build_model(self):\n        print('printed by the recipe')")
    gate.close_after(4)
    with Launched(toy, TWO) as run:
        for step, victim in zip((4, 6), victims, strict=False):
            run.until(saved(toy, step))
            os.kill(run.ranks()[victim], signal.SIGKILL)
            gate.close_after(step + 2)
        gate.open()
        assert run.wait() == 0, run.err
        assert run.nothing_left()
    again = "was killed by SIGKILL; starting again, from the last checkpoint if there is one"
    expected = [f"shoal: rank {victim} {again} ({number} of 3)" for number, victim in enumerate(victims, 1)]
    assert run.err.splitlines() == expected
    assert run.out.count("step 10/10  loss") == 1
    assert run.out.count("finished at step 10") == 1
    assert "step 10/10  loss" in (toy.output / "logs" / "rank_0.log").read_text()
    assert "printed by the recipe" in (toy.output / "logs" / "rank_1.log").read_text()
    assert tensors(toy.output, 10) == undisturbed(toy, pool2, TWO)
    assert toy.metrics() == toy.metrics(output=toy.folder / "whole")


@pytest.mark.slow  # as in test_machines.py
def test_a_run_is_not_restarted_more_often_than_max_restarts(slow_toy: ToyRun) -> None:
    with Launched(slow_toy, TWO, "launch.max_restarts=0") as run:
        run.until(run.ranks)
        os.kill(run.ranks()[0], signal.SIGKILL)  # before it has imported torch
        assert run.wait() == 1
        assert run.nothing_left()
    assert run.err == "shoal: rank 0 was killed by SIGKILL; giving up after 0 restarts\n"


@pytest.mark.slow
def test_a_restart_by_torchrun(toy: ToyRun, gate: Gate, pool2: Any) -> None:
    options = ("--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1", "-m", "shoal", "train", "run.yaml")
    gate.close_after(4)
    with Launched(toy, *torchrun(), *options) as run:
        run.until(saved(toy, 4))
        os.kill(run.ranks()[1], signal.SIGKILL)
        gate.open()
        assert run.wait() == 0, run.err
    assert "Traceback" not in run.err
    assert tensors(toy.output, 10) == undisturbed(toy, pool2, TWO)


STOPS = {
    "the launcher": lambda run, number: os.kill(run.process.pid, number),
    "rank 0": lambda run, number: os.kill(run.ranks()[0], number),
    "rank 1": lambda run, number: os.kill(run.ranks()[1], number),
    "the terminal": lambda run, number: os.killpg(run.process.pid, number),
}


@pytest.mark.slow  # test_orphans.py has a launcher of shells
@pytest.mark.parametrize(
    ("target", "number", "workers"),
    [
        ("the launcher", signal.SIGTERM, 1),
        ("rank 1", signal.SIGTERM, 0),
        ("rank 0", signal.SIGUSR1, 0),
        ("the launcher", signal.SIGUSR1, 0),
        ("the terminal", signal.SIGINT, 0),
        ("the launcher", signal.SIGINT, 0),
        ("rank 0", signal.SIGTERM, 1),
        ("rank 1", signal.SIGINT, 1),
        ("the terminal", signal.SIGINT, 2),
    ],
)
def test_a_signal_saves_once_and_ends_the_run(
    slow_toy: ToyRun, target: str, number: signal.Signals, workers: int
) -> None:
    options = ("training.max_steps=1000", "checkpoint.every=null", f"dataset.num_workers={workers}")
    with Launched(slow_toy, TWO, *options) as run:
        run.until((slow_toy.output / "report.txt").exists)
        STOPS[target](run, number)
        if (target, number) == ("the launcher", signal.SIGUSR1):
            number = signal.SIGTERM  # the launcher forwards it as SIGTERM
        assert run.wait() == 128 + number, run.err
        assert run.nothing_left()
    assert run.err == ""
    latest = find_latest_checkpoint(slow_toy.output)
    assert latest is not None
    step = json.loads((latest / "trainer.json").read_text())["step"]
    assert re.findall(r"stopped by (\w+) at step (\d+) of 1000; saved", run.out) == [(number.name, str(step))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "number"),
    [
        *((target, n) for target in [*STOPS][:3] for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)),
        ("the terminal", signal.SIGINT),
    ],
)
def test_a_signal_while_data_is_prepared(
    toy: ToyRun, change_recipe: Callable[[str, str], None], target: str, number: signal.Signals
) -> None:
    """One process prepares the data; the others wait for it on the board."""
    preparing = "pathlib.Path('preparing').touch(); time.sleep(100)"
    change_recipe("    def build_model", f"    def prepare_data(self):\n        {preparing}\n\n    def build_model")
    change_recipe("import torch\n", "import pathlib, time\nimport torch\n")
    with Launched(toy, TWO) as run:
        run.until((toy.folder / "preparing").exists)
        run.until(lambda: [catches(pid, signal.SIGTERM) for pid in run.ranks().values()] == [True, True])
        STOPS[target](run, number)
        received = signal.SIGTERM if number == signal.SIGUSR1 and target == "the launcher" else number
        assert run.wait() == 128 + received, run.err
        assert run.nothing_left()
    assert run.err == ""
    # After a signal to rank 1, the launcher stops rank 0 with SIGTERM.
    received = signal.SIGTERM if target == "rank 1" else received
    assert run.out == f"stopped by {received.name} before the first step; nothing to save\n"


@pytest.mark.slow  # test_orphans.py has a launcher of shells
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("stopped", [[1], [], [0, 1]])
def test_a_run_listens_on_loopback_only_and_killing_its_launcher_leaves_no_orphans(
    slow_toy: ToyRun, stopped: list[int]
) -> None:
    """Stopped ranks do not handle the signal that the kernel sends when the launcher dies."""
    with Launched(slow_toy, TWO, "training.max_steps=1000", "checkpoint.every=null") as run:
        run.until((slow_toy.output / "report.txt").exists)
        assert listening_addresses(run.alive()) == {"0100007F"}  # 127.0.0.1
        for rank in stopped:
            os.kill(run.ranks()[rank], signal.SIGSTOP)
        run.process.kill()
        assert run.nothing_left()
    assert find_latest_checkpoint(slow_toy.output), "the workers save before they exit"
    assert not (slow_toy.output / "run.lock").exists()


@pytest.mark.slow
def test_killing_the_launcher_early_leaves_no_orphans(slow_toy: ToyRun) -> None:
    with Launched(slow_toy, TWO, "training.max_steps=1000") as run:
        run.until(lambda: len(run.ranks()) == 2)
        run.process.kill()
        assert run.nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("procs", [2, 4])
def test_ten_kills_at_random_moments(slow_toy: ToyRun, procs: int, request: pytest.FixtureRequest) -> None:
    options = (f"launch.procs_per_node={procs}", "training.max_steps=150", "launch.max_restarts=10")
    dice = random.Random(procs)
    before: set[int] = set()
    with Launched(slow_toy, *options) as run:
        for _ in range(10):
            run.until(lambda: len({*run.ranks().values()} - before) == procs)
            time.sleep(dice.uniform(0, 4 + procs))
            ranks = run.ranks()
            before.update(ranks.values())
            os.kill(ranks[dice.randrange(procs)], signal.SIGKILL)
        assert run.wait() == 0, run.err
        assert run.nothing_left()
    assert run.err.count("was killed by SIGKILL; starting again") == len(run.err.splitlines()) == 10
    pool = request.getfixturevalue(f"pool{procs}")
    assert tensors(slow_toy.output, 150) == undisturbed(slow_toy, pool, *options)
