"""The run lock: which runs are refused, which take over, and that two never hold one folder."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import PATIENCE_SECONDS, ForkedShoal, ToyRun

from shoal.checkpoint import find_latest_checkpoint, run_lock
from shoal.checkpoint.run_lock import Holder, RunLock
from shoal.errors import UserError
from shoal.processes.detect import detect


@pytest.fixture
def quick_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats come quickly, but a holder on a busy machine does not count as dead."""
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.2)


@pytest.fixture
def quickly_stale(quick_heartbeats: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder without heartbeats counts as dead after 1.5 seconds."""
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 1.5)


def replace_sleep(monkeypatch: pytest.MonkeyPatch, sleep: Callable[[float], None]) -> None:
    """Replaces the sleep of a run that watches the lock of another one."""
    monkeypatch.setattr(run_lock, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))


@pytest.fixture
def move_to_another_machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Returns a function that makes this process appear to be on another machine."""
    return lambda: monkeypatch.setattr(run_lock, "_host", lambda: "elsewhere")


def write_abandoned_lock(folder: Path, **changes: Any) -> Holder:
    """Writes a lock file whose holder writes no heartbeats."""
    holder = replace(Holder.of_this_process(), **changes)
    (folder / "run.lock").write_text(json.dumps({**vars(holder), "heartbeat": "2026-01-01T00:00:00+00:00"}))
    return holder


def holder_of(folder: Path) -> Holder | None:
    return Holder.parse((folder / "run.lock").read_text())


def id_of_dead_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_the_file_exists_while_the_lock_is_held(tmp_path: Path) -> None:
    with RunLock(tmp_path) as held:
        fields = json.loads((tmp_path / "run.lock").read_text())
        assert fields["pid"] == os.getpid()
        assert {"host", "job", "attempt", "started", "heartbeat"} <= fields.keys()
        held.check()
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("quick_heartbeats")
def test_the_holder_writes_heartbeats(tmp_path: Path) -> None:
    with RunLock(tmp_path) as held:
        first, inode = held.path.stat().st_mtime_ns, held.path.stat().st_ino
        while held.path.stat().st_mtime_ns == first:  # the test times out if it never changes
            time.sleep(0.01)
        assert held.path.stat().st_ino == inode


@pytest.mark.usefixtures("quick_heartbeats")
def test_a_second_run_is_refused_with_the_name_of_the_holder(tmp_path: Path) -> None:
    with RunLock(tmp_path) as held:
        with pytest.raises(UserError) as refused, RunLock(tmp_path):
            pass
        words = str(refused.value)
        assert (
            f"is in use by process {os.getpid()} on {held.holder.host} since {held.holder.started}, last seen" in words
        )
        assert "choose another experiment.output_dir" in words
        assert "\n" not in words
        held.check()
        assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]


def test_a_dead_process_of_this_machine_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_abandoned_lock(tmp_path, pid=id_of_dead_process())
    replace_sleep(monkeypatch, lambda seconds: pytest.fail("it waited"))
    with RunLock(tmp_path) as held:
        assert holder_of(tmp_path) == held.holder


def test_a_later_process_with_the_same_id_is_not_the_holder(tmp_path: Path) -> None:
    write_abandoned_lock(tmp_path, process_started="1")  # this process id, but started long ago
    with RunLock(tmp_path) as held:
        assert holder_of(tmp_path) == held.holder


@pytest.mark.usefixtures("quick_heartbeats")
def test_heartbeats_of_another_machine_are_seen(tmp_path: Path, move_to_another_machine: Callable[[], None]) -> None:
    with RunLock(tmp_path) as held:
        move_to_another_machine()
        with pytest.raises(UserError, match="is in use by process"), RunLock(tmp_path):
            pass
        held.check()


