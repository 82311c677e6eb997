"""Starts a run on this machine; on several machines the user runs the same command on each."""

from __future__ import annotations

from shoal.config import Run
from shoal.launch.launcher import start
from shoal.launch.targets import Launch


def submit(run: Run, launch: Launch, dry_run: bool) -> int:
    """Starts the processes of this machine, and returns when the run has ended."""
    return start(run, launch.command)
