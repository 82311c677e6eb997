"""Who is waited for, told from what each rank was last seen doing; runs that really hang are in tests/launch."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool

from shoal.processes import watchdog as watchdog_module
from shoal.processes.board import board_of, once_per_node
from shoal.processes.detect import detect
from shoal.processes.watchdog import (
    Sighting,
    Watchdog,
    collective_of,
    describe,
    group_timeout_seconds,
    kill_here,
    not_arrived,
    this_machine,
)
from shoal.processes.world import World


def sighting(rank: int, marks: int = 10, collective: str = "all_reduce", **changes: Any) -> Sighting:
    values = {"place": "step 3, saving", "still_seconds": 5.0, "clock": "12:00:00"}
    return Sighting(rank, f"host{rank // 4} pid:[1]", 100 + rank, marks, collective=collective, **(values | changes))


@pytest.mark.parametrize(
    ("answers", "missing"),
    [
        ([sighting(0), None, sighting(2, 9, "")], [1]),  # who says nothing, before all that are slow
        ([sighting(0), sighting(1, 9, ""), sighting(2)], [1]),  # behind the others
        ([sighting(0), sighting(1, 9, ""), sighting(2, 9)], [1]),  # 2 is behind as well, but waits like 0
        ([sighting(0), sighting(1, 9, "backward"), sighting(2)], [1]),
        ([sighting(0), sighting(1, 10, ""), sighting(2)], [1]),  # in the same place, but not in a collective
        ([sighting(0, 10, ""), sighting(1, 9, ""), sighting(2, 10, "")], [1]),  # waiting for GPUs
        ([sighting(0), sighting(1), sighting(2)], []),  # two different collectives, or the network
        ([sighting(0, 10, ""), sighting(1, 10, ""), sighting(2, 10, "")], []),
    ],
)
def test_who_did_not_arrive(answers: Sequence[Sighting | None], missing: list[int]) -> None:
    assert not_arrived({answer.rank: answer for answer in answers if answer}, len(answers)) == missing


def test_a_large_world_is_told_in_few_lines() -> None:
    answers = {rank: sighting(rank, frames=["a.py:1 in save"]) for rank in range(64) if rank not in (5, 9)}
    last_seen = answers | {5: sighting(5, place="step 3, logs", frames=["b.py:2 in read"])}
    assert describe([5, 9], answers, last_seen, "distributed.timeout = 3 s").splitlines() == [
        "the run hangs: ranks 5, 9 did not arrive within distributed.timeout = 3 s",
        "  rank 5 (host1, process 105): silent since 12:00:00, when it was in step 3, logs, in all_reduce, for 5 s",
        "    b.py:2 in read",
        "  rank 9 has not even come",
        "  ranks 0-4, 6-8, 10-63: step 3, saving, in all_reduce, for 5 s",
        "    a.py:1 in save",
    ]
    assert "no rank is behind" in describe([], answers, last_seen, "distributed.timeout = 3 s")


def test_a_sighting_travels() -> None:
    seen = sighting(3, frames=["a.py:1 in f"])
    assert Sighting(**json.loads(json.dumps(asdict(seen)))) == seen


def test_collectives_are_seen_on_the_stack() -> None:
    user, lib = ("/home/me/recipe.py", 3, "loss"), "/lib/torch/distributed"
    assert collective_of([user, (f"{lib}/c10d_logger.py", 8, "wrapper"), (f"{lib}/distributed_c10d.py", 9, "gather")])
    assert (
        collective_of([user, (f"{lib}/_functional_collectives.py", 9, "wait"), ("/lib/torch/_ops.py", 1, "x")])
        == "wait"
    )
    assert collective_of([user, ("/lib/torch/autograd/graph.py", 9, "_engine_run_backward")]) == "backward"
    assert collective_of([(f"{lib}/fsdp/hooks.py", 9, "forward"), user]) == ""
    assert collective_of([]) == ""


def wait_in_a_collective(seen: Path) -> tuple[str, str]:
    """Rank 0 waits in a thread of its own, as one that writes in the background, and its loop for that thread.

    Rank 1 joins when rank 0 was seen to wait.
    """
    world = World(dist.get_rank(), 1)
    found: list[Sighting] = []
    with Watchdog(world, 100, 100) as watchdog:
        watchdog.at("saving", 7)
        total = torch.ones(1)
        if dist.get_rank() == 1:
            while not seen.exists():
                time.sleep(0.01)
            dist.all_reduce(total)
            return "", ""

        def look() -> None:
            while not found or not found[-1].collective:  # or for ever
                found.append(watchdog._sighting())
                time.sleep(0.01)
            seen.touch()

        background = threading.Thread(target=once_per_node, args=(World(), lambda: dist.all_reduce(total)))
        looking = threading.Thread(target=look)
        looking.start()
        background.start()
        background.join()
        looking.join()
    return str(found[-1]), found[-1].frames[-1]


def test_a_loop_that_waits_for_its_writing_thread(pool2: Any, tmp_path: Path) -> None:
    (where, innermost), _ = pool2.run(wait_in_a_collective, tmp_path / "seen")
    assert re.fullmatch(r"step 7, saving, in all_reduce, for \d+ s", where)
    assert innermost.startswith("torch/distributed/distributed_c10d.py:")


def hang(folder: Path) -> tuple[str, list[int]]:
    """Rank 1 hangs until both watchdogs want to end their processes, from which they are kept here."""
    world = detect()
    board_of(world)
    exits: list[int] = []
    reading, writing = os.pipe()

    def leave(code: int) -> None:
        exits.append(code)
        (folder / f"left {world.rank}").touch()
        while not all((folder / f"left {rank}").exists() for rank in (0, 1)):
            time.sleep(0.01)
        os.write(writing, b"go on")
        raise SystemExit  # of the watchdog's thread alone

    watchdog_module.os._exit = leave  # type: ignore[assignment]
    message = folder / f"message {world.rank}"
    log = folder / f"rank_{world.rank}.log"
    with message.open("w") as terminal, Watchdog(world, 1, 60, log, terminal.fileno()) as watchdog:
        watchdog.grace_seconds = 4  # on a busy machine a rank may be slow to answer
        watchdog.started = True
        dist.barrier()
        watchdog.at("evaluation", 5)
        if world.rank == 1:
            os.read(reading, 1)
        dist.all_reduce(torch.ones(1))
    return message.read_text(), exits


def test_a_rank_that_sleeps_while_the_other_waits(tmp_path: Path) -> None:
    with Pool(2) as pool:  # of its own, for what was changed in it
        (first, exits), (second, exits_too) = pool.run(hang, tmp_path)
    assert exits == exits_too == [75]
    (told,) = filter(None, [first, second])  # by one of them
    assert re.fullmatch(
        r"shoal: the run hangs: rank 1 did not arrive within distributed\.timeout = 1 s\n"
        r"  rank 1 \(.+, process \d+\): step 5, evaluation, for \d+ s\n"
        r"(    .+\n)*    .*test_watchdog\.py:\d+ in hang\n"
        r"  rank 0 \(.+, process \d+\): step 5, evaluation, in all_reduce, for \d+ s\n"
        r"(    .+\n)*    torch/distributed/distributed_c10d\.py:\d+ in all_reduce\n"
        rf"  the stacks of all threads are in {tmp_path}/rank_<n>\.log\n",
        told,
    )
    for rank in (0, 1):
        log = (tmp_path / f"rank_{rank}.log").read_text()
        assert f"all threads of rank {rank}:\n" in log
        assert 'test_watchdog.py", line' in log


def test_torch_waits_longer_than_the_watchdog() -> None:
    assert group_timeout_seconds(600, 1800) == group_timeout_seconds(1800, 600) > 1800


def test_what_was_seen_is_not_kept() -> None:
    """The loop's frames hold its tensors, and the loop collects garbage rarely."""

    def compute(watchdog: Watchdog) -> weakref.ref[torch.Tensor]:
        tensor = torch.ones(1)
        while watchdog._seen is None:
            time.sleep(0.01)
        return weakref.ref(tensor)

    watchdog = Watchdog(World(), 0.02, 0.02)
    gc.disable()
    try:
        with watchdog:
            computed = compute(watchdog)
            while computed() is not None:  # until the next look, or for ever
                time.sleep(0.01)
    finally:
        gc.enable()