@pytest.mark.usefixtures("quickly_stale")
@pytest.mark.parametrize("clock_seconds", [pytest.param(0, marks=pytest.mark.slow), 100, -100])
def test_a_holder_without_heartbeats_is_replaced_whatever_its_clock(
    tmp_path: Path, clock_seconds: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """The modification time may be in the future or long ago: it only counts that it does not change."""
    write_abandoned_lock(tmp_path, host="elsewhere")
    stamp = time.time() + clock_seconds
    os.utime(tmp_path / "run.lock", (stamp, stamp))
    began = time.monotonic()
    with RunLock(tmp_path) as held:
        assert time.monotonic() - began > 0.4
        assert holder_of(tmp_path) == held.holder
    waited = " on elsewhere since" in capsys.readouterr().err
    assert waited == (clock_seconds >= 0)


def test_an_old_modification_time_alone_does_not_prove_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A suspended machine that wakes up writes heartbeats again, so the second run watches for a while."""
    write_abandoned_lock(tmp_path, host="elsewhere")
    os.utime(tmp_path / "run.lock", (1, 1))
    replace_sleep(monkeypatch, lambda seconds: os.utime(tmp_path / "run.lock"))
    with pytest.raises(UserError, match="in use"), RunLock(tmp_path):
        pass


@pytest.mark.usefixtures("quickly_stale")
@pytest.mark.parametrize("content", [b"", b"\x80{}", b"[" * 9000])
def test_an_old_file_with_invalid_content_is_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.lock").write_bytes(content)
    os.utime(tmp_path / "run.lock", (1, 1))
    with RunLock(tmp_path) as held:
        assert holder_of(tmp_path) == held.holder


@pytest.mark.usefixtures("quickly_stale")
def test_a_suspended_holder_that_lost_the_lock_is_refused(
    tmp_path: Path, move_to_another_machine: Callable[[], None]
) -> None:
    first = RunLock(tmp_path)
    first.acquire()
    first._stop.set()  # as if it were suspended
    assert first._heartbeat_thread is not None
    first._heartbeat_thread.join()
    os.utime(first.path, (1, 1))
    move_to_another_machine()
    with RunLock(tmp_path) as second:
        first._write_heartbeat()  # writes only into its own file
        with pytest.raises(UserError, match=r"was taken over by process \d+ on elsewhere since \S+ while this"):
            first.check()
        first.release()
        second.check()
        assert holder_of(tmp_path) == second.holder


def test_a_deleted_lock_file_is_restored(tmp_path: Path) -> None:
    with RunLock(tmp_path) as held:
        held.path.unlink()
        held.check()
        assert holder_of(tmp_path) == held.holder
        held.path.unlink()
        tmp_path.rmdir()
        held.check()
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("quick_heartbeats")
def test_the_lock_works_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", no_links)
    write_abandoned_lock(tmp_path, pid=id_of_dead_process())
    with RunLock(tmp_path) as held:
        held.check()
        with pytest.raises(UserError, match="in use"), RunLock(tmp_path):
            pass
    assert not [*tmp_path.iterdir()]


JOBS = [
    ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, True),
    ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, False),
    ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7"}, False),  # two runs in one allocation
    ({"TORCHELASTIC_RUN_ID": "x"}, {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "2"}, True),
    ({"TORCHELASTIC_RUN_ID": "none"}, {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"}, True),
    (
        {"SHOAL_LAUNCHER": "11", "TORCHELASTIC_RUN_ID": "attempt 9"},
        {"SHOAL_LAUNCHER": "11", "TORCHELASTIC_RUN_ID": "attempt 10"},
        True,
    ),
    (
        {"SHOAL_LAUNCHER": "11", "TORCHELASTIC_RUN_ID": "attempt 0"},
        {"SHOAL_LAUNCHER": "12", "TORCHELASTIC_RUN_ID": "attempt 1"},
        False,
    ),
    ({}, {}, False),
]


@pytest.mark.usefixtures("quick_heartbeats")
@pytest.mark.parametrize(("before", "after", "takes_over"), JOBS)
def test_a_later_attempt_of_the_same_job_takes_over_at_once(
    tmp_path: Path, before: dict[str, str], after: dict[str, str], takes_over: bool
) -> None:
    earlier, later = detect(before), detect(after)
    with RunLock(tmp_path, earlier.job, earlier.attempt) as first:
        if takes_over:
            with RunLock(tmp_path, later.job, later.attempt) as second:
                second.check()
                with pytest.raises(UserError, match="taken over"):
                    first.check()
        else:
            with pytest.raises(UserError, match="in use"), RunLock(tmp_path, later.job, later.attempt):
                pass
            first.check()


def _contend(folder: Path, start: Any, results: Any) -> None:
    held = RunLock(folder)
    start.wait()
    try:
        held.acquire()
    except UserError:
        results.put("refused")
        return
    results.put("held")
    time.sleep(2 * PATIENCE_SECONDS)  # until it is killed, so that no other process finds the folder free


@pytest.mark.parametrize("before", [pytest.param("nothing", marks=pytest.mark.slow), "a dead holder"])
def test_of_many_runs_that_start_at_once_one_gets_the_lock(
    tmp_path: Path, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.05)
    fork = multiprocessing.get_context("fork")
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        if before != "nothing":
            write_abandoned_lock(folder, pid=id_of_dead_process())
        start, results = fork.Barrier(8), fork.Queue()
        processes = [fork.Process(target=_contend, args=(folder, start, results), daemon=True) for _ in range(8)]
        for process in processes:
            process.start()
        try:
            assert sorted(results.get(timeout=PATIENCE_SECONDS) for _ in processes) == ["held"] + ["refused"] * 7
        finally:
            for process in processes:
                process.kill()
                process.join()


# Whole runs


@pytest.fixture
def running(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> Iterator[ForkedShoal]:
    """Starts a run that has saved a checkpoint and would train for minutes."""
    change_recipe('return {"x"', 'import time; time.sleep(0.02); return {"x"')
    process = toy.fork("train", "run.yaml", "training.max_steps=5000")
    try:
        end = time.monotonic() + PATIENCE_SECONDS
        while find_latest_checkpoint(toy.output) is None:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.wait()


def test_two_runs_on_one_folder(toy: ToyRun, running: ForkedShoal) -> None:
    before = (toy.output / "config.yaml").read_text()
    second = toy.call("train", "run.yaml", "logging.every=7")
    assert second.returncode == 2
    assert second.stderr.startswith(f"shoal: error: experiment.output_dir = '{toy.output}' is in use by process ")
    assert f" {running.pid} on " in second.stderr
    assert len(second.stderr.splitlines()) == 1
    assert (toy.output / "config.yaml").read_text() == before, "the second wrote nothing"
    running.kill()
    latest = find_latest_checkpoint(toy.output)
    assert latest is not None
    assert (toy.output / "run.lock").exists()
    third = toy.train(f"training.max_steps={int(latest.name[5:]) + 2}")
    assert third.first_step >= 2
    assert not (toy.output / "run.lock").exists()


def test_a_run_that_was_suspended_for_long_ends(
    toy: ToyRun, running: ForkedShoal, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 0.5)
    with RunLock(toy.output) as taken:
        running.send_signal(signal.SIGCONT)
        _, errors = running.communicate()
        taken.check()
    assert running.returncode == 2
    assert errors.startswith(f"shoal: error: {toy.output} was taken over by process {os.getpid()} on ")
    assert len(errors.splitlines()) == 1
