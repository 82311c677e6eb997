"""Processes whose parent was killed end too, also those that are stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import PATIENCE_SECONDS

import shoal
from shoal.launch import guard

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


SPAWNS = f"""
import os, signal, sys, time
sys.path.insert(0, {str(Path(shoal.__file__).parent.parent)!r})
from pathlib import Path
from shoal.launch.spawn import run_function

def work(folder):
    Path(folder, "pid " + os.environ["RANK"]).write_text(str(os.getpid()))
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)

run_function(work, (sys.argv[1],), 2, "fork")
"""


def test_the_processes_of_a_function_end_with_their_parent_also_when_they_are_stopped(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", SPAWNS, str(tmp_path)]) as parent:
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


FAILS = f"""
import os, socket, sys
sys.path.insert(0, {str(Path(shoal.__file__).parent.parent)!r})
from shoal.launch.spawn import run_function

def fail():
    raise ValueError(os.environ["MASTER_PORT"])

try:
    run_function(fail, (), 1, "fork")
except ValueError as error:
    with socket.socket() as probe:
        print(probe.connect_ex(("127.0.0.1", int(str(error)))) != 0)
"""


def test_an_error_of_a_function_does_not_keep_the_board_open() -> None:
    """The next launch in the same process may fork, and a forked process cannot close the board of its parent."""
    result = subprocess.run([sys.executable, "-c", FAILS], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert result.stdout == "True\n", result.stderr
