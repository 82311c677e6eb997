"""Two launchers in one run folder: the second is refused while the first lives, and takes over when it was killed."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from conftest import Gate, ToyRun
from launched import Launched, saved, tensors
from test_interrupted import undisturbed

from shoal.checkpoint.run_lock import RunLock

pytestmark = pytest.mark.slow
TWO = "launch.procs_per_node=2"


def assert_refused(run: Launched, toy: ToyRun, holder: int) -> None:
    assert run.wait() == 2, run.err
    assert run.nothing_left()
    assert run.err.startswith(f"shoal: error: experiment.output_dir = '{toy.output}' is in use by process {holder} on ")
    assert run.err.count("\n") == 1
    assert run.out == ""


def test_a_launcher_is_refused_while_another_run_holds_the_folder(toy: ToyRun) -> None:
    toy.output.mkdir()
    with RunLock(toy.output) as held:
        with Launched(toy, TWO) as second:
            assert_refused(second, toy, os.getpid())
        held.check()
        written = {path.name for path in toy.output.iterdir()}
        assert written == {"run.lock", "logs"}, "the refusal is in the logs; nothing else was written"


def test_a_second_launcher_waits_for_nothing_once_the_first_and_its_ranks_were_killed(
    toy: ToyRun, gate: Gate, pool2: Any
) -> None:
    gate.close_after(4)
    with Launched(toy, TWO) as first:
        first.until(saved(toy, 4))
        with Launched(toy, TWO) as second:
            assert_refused(second, toy, first.ranks()[0])
        for pid in [first.process.pid, *first.alive()]:
            os.kill(pid, signal.SIGKILL)
        assert first.nothing_left()
    assert (toy.output / "run.lock").exists()
    gate.open()
    with Launched(toy, TWO) as third:
        assert third.wait() == 0, third.err
    assert third.err == ""
    assert tensors(toy.output, 10) == undisturbed(toy, pool2, TWO)


def test_a_second_launcher_goes_on_after_only_the_first_launcher_was_killed(
    toy: ToyRun, gate: Gate, pool2: Any
) -> None:
    """The ranks of the first save and leave by themselves."""
    gate.close_after(4)
    with Launched(toy, TWO) as first:
        first.until(saved(toy, 4))
        first.process.kill()
        gate.open()
        assert first.nothing_left()
    with Launched(toy, TWO) as second:
        assert second.wait() == 0, second.err
    assert second.err == ""
    assert tensors(toy.output, 10) == undisturbed(toy, pool2, TWO)
