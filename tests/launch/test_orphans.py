"""Processes whose parent was killed end too, also those that are stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from conftest import PATIENCE_SECONDS, ToyRun
from launched import listening_addresses
from pool import start_process

from shoal.config import load_run
from shoal.launch import guard, launcher
from shoal.launch.spawn import run_function
from shoal.launch.worker import _exit_with_launcher
from shoal.processes.world import World

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def state(pid: int) -> str:
    """Returns the state of a process as one letter: T is stopped, Z or an empty string is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


STOPS_ITSELF = "import os, signal, time; os.kill(os.getpid(), signal.SIGSTOP); time.sleep(1000)"


@pytest.mark.parametrize(
    ("grace_seconds", "word", "expected"), [(0, b"", "Z"), (1000, b"", "S"), (0, guard._DISMISS, "T")]
)
def test_the_guard_continues_stopped_processes_then_kills_them_unless_it_was_dismissed(
    grace_seconds: float, word: bytes, expected: str
) -> None:
    token = f"of a test in process {os.getpid()}"
    environment = {**os.environ, guard._VARIABLE: token}
    with subprocess.Popen([sys.executable, "-c", STOPS_ITSELF], env=environment) as worker:
        try:
            wait_for(lambda: state(worker.pid) == "T")
            command = [sys.executable, guard.__file__, token, str(grace_seconds)]
            with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
                try:
                    assert process.stdin is not None
                    process.stdin.write(word)
                    process.stdin.close()  # as when the launcher dies
                    if expected == "T":
                        process.wait(PATIENCE_SECONDS)
                    wait_for(lambda: state(worker.pid) == expected)
                finally:
                    process.kill()
        finally:
            worker.kill()


def work(folder: Path) -> None:
    (folder / f"pid {os.environ['RANK']}").write_text(str(os.getpid()))
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)


def test_the_processes_of_a_function_end_with_their_parent_also_when_they_are_stopped(tmp_path: Path) -> None:
    parent = start_process(run_function, work, (tmp_path,), 2, "fork")
    try:
        wait_for(lambda: [path for path in tmp_path.glob("pid *") if path.read_text()][1:])
        pids = [int((tmp_path / f"pid {rank}").read_text()) for rank in range(2)]
        wait_for(lambda: state(pids[1]) == "T")
    finally:
        parent.kill()
    try:
        wait_for(lambda: not any(state(pid) not in ("", "Z") for pid in pids))
    finally:
        for pid in pids:
            if state(pid):
                os.kill(pid, signal.SIGKILL)


def launch_shells(config: Path, grace_seconds: str) -> None:
    """Runs shoal's launcher; its two processes are shells, which start at once."""
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = grace_seconds
    with patch.object(launcher, "worker_command", lambda arguments: ["/bin/sh", "-c", WAITS]):
        sys.exit(
            launcher.start(load_run(config, ["launch.procs_per_node=2"]), World(address="127.0.0.1", starts=2), [])
        )


WAITS = "trap 'touch saved_$RANK; exit 143' TERM; echo $$ > pid_$RANK; while :; do sleep 0.05; done"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1])
def test_a_launcher_that_gets_a_signal_ends_its_processes(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """It passes signals on. If it was killed, the guard ends the processes. Its board listens on loopback alone."""
    is_killed = number == signal.SIGKILL
    monkeypatch.chdir(toy.folder)
    process = start_process(launch_shells, toy.config, "0" if is_killed else str(PATIENCE_SECONDS))
    try:
        files = [toy.folder / f"pid_{rank}" for rank in range(2)]
        wait_for(lambda: not process.is_alive() or all(file.exists() and file.read_text() for file in files))
        pids = [int(file.read_text()) for file in files]
        assert listening_addresses([process.pid]) == {"0100007F"}  # 127.0.0.1
        if is_killed:
            os.kill(pids[1], signal.SIGSTOP)
        os.kill(process.pid, number)
        process.join(PATIENCE_SECONDS)
        assert process.exitcode == (-number if is_killed else 128 + signal.SIGTERM)
        wait_for(lambda: not any(state(pid) not in ("", "Z") for pid in pids))
    finally:
        process.kill()
    assert [(toy.folder / f"saved_{rank}").exists() for rank in range(2)] == [not is_killed] * 2


def fork_worker(folder: Path) -> None:
    """Forks a process that saves when it gets SIGTERM, and leaves it alone."""
    if os.fork():
        time.sleep(1000)
    signal.signal(signal.SIGTERM, lambda number, frame: ((folder / "saved").touch(), os._exit(0)))
    _exit_with_launcher(World(launcher_pid=os.getppid()))
    (folder / "ready").touch()
    time.sleep(1000)


def test_a_worker_saves_when_its_launcher_was_killed(tmp_path: Path) -> None:
    process = start_process(fork_worker, tmp_path)
    wait_for((tmp_path / "ready").exists)
    process.kill()
    wait_for((tmp_path / "saved").exists)


def fail() -> None:
    raise ValueError(os.environ["MASTER_PORT"])


def connect_after_an_error() -> None:
    try:
        run_function(fail, (), 1, "fork")
    except ValueError as error:
        with socket.socket() as probe:
            print(probe.connect_ex(("127.0.0.1", int(str(error)))) != 0)


def test_an_error_of_a_function_does_not_keep_the_board_open(tmp_path: Path) -> None:
    """The next launch in the same process may fork, and a forked process cannot close the board of its parent."""
    out, err = tmp_path / "out", tmp_path / "err"
    start_process(connect_after_an_error, out=out, err=err).join(PATIENCE_SECONDS)
    assert out.read_text() == "True\n", err.read_text()
