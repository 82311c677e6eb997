"""Ends the processes of a run whose launcher was killed. The launcher runs this file as a script, without torch.

The kernel sends SIGTERM to each worker when the launcher dies, and the workers save and exit. A stopped worker handles
no signal, though, and the others would wait for it in a collective, with the run folder locked. So the guard continues
stopped workers, and kills those that have not ended after as long as the launcher itself would have waited.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_VARIABLE = "SHOAL_GUARD"
"""The environment variable by which the guard recognises the processes of its run."""
_DISMISS = b"the launcher has ended its processes"
_POLL_SECONDS = 0.2


@contextmanager
def guarded_workers(grace_seconds: float) -> Iterator[None]:
    """Processes that are started inside this context end if this process is killed. Works on Linux only."""
    if sys.platform != "linux":
        yield
        return
    token = secrets.token_hex(16)
    guard = subprocess.Popen(
        # Isolated mode, and no site-packages: the guard needs the standard library alone.
        [sys.executable, "-I", "-S", __file__, token, str(grace_seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # what kills the launcher's process group must not kill the guard
        cwd="/",
    )
    os.environ[_VARIABLE] = token
    try:
        yield
    finally:
        del os.environ[_VARIABLE]
        with suppress(OSError):  # somebody killed the guard
            guard.communicate(_DISMISS)


def end_orphans(token: str, grace_seconds: float) -> None:
    """Waits until the launcher has ended; unless it dismissed the guard, ends the processes that have the token."""
    if sys.stdin.buffer.read() == _DISMISS:  # the kernel closes the pipe when the launcher dies
        return
    kill_at = time.monotonic() + grace_seconds
    give_up_at = kill_at + 60  # a process that waits for a broken file system cannot be killed
    while (orphans := _processes_with(token)) and time.monotonic() < give_up_at:
        for pid in orphans:
            with suppress(OSError):  # it has just ended
                os.kill(pid, signal.SIGCONT if time.monotonic() < kill_at else signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _processes_with(token: str) -> list[int]:
    """Returns the processes of this user that have the token in their environment."""
    found, entry = [], f"{_VARIABLE}={token}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended, or belongs to another user
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


if __name__ == "__main__":
    end_orphans(sys.argv[1], float(sys.argv[2]))
