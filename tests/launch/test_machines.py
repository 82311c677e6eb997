"""The launchers of two machines, in two threads of this process: who takes part, who is missing, who leaves.

Their processes are shells, which start at once. `test_two_hosts.py` has the same with real runs on two hosts.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_SECONDS, ToyRun

from shoal.config import load_run
from shoal.errors import UserError
from shoal.launch import launcher, peers
from shoal.launch.cards import card_of, check_equal
from shoal.launch.peers import Peers
from shoal.processes.board import open_board
from shoal.processes.world import World

FIXED, ELASTIC = "launch.nodes=2", "launch.nodes=1:2"
WAITS = "exec 2>/dev/null; trap 'exit 143' TERM; while :; do sleep 0.01; done"
AGAIN = "starting again, from the last checkpoint if there is one"


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(peers, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(launcher, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(launcher, "SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(launcher, "LAST_CALL_SECONDS", (60.0, 0.1))
    board = open_board("127.0.0.1", 0, loopback_only=True)
    yield board
    del board


class Machine:
    """A launcher whose processes run a shell script."""

    def __init__(self, toy: ToyRun, board: Any, node: int, script: str, *overrides: str):
        run = load_run(toy.config, overrides)
        world = World(node, 2, address="127.0.0.1", port=board.port, starts=1)
        self.signals = launcher._Signals()
        self.launcher = launcher._Launcher(run, world, board.clone(), [], self.signals, grace_seconds=10)
        self.launcher.command = ["/bin/sh", "-c", script]
        self.started = threading.Event()
        run_workers = self.launcher._run_workers

        def note_start(*args: Any) -> None:
            self.started.set()
            run_workers(*args)

        self.launcher._run_workers = note_start  # type: ignore[method-assign]

    def run(self) -> int:
        try:
            return self.launcher.follow() if self.launcher.node else self.launcher.lead()
        except launcher._Ended as ended:
            return ended.exit_code
        finally:
            self.launcher.peers.leave()

    def signal(self, number: int) -> None:
        assert self.started.wait(PATIENCE_SECONDS)
        self.signals._note(number, None)

    def vanish(self) -> None:
        """Stops posting, as a machine does that has lost its power."""
        assert self.started.wait(PATIENCE_SECONDS)
        self.launcher.peers._ended.set()


@pytest.fixture
def machines(toy: ToyRun, board: Any) -> Iterator[Callable[..., tuple[Machine, Future[int]]]]:
    with ThreadPoolExecutor() as threads:

        def start(node: int, script: str, *overrides: str) -> tuple[Machine, Future[int]]:
            machine = Machine(toy, board, node, script, *overrides)
            return machine, threads.submit(machine.run)

        yield start


def results(*futures: Future[int]) -> list[int]:
    return [future.result(PATIENCE_SECONDS) for future in futures]


def test_a_failure_on_one_machine_starts_both_again(machines: Any, capfd: Any) -> None:
    script = f'[ "$TORCHELASTIC_RUN_ID" = "attempt 1" ] && exit 0; [ $RANK = 1 ] && exit 7; {WAITS}'
    _, first = machines(0, script, FIXED)
    _, second = machines(1, script, FIXED)
    assert results(first, second) == [0, 0]
    line = f"shoal: rank 1 ended with exit code 7; {AGAIN} (1 of 3)"
    said = capfd.readouterr().err.splitlines()
    assert said.count(line) == 2
    assert len([other for other in said if "joined the run" in other]) == 2  # in each attempt


def test_a_run_is_not_restarted_more_often_than_max_restarts(machines: Any, capfd: Any) -> None:
    script = f"[ $RANK = 1 ] && exit 7; {WAITS}"
    _, first = machines(0, script, FIXED, "launch.max_restarts=1")
    _, second = machines(1, script, FIXED, "launch.max_restarts=1")
    assert results(first, second) == [1, 1]
    said = capfd.readouterr().err.splitlines()
    assert said.count(f"shoal: rank 1 ended with exit code 7; {AGAIN} (1 of 1)") == 2
    assert said.count("shoal: rank 1 ended with exit code 7; giving up after 1 restarts") == 2


def test_the_second_machine_says_where_the_run_is(toy: ToyRun, machines: Any, capfd: Any) -> None:
    _, first = machines(0, "exit 0", FIXED)
    _, second = machines(1, "exit 0", FIXED)
    assert results(first, second) == [0, 0]
    assert capfd.readouterr().err.splitlines() == [
        "shoal: joined the run as node 1 of 2, rank 1; its output is on node 0 (127.0.0.1), and the logs of this "
        f"machine in {toy.output}/logs/rank_1.log",
        "shoal: the run has ended",
    ]


def test_a_signal_to_either_machine_ends_the_run(machines: Any, capfd: Any) -> None:
    _, first = machines(0, WAITS, FIXED)
    other, second = machines(1, WAITS, FIXED)
    other.signal(signal.SIGTERM)
    assert results(first, second) == [143, 143]
    (joined,) = capfd.readouterr().err.splitlines()
    assert joined.startswith("shoal: joined the run as node 1")


def test_a_machine_that_leaves_an_elastic_run_does_not_end_it(machines: Any, capfd: Any) -> None:
    script = f"[ $WORLD_SIZE = 1 ] && exit 0; {WAITS}"
    _, first = machines(0, script, ELASTIC)
    other, second = machines(1, script, ELASTIC)
    other.signal(signal.SIGTERM)
    assert results(first, second) == [0, 143]
    _, line = capfd.readouterr().err.splitlines()  # after that of the machine that has joined
    assert re.fullmatch(rf"shoal: node 1 \(.+\) left the run; {AGAIN}", line)


def test_a_machine_that_vanishes_from_an_elastic_run_is_named(machines: Any, capfd: Any) -> None:
    script = f"[ $WORLD_SIZE = 1 ] && exit 0; {WAITS}"
    _, first = machines(0, script, ELASTIC)
    other, second = machines(1, script, ELASTIC)
    other.vanish()
    assert results(first, second) == [0, 1]
    lines = capfd.readouterr().err.splitlines()
    assert any(
        re.fullmatch(rf"shoal: node 1 \(.+\) did not answer for 1 s; {AGAIN} \(1 of 3\)", line) for line in lines
    )
    assert any("lost the connection to node 0 at MASTER_ADDR = 127.0.0.1" in line for line in lines)


def test_a_machine_that_comes_late_joins_at_the_next_restart(
    machines: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launcher, "LAST_CALL_SECONDS", (0.0, 0.1))
    go = tmp_path / "go"
    script = f"[ $WORLD_SIZE = 2 ] && exit 0; until [ -e {go} ]; do sleep 0.01; done; exit 7"
    one, first = machines(0, script, ELASTIC)
    assert one.started.wait(PATIENCE_SECONDS)
    _, second = machines(1, script, ELASTIC)
    while "goes on without this machine" not in capfd.readouterr().err:
        time.sleep(0.01)
    go.touch()
    assert results(first, second) == [0, 0]


def test_missing_machines_are_named_while_the_run_waits_for_them(
    machines: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "REMINDER_SECONDS", 0.2)
    _, first = machines(0, WAITS, FIXED, "distributed.init_timeout=0.5")
    with pytest.raises(UserError, match=r"launch.nodes = 2: node 1 did not come within distributed.init_timeout = 0.5"):
        first.result(PATIENCE_SECONDS)
    lines = capfd.readouterr().err.splitlines()
    assert lines
    assert all(line.startswith("shoal: waiting for node 1 to connect to MASTER_ADDR = 127.0.0.1") for line in lines)


@pytest.mark.parametrize(
    ("node", "overrides", "words"),
    [
        (1, [FIXED, "training.learning_rate=0.5"], ["training.learning_rate = 0.5 on this", "has 0.01", "same config"]),
        (1, ["launch.nodes=3"], ["launch.nodes = 3 on this machine", "has 2"]),
        (1, [FIXED], ["NODE_RANK=1: ", " is node 1 of this run already"]),
    ],
)
def test_a_machine_that_does_not_belong_to_the_run_is_refused(
    toy: ToyRun, board: Any, node: int, overrides: list[str], words: list[str]
) -> None:
    keeper, member = Peers(board, 0, 2, 60), Peers(board.clone(), 1, 2, 60)
    keeper.join(card_of(load_run(toy.config, [FIXED])))
    member.join(card_of(load_run(toy.config, [FIXED])))
    try:
        with pytest.raises(UserError) as refused:
            Peers(board.clone(), node, 2, 60).join(card_of(load_run(toy.config, overrides)))
        for word in words:
            assert word in str(refused.value)
        while not (refusals := keeper.take_refusals()):
            pass  # also while it comes, none gets lost
        assert words[0].split(":")[0] in refusals[0]
    finally:
        member.leave()
        keeper.leave()


def test_another_version_of_a_library_is_refused(toy: ToyRun) -> None:
    card = card_of(load_run(toy.config, []))
    check_equal(card, card.to_json())
    other = replace(card, host="node7", versions={**card.versions, "torch": "1.13"})
    with pytest.raises(UserError, match=r"torch = '.+' on this machine .*the first one \(node7\) has '1.13'; install"):
        check_equal(card, other.to_json())


def test_a_board_without_launchers_is_refused(toy: ToyRun, board: Any) -> None:
    """Ranks that another launcher has started keep one, too."""
    board.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(UserError, match=r"MASTER_PORT = \d+: node 0 of this run is not there"):
        Machine(toy, board, 1, WAITS, FIXED)


def test_a_machine_that_has_left_is_not_lost(toy: ToyRun, board: Any) -> None:
    keeper, member = Peers(board, 0, 2, 0.2), Peers(board.clone(), 1, 2, 60)
    card = card_of(load_run(toy.config, [FIXED]))
    keeper.join(card)
    member.join(card)
    while not keeper.present():
        time.sleep(0.01)
    member.leave()
    while keeper.present():
        time.sleep(0.01)
    for _ in range(30):
        keeper.tick()
        time.sleep(0.01)
    assert not keeper.is_lost(1)
    keeper.leave()
