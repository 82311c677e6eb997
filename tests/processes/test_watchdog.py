"""The watchdog: which ranks it names from what each was last doing. Whole runs that hang are in tests/launch."""

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
from shoal.processes.board import connect_to_board, once_per_node
from shoal.processes.detect import detect
from shoal.processes.watchdog import (
    RankStatus,
    Watchdog,
    collective_of,
    describe_hang,
    find_missing_ranks,
    group_timeout_seconds,
    kill_local_processes,
    machine_id,
)
from shoal.processes.world import World


def status_of(rank: int, progress: int = 10, collective: str = "all_reduce", **changes: Any) -> RankStatus:
    values = {"activity": "step 3, saving", "unchanged_seconds": 5.0, "time_of_day": "12:00:00"}
    return RankStatus(
        rank, f"host{rank // 4} pid:[1]", 100 + rank, progress, collective=collective, **(values | changes)
    )


@pytest.mark.parametrize(
    ("answers", "missing"),
    [
        ([status_of(0), None, status_of(2, 9, "")], [1]),  # a silent rank comes before slow ones
        ([status_of(0), status_of(1, 9, ""), status_of(2)], [1]),  # behind the others
        ([status_of(0), status_of(1, 9, ""), status_of(2, 9)], [1]),  # rank 2 is behind as well, but waits like 0
        ([status_of(0), status_of(1, 9, "backward"), status_of(2)], [1]),
        ([status_of(0), status_of(1, 10, ""), status_of(2)], [1]),  # as far as the others, but not in a collective
        ([status_of(0, 10, ""), status_of(1, 9, ""), status_of(2, 10, "")], [1]),  # the others wait for their GPUs
        ([status_of(0), status_of(1), status_of(2)], []),  # different collectives, or a broken network
        ([status_of(0, 10, ""), status_of(1, 10, ""), status_of(2, 10, "")], []),
    ],
)
def test_missing_ranks(answers: Sequence[RankStatus | None], missing: list[int]) -> None:
    assert find_missing_ranks({answer.rank: answer for answer in answers if answer}, len(answers)) == missing


def test_the_flight_recorders_name_a_rank_that_no_stack_shows() -> None:
    """With GPUs all hosts wait for their devices, and none of them is behind."""
    answers = {rank: status_of(rank, 10, "") for rank in range(4)}
    assert find_missing_ranks(answers, 4, [2]) == [2]
    assert find_missing_ranks({0: answers[0], 2: answers[2]}, 3, [2]) == [1]  # a silent rank has no recorder
    text = describe_hang([2], answers, answers, "distributed.timeout = 3 s", ["rank 0 waits in all_reduce"])
    assert text.splitlines()[:2] == [
        "the run hangs: rank 2 did not arrive within distributed.timeout = 3 s",
        "  rank 0 waits in all_reduce",
    ]


def test_a_large_world_is_described_in_few_lines() -> None:
    answers = {rank: status_of(rank, frames=["a.py:1 in save"]) for rank in range(64) if rank not in (5, 9)}
    last_statuses = answers | {5: status_of(5, activity="step 3, logs", frames=["b.py:2 in read"])}
    assert describe_hang([5, 9], answers, last_statuses, "distributed.timeout = 3 s").splitlines() == [
        "the run hangs: ranks 5, 9 did not arrive within distributed.timeout = 3 s",
        "  rank 5 (host1, process 105): silent since 12:00:00, last seen in step 3, logs, in all_reduce, for 5 s",
        "    b.py:2 in read",
        "  rank 9 has not reported since the start",
        "  ranks 0-4, 6-8, 10-63: step 3, saving, in all_reduce, for 5 s",
        "    a.py:1 in save",
    ]
    assert "no rank is behind" in describe_hang([], answers, last_statuses, "distributed.timeout = 3 s")


def test_a_status_survives_json() -> None:
    status = status_of(3, frames=["a.py:1 in f"])
    assert RankStatus(**json.loads(json.dumps(asdict(status)))) == status


def test_collectives_are_recognised_on_the_stack() -> None:
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
    """On rank 0 a background thread waits in a collective, and the loop waits for that thread.

    Rank 1 enters the collective once rank 0 was seen to wait.
    """
    world = World(dist.get_rank(), 1)
    statuses: list[RankStatus] = []
    with Watchdog(world, 100, 100) as watchdog:
        watchdog.at("saving", 7)
        total = torch.ones(1)
        if dist.get_rank() == 1:
            while not seen.exists():
                time.sleep(0.01)
            dist.all_reduce(total)
            return "", ""

        def observe() -> None:
            while not statuses or not statuses[-1].collective:
                statuses.append(watchdog._status())
                time.sleep(0.01)
            seen.touch()

        background = threading.Thread(target=once_per_node, args=(World(), lambda: dist.all_reduce(total)))
        observer = threading.Thread(target=observe)
        observer.start()
        background.start()
        background.join()
        observer.join()
    return str(statuses[-1]), statuses[-1].frames[-1]