def test_what_counts_as_still(monkeypatch: pytest.MonkeyPatch) -> None:
    watchdog = Watchdog(World(), 0.2, 100)
    watchdog._watched_thread = threading.get_ident()
    frames = [("a.py", 1, "f")]
    monkeypatch.setattr(watchdog, "_frames", lambda: frames)
    for _ in range(3):
        watchdog._next_place()
    assert watchdog._still_seconds == pytest.approx(2 * watchdog.tick_seconds)
    frames = [("a.py", 2, "f")]
    watchdog._next_place()
    assert watchdog._still_seconds == 0
    watchdog._next_place()
    watchdog.at("saving", 1)
    watchdog._next_place()
    assert watchdog._still_seconds == 0
    assert watchdog.limit_seconds() == 100
    watchdog.started = True
    assert watchdog.limit_seconds() == 0.2


def test_a_board_that_is_not_there_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shoal.processes.watchdog.store_of", refuse)
    with Watchdog(World(0, 2), 0.1, 0.1, tmp_path / "log") as watchdog:
        watchdog._thread.join()
    assert "Traceback" not in capfd.readouterr().err


def refuse(world: World, purpose: str) -> None:
    raise dist.DistNetworkError("connection refused")


def test_only_processes_of_this_machine_are_ended() -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        kill_here([("another machine", process.pid)])
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
        os.kill(process.pid, 19)  # SIGSTOP
        kill_here([(this_machine(), process.pid)])
        assert process.wait() == -9
