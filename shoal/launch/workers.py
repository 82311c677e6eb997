"""The processes of a run on one machine: starting, watching and ending them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

QUIET_LAUNCHER = ("TORCH_CPP_LOG_LEVEL", "2")
"""A variable for the launcher of several machines, and its value (errors only): torch would print pages when node 0
ends. Workers do not get it."""


class Workers:
    """Processes that are started together, one for each rank. All have ended when the context is left.

    Each has a session of its own: Ctrl-C on a terminal reaches the launcher alone, which passes it on.
    """

    def __init__(self, command: Sequence[str], variables_by_rank: Mapping[int, Mapping[str, str]]):
        """`variables_by_rank` are environment variables for each rank, beside those of this process."""
        self.command, self.variables_by_rank = command, variables_by_rank
        self.failed: dict[int, int] = {}
        """The exit codes of the ranks that failed before `stop` was called."""
        self.succeeded = False
        """True once all have ended well."""
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._kill_at: float | None = None

    def __enter__(self) -> Workers:
        try:
            for rank, variables in self.variables_by_rank.items():
                inherited = {name: value for name, value in os.environ.items() if (name, value) != QUIET_LAUNCHER}
                environment = {**inherited, **variables}
                self._processes[rank] = subprocess.Popen(
                    self.command, env=environment, start_new_session=hasattr(os, "setsid")
                )
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    @property
    def were_stopped(self) -> bool:
        """True if `stop` was called."""
        return self._kill_at is not None

    def are_running(self) -> bool:
        """Returns whether processes are left. Notes the exit codes of those that failed by themselves, and kills those
        whose time to stop is over."""
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        self.succeeded = {*codes.values()} == {0}
        if not self.were_stopped:
            self.failed = {rank: code for rank, code in codes.items() if code}
        if time.monotonic() > (self._kill_at or float("inf")):
            self._send(getattr(signal, "SIGKILL", signal.SIGTERM))
        return None in codes.values()

    def stop(self, number: int, grace_seconds: float) -> None:
        """Sends a signal to all processes, after which they save and exit; kills them after `grace_seconds`."""
        self._kill_at = time.monotonic() + grace_seconds
        self._send(number)

    def kill(self) -> None:
        """Kills all processes, and waits until they have ended."""
        self._kill_at = self._kill_at or time.monotonic()
        self._send(getattr(signal, "SIGKILL", signal.SIGTERM))
        for process in self._processes.values():
            process.wait()

    def _send(self, number: int) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                with suppress(OSError):  # it has just ended
                    if hasattr(os, "killpg"):
                        os.killpg(process.pid, number)
                    else:
                        process.send_signal(number)


def worker_command(arguments: Sequence[str]) -> list[str]:
    """Returns the command of a process that runs `shoal <arguments>` with this interpreter."""
    return [sys.executable, "-m", "shoal", *arguments]