def test_a_loop_that_waits_for_a_thread_shows_the_stack_of_both(pool2: Any, tmp_path: Path) -> None:
    (status, innermost), _ = pool2.run(wait_in_a_collective, tmp_path / "seen")
    assert re.fullmatch(r"step 7, saving, in all_reduce, for \d+ s", status)
    assert innermost.startswith("torch/distributed/distributed_c10d.py:")


def hang(folder: Path) -> tuple[str, list[int]]:
    """Rank 1 hangs until both watchdogs would end their processes; `os._exit`, which they call, is replaced."""
    world = detect()
    connect_to_board(world)
    exits: list[int] = []
    reading, writing = os.pipe()

    def note_exit(code: int) -> None:
        exits.append(code)
        (folder / f"left {world.rank}").touch()
        while not all((folder / f"left {rank}").exists() for rank in (0, 1)):
            time.sleep(0.01)
        os.write(writing, b"go on")
        raise SystemExit  # ends only the thread of the watchdog

    watchdog_module.os._exit = note_exit  # type: ignore[assignment]
    message = folder / f"message {world.rank}"
    log = folder / f"rank_{world.rank}.log"
    with message.open("w") as terminal, Watchdog(world, 1, 60, log, terminal.fileno()) as watchdog:
        watchdog.answer_seconds = 4  # on a busy machine a rank may be slow to answer
        watchdog.started = True
        dist.barrier()
        watchdog.at("evaluation", 5)
        if world.rank == 1:
            os.read(reading, 1)
        dist.all_reduce(torch.ones(1))
    return message.read_text(), exits


def test_a_sleeping_rank_is_reported_by_one_rank(tmp_path: Path) -> None:
    with Pool(2) as pool:  # its own pool, because `hang` replaces os._exit
        (first, exits), (second, exits_too) = pool.run(hang, tmp_path)
    assert exits == exits_too == [75]
    (message,) = filter(None, [first, second])  # only one of them reports
    assert re.fullmatch(
        r"shoal: the run hangs: rank 1 did not arrive within distributed\.timeout = 1 s\n"
        r"  rank 0 waits in all_reduce \(number \d+ of group .+, Float \[1\]\), which rank 1 has not called\n"
        r"  rank 1 \(.+, process \d+\): step 5, evaluation, for \d+ s\n"
        r"(    .+\n)*    .*test_watchdog\.py:\d+ in hang\n"
        r"  rank 0 \(.+, process \d+\): step 5, evaluation, in all_reduce, for \d+ s\n"
        r"(    .+\n)*    torch/distributed/distributed_c10d\.py:\d+ in all_reduce\n"
        rf"  the stacks of all threads are in {tmp_path}/rank_<n>\.log, torch's records of collectives in "
        r"flight_<n>\.json\n",
        message,
    )
    for rank in (0, 1):
        log = (tmp_path / f"rank_{rank}.log").read_text()
        assert f"all threads of rank {rank}:\n" in log
        assert 'test_watchdog.py", line' in log
        assert json.loads((tmp_path / f"flight_{rank}.json").read_text())[-1]["entries"]


def test_torchs_timeout_is_longer_than_the_watchdogs() -> None:
    assert group_timeout_seconds(600, 1800) == group_timeout_seconds(1800, 600) > 1800


def test_the_watchdog_keeps_no_tensors_alive() -> None:
    """Frames of the loop refer to its tensors, and the loop rarely collects garbage."""

    def compute(watchdog: Watchdog) -> weakref.ref[torch.Tensor]:
        tensor = torch.ones(1)
        while watchdog._observed is None:
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


def test_a_new_line_or_phase_counts_as_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    watchdog = Watchdog(World(), 0.2, 100)
    watchdog._training_thread = threading.get_ident()
    frames = [("a.py", 1, "f")]
    monkeypatch.setattr(watchdog, "_frames", lambda: frames)
    for _ in range(3):
        watchdog._observe()
    assert watchdog._unchanged_seconds == pytest.approx(2 * watchdog.poll_seconds)
    frames = [("a.py", 2, "f")]
    watchdog._observe()
    assert watchdog._unchanged_seconds == 0
    watchdog._observe()
    watchdog.at("saving", 1)
    watchdog._observe()
    assert watchdog._unchanged_seconds == 0
    assert watchdog.limit_seconds() == 100
    watchdog.started = True
    assert watchdog.limit_seconds() == 0.2


def test_a_missing_board_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shoal.processes.watchdog.board_section", refuse)
    with Watchdog(World(0, 2), 0.1, 0.1, tmp_path / "log") as watchdog:
        watchdog._thread.join()
    assert "Traceback" not in capfd.readouterr().err


def refuse(world: World, purpose: str) -> None:
    raise dist.DistNetworkError("connection refused")


def test_only_processes_of_this_machine_are_killed() -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        kill_local_processes([("another machine", process.pid)])
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
        os.kill(process.pid, 19)  # SIGSTOP
        kill_local_processes([(machine_id(), process.pid)])
        assert process.wait() == -9
