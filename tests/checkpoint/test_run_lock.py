"""One folder, one run: who is refused, who takes over, and that it is never two."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import PATIENCE_SECONDS, ToyRun

from shoal.checkpoint import find_latest_checkpoint, run_lock
from shoal.checkpoint.run_lock import Holder, RunLock
from shoal.errors import UserError
from shoal.processes.detect import detect

SHOAL = (sys.executable, "-m", "shoal", "train", "run.yaml")


@pytest.fixture
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder is seen to be alive soon, and is not taken for gone on a busy machine."""
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.2)


@pytest.fixture
def soon_stale(quick_beats: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent holder is soon taken for gone."""
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 1.5)


def sleep_by(monkeypatch: pytest.MonkeyPatch, sleep: Callable[[float], None]) -> None:
    """Replaces how a run waits that watches another one's lock."""
    monkeypatch.setattr(run_lock, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on this process is on another machine than whoever came before."""
    return lambda: monkeypatch.setattr(run_lock, "_host", lambda: "elsewhere")


def left_behind(folder: Path, **changes: Any) -> Holder:
    """A lock file whose holder does not touch it any more."""
    holder = replace(Holder.of_this_process(), **changes)
    (folder / "run.lock").write_text(json.dumps({**vars(holder), "heartbeat": "2026-01-01T00:00:00+00:00"}))
    return holder


def holder_of(folder: Path) -> Holder | None:
    return Holder.parse((folder / "run.lock").read_text())


def dead_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_it_is_there_while_held_and_gone_after(tmp_path: Path) -> None:
    with RunLock(tmp_path) as held:
        fields = json.loads((tmp_path / "run.lock").read_text())
        assert fields["pid"] == os.getpid()
        assert {"host", "job", "attempt", "started", "heartbeat"} <= fields.keys()
        held.check()
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("quick_beats")
def test_it_beats(tmp_path: Path) -> None:
    with RunLock(tmp_path) as held:
        first, inode = held.path.stat().st_mtime_ns, held.path.stat().st_ino
        while held.path.stat().st_mtime_ns == first:  # or for ever, if it does not
            time.sleep(0.01)
        assert held.path.stat().st_ino == inode


@pytest.mark.usefixtures("quick_beats")
def test_a_second_run_is_refused_and_told_by_whom(tmp_path: Path) -> None:
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
    left_behind(tmp_path, pid=dead_process())
    sleep_by(monkeypatch, lambda seconds: pytest.fail("it waited"))
    with RunLock(tmp_path) as held:
        assert holder_of(tmp_path) == held.holder


def test_another_process_of_the_same_number_is_not_the_holder(tmp_path: Path) -> None:
    left_behind(tmp_path, process_started="1")  # our own number, but begun long ago
    with RunLock(tmp_path) as held:
        assert holder_of(tmp_path) == held.holder


@pytest.mark.usefixtures("quick_beats")
def test_a_live_holder_elsewhere_is_seen_to_beat(tmp_path: Path, elsewhere: Callable[[], None]) -> None:
    with RunLock(tmp_path) as held:
        elsewhere()
        with pytest.raises(UserError, match="is in use by process"), RunLock(tmp_path):
            pass
        held.check()


@pytest.mark.usefixtures("soon_stale")
@pytest.mark.parametrize("clock_seconds", [0, 100, -100])
def test_a_silent_holder_elsewhere_is_replaced_whatever_its_clock(
    tmp_path: Path, clock_seconds: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its file may bear a time of the future, or long ago: only that it does not change counts."""
    left_behind(tmp_path, host="elsewhere")
    stamp = time.time() + clock_seconds
    os.utime(tmp_path / "run.lock", (stamp, stamp))
    began = time.monotonic()
    with RunLock(tmp_path) as held:
        assert time.monotonic() - began > 0.4
        assert holder_of(tmp_path) == held.holder
    waited = " on elsewhere since" in capsys.readouterr().err
    assert waited == (clock_seconds >= 0)


def test_an_old_stamp_alone_does_not_make_a_holder_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that wakes up beats again: whoever comes first watches for a moment."""
    left_behind(tmp_path, host="elsewhere")
    os.utime(tmp_path / "run.lock", (1, 1))
    sleep_by(monkeypatch, lambda seconds: os.utime(tmp_path / "run.lock"))
    with pytest.raises(UserError, match="in use"), RunLock(tmp_path):
        pass


@pytest.mark.usefixtures("soon_stale")
@pytest.mark.parametrize("content", [b"", b"\x80{}", b"[" * 9000])
def test_a_file_that_makes_no_sense_is_replaced_when_it_is_old(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.lock").write_bytes(content)
    os.utime(tmp_path / "run.lock", (1, 1))
    with RunLock(tmp_path) as held:
        assert holder_of(tmp_path) == held.holder


@pytest.mark.usefixtures("soon_stale")
def test_who_stood_still_and_lost_the_folder_does_not_save(tmp_path: Path, elsewhere: Callable[[], None]) -> None:
    first = RunLock(tmp_path)
    first.acquire()
    first._stop.set()  # as if it were stopped
    assert first._heartbeat_thread is not None
    first._heartbeat_thread.join()
    os.utime(first.path, (1, 1))
    elsewhere()
    with RunLock(tmp_path) as second:
        first._write_heartbeat()  # goes on, and writes no more than its own file
        with pytest.raises(UserError, match=r"was taken over by process \d+ on elsewhere since \S+ while this"):
            first.check()
        first.release()
        second.check()
        assert holder_of(tmp_path) == second.holder


def test_a_deleted_file_is_put_back(tmp_path: Path) -> None:
    with RunLock(tmp_path) as held:
        held.path.unlink()
        held.check()
        assert holder_of(tmp_path) == held.holder
        held.path.unlink()
        tmp_path.rmdir()
        held.check()
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("quick_beats")
def test_without_links_a_new_file_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", no_links)
    left_behind(tmp_path, pid=dead_process())
    with RunLock(tmp_path) as held:
        held.check()
        with pytest.raises(UserError, match="in use"), RunLock(tmp_path):
            pass
    assert not [*tmp_path.iterdir()]


JOBS = [
    ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, True),
    ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, False),
    ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7"}, False),  # twice in one allocation
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


@pytest.mark.usefixtures("quick_beats")
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
    time.sleep(2 * PATIENCE_SECONDS)  # until killed, so that nobody after it finds the folder free


@pytest.mark.parametrize("before", ["nothing", "a dead holder"])
def test_of_many_that_start_at_once_one_wins(tmp_path: Path, before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.05)
    fork = multiprocessing.get_context("fork")
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        if before != "nothing":
            left_behind(folder, pid=dead_process())
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
def running(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> Iterator[subprocess.Popen[str]]:
    """A run that has saved something and would go on for minutes."""
    change_recipe('return {"x"', 'import time; time.sleep(0.02); return {"x"')
    command = (*SHOAL, "training.max_steps=5000")
    with subprocess.Popen(
        command, cwd=toy.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            end = time.monotonic() + PATIENCE_SECONDS
            while find_latest_checkpoint(toy.output) is None:
                assert process.poll() is None
                assert time.monotonic() < end
                time.sleep(0.02)
            yield process
        finally:
            process.kill()


def test_two_runs_on_one_folder(toy: ToyRun, running: subprocess.Popen[str]) -> None:
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


def test_a_run_that_was_stopped_for_long_finds_the_folder_taken(
    toy: ToyRun, running: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    running.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 0.5)
    with RunLock(toy.output) as taken:
        running.send_signal(signal.SIGCONT)
        _, errors = running.communicate(timeout=PATIENCE_SECONDS)
        taken.check()
    assert running.returncode == 2
    assert errors.startswith(f"shoal: error: {toy.output} was taken over by process {os.getpid()} on ")
    assert len(errors.splitlines()) == 1
