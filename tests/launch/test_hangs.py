"""Ranks that hang: within the timeout the run reports which and where, and is restarted."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from conftest import ToyRun
from launched import Launched, tensors, torchrun
from ports import free_port
from test_interrupted import undisturbed

TWO = "launch.procs_per_node=2"
SHORT = "distributed.timeout=6"
RESTARTED = "shoal: rank 1 hung; starting again, from the last checkpoint if there is one (1 of 3)\n"
NO_RESTART = "launch.max_restarts=0"

# Sleeps once: in the first attempt of shoal's launcher or of torchrun, on rank 1, at the given call.
HANG = '''
import ctypes, os, signal, time
from shoal.processes.watchdog import Watchdog

started_flags, limit_seconds = [], Watchdog.limit_seconds

def note_started(watchdog):
    started_flags.append(watchdog.started)
    return limit_seconds(watchdog)

Watchdog.limit_seconds = note_started

def wait_until_all_know_that_this_rank_has_started():
    """Before, the longer timeout is in force. The last call may not have returned yet."""
    while not any(started_flags[:-1]):
        time.sleep(0.01)

SHOALS_ATTEMPT = os.environ.get("TORCHELASTIC_RUN_ID", "").removeprefix("attempt ")
IS_FIRST = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and SHOALS_ATTEMPT not in ("1", "2", "3")

def hold_the_gil(seconds):
    wait_until_all_know_that_this_rank_has_started()
    ctypes.PyDLL(None).sleep(seconds)

def stop_myself(seconds):
    wait_until_all_know_that_this_rank_has_started()
    open("stopped", "w").write(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)

def hang_once(calls=[]):
    calls.append(1)
    if os.environ.get("RANK") == "1" and IS_FIRST and len(calls) == {calls}:
        {sleep}({seconds})
'''
SAMPLE, CALLS = 'return {"x"', 21  # the first sample of step 6: a rank takes four samples per step


def hang(toy: ToyRun, before: str, calls: int, seconds: float = 1000, sleep: str = "time.sleep") -> None:
    """Makes the recipe sleep right before one of its lines."""
    path = toy.folder / "toy_recipe.py"
    text = path.read_text()
    assert before in text
    sleeper = HANG.format(calls=calls, seconds=seconds, sleep=sleep)
    path.write_text(sleeper + text.replace(before, f"hang_once(); {before}"))


def hang_message(run: Launched, last: str = "shoal: rank 1 hung; giving up after 0 restarts\n") -> str:
    """Returns the message of a hang, which must be the only one, followed by one line of the launcher."""
    text, _, rest = run.err.partition(last)
    assert text != run.err, run.err
    assert rest == ""
    assert text.count("the run hangs") == 1
    assert re.match(rf"shoal: the run hangs: rank 1 did not arrive within {SHORT.replace('=', ' = ')} s\n", text), text
    return text


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_the_run_restarts(toy: ToyRun, pool2: Any) -> None:
    hang(toy, SAMPLE, CALLS, sleep="stop_myself")
    with Launched(toy, TWO, SHORT) as run:
        assert run.wait() == 0, run.err
        assert run.nothing_left()
    stopped = (toy.folder / "stopped").read_text()
    text = hang_message(run, RESTARTED)
    assert re.search(rf"rank 1 \(.+, process {stopped}\): silent since \d\d:\d\d:\d\d, last seen in step \d+, ", text)
    # Which frames of the waiting rank are the innermost depends on how far it got.
    assert re.search(r"rank 0 \(.+, process \d+\): step \d+, .+, in \w+, for \d+ s\n(    \S+\.py:\d+ in \S+\n)+", text)
    assert "all threads of rank 0:\n" in (toy.output / "logs" / "rank_0.log").read_text()
    assert tensors(toy.output, 10) == undisturbed(toy, pool2, TWO)


CASES = {
    "the loader": (SAMPLE, CALLS, r"step 6, waiting for data"),
    "the forward": ('return {"input"', 9, r"step \d+, forward, backward and update"),
}


@pytest.mark.slow
@pytest.mark.parametrize("where", [*CASES])
def test_a_rank_that_sleeps_is_named_with_its_line(toy: ToyRun, where: str) -> None:
    before, calls, activity = CASES[where]
    hang(toy, before, calls)
    with Launched(toy, TWO, SHORT, NO_RESTART) as run:
        assert run.wait() == 1, run.err
        assert run.nothing_left()
    text = hang_message(run)
    assert re.search(
        rf"rank 1 \(.+, process \d+\): {activity}, for \d+ s\n(    .*\n)*    \S*toy_recipe\.py:\d+ in hang_once\n", text
    )
    assert re.search(r"rank 0 \(.+, process \d+\): step \d+, .*, in \w+, for \d+ s\n", text)
    assert "all threads of rank 1:\n" in (toy.output / "logs" / "rank_1.log").read_text()
    assert "in hang_once" in (toy.output / "logs" / "rank_1.log").read_text()


@pytest.mark.slow
def test_a_rank_that_hangs_in_a_save_is_named(toy: ToyRun) -> None:
    """As if a file system did not answer."""
    path = toy.folder / "toy_recipe.py"
    slow_disk = "\nfrom shoal.checkpoint import pieces\nflush = pieces.fsync\n"
    slow_disk += "def fsync(file):\n    hang_once()\n    flush(file)\npieces.fsync = fsync\n"
    path.write_text(HANG.format(calls=3, seconds=1000, sleep="time.sleep") + slow_disk + path.read_text())
    with Launched(toy, TWO, SHORT, NO_RESTART) as run:
        assert run.wait() == 1, run.err
        assert run.nothing_left()
    text = hang_message(run)
    assert re.search(
        r"rank 1 \(.+\): step \d+, saving, for \d+ s\n(    .*\n)*    \S*toy_recipe\.py:\d+ in hang_once\n", text
    )


@pytest.mark.slow
def test_a_rank_that_holds_the_gil_is_named_with_its_stacks(toy: ToyRun) -> None:
    """Its watchdog cannot run, and its stacks are written nevertheless."""
    hang(toy, 'return {"input"', 12, sleep="hold_the_gil")
    with Launched(toy, TWO, SHORT, NO_RESTART) as run:
        assert run.wait() == 1, run.err
        assert run.nothing_left()
    assert re.search(r"rank 1 \(.+, process \d+\): silent since", hang_message(run))
    log = (toy.output / "logs" / "rank_1.log").read_text()
    assert "Timeout (0:00:06)!" in log
    assert "in hang_once" in log


@pytest.mark.slow
def test_the_launcher_kills_the_silent_ranks_of_its_machine(toy: ToyRun) -> None:
    """Only the launcher can kill the one process of that machine. Rank 0 is made to look like another machine."""
    hang(toy, SAMPLE, CALLS, sleep="stop_myself")
    path = toy.folder / "toy_recipe.py"
    other_machine = "import os\nimport shoal.processes.watchdog as w\nif os.environ.get('RANK') == '0':\n"
    path.write_text(f"{other_machine}    w.machine_id = lambda: 'elsewhere'\n{path.read_text()}")
    options = ("launch.nodes=2", "launch.procs_per_node=1", SHORT)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with (
        Launched(toy, *options, **address, NODE_RANK="0") as one,
        Launched(toy, *options, **address, NODE_RANK="1") as other,
    ):
        assert one.wait() == 0, one.err
        assert other.wait() == 0, other.err
    assert hang_message(one, RESTARTED)
    about_the_end = [line for line in other.err.splitlines(keepends=True) if "joined the run" not in line]
    assert about_the_end == [RESTARTED, "shoal: the run has ended\n"]


@pytest.mark.slow
def test_a_hang_under_torchrun_is_reported_once_and_restarted(toy: ToyRun, pool2: Any) -> None:
    hang(toy, SAMPLE, CALLS, sleep="stop_myself")
    options = ("--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1", "-m", "shoal", "train", "run.yaml")
    with Launched(toy, *torchrun(), *options, SHORT) as run:
        assert run.wait() == 0, run.err
    assert run.err.count("the run hangs: rank 1 did not arrive") == 1
    assert tensors(toy.output, 10) == undisturbed(toy, pool2, TWO)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "calls", "seconds"),
    [(SAMPLE, CALLS, 2.5), ('return {"input"', 1, 15.0)],
    ids=["a slow sample", "a slow first step"],
)
def test_a_slow_rank_is_left_alone(toy: ToyRun, before: str, calls: int, seconds: float) -> None:
    hang(toy, before, calls, seconds)
    with Launched(toy, TWO, "distributed.timeout=10") as run:
        assert run.wait() == 0, run.err
    assert run.err == ""


@pytest.mark.slow
def test_a_hang_while_the_model_is_built_is_reported(toy: ToyRun) -> None:
    hang(toy, "hidden = self", 1)
    with Launched(toy, TWO, "distributed.init_timeout=10") as run:
        assert run.wait() == 0, run.err
    assert "rank 1 did not arrive within distributed.init_timeout = 10 s" in run.err
    assert re.search(r"rank 1 \(.+\): step 0, building the model, for \d+ s", run.err)
    assert run.err.endswith(RESTARTED)


def test_a_single_process_is_only_warned_about(
    toy: ToyRun, change_recipe: Callable[[str, str], None], capfd: Any
) -> None:
    slow = 'import time; time.sleep(1.5 if i == 77 else 0); return {"x"'
    change_recipe('return {"x"', slow)
    toy.train(
        "distributed.timeout=0.5", "distributed.init_timeout=0.5", "training.num_epochs=1", "training.max_steps=null"
    )
    err = capfd.readouterr().err
    activities = re.findall(r"^shoal: warning: no progress: (step \d+, [\w ]+), for \d+ s$", err, re.M)
    assert len(activities) == len({*activities}), "each is printed once"
    assert any(activity.endswith("waiting for data") for activity in activities)
    assert "in __getitem__" in err
