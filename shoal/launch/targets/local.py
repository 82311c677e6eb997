"""Starts a run on this machine; on several machines the user runs the same command on each."""

from __future__ import annotations

import shlex

from shoal.config import Run
from shoal.launch.launcher import start, worker_variables
from shoal.launch.targets import Launch
from shoal.launch.workers import worker_command
from shoal.processes.detect import detect


def submit(run: Run, launch: Launch, dry_run: bool) -> int:
    """Starts the processes of this machine, and returns when the run has ended."""
    world = detect(launch=run.config.launch)
    if not dry_run:
        return start(run, world, launch.command)
    variables = worker_variables(world.starts, world.rank, world.size, world.address, world.port, attempt=0)
    for by_name in variables.values() if world.starts else [{}]:
        shown = [f"{name}={value}" for name, value in {**run.config.launch.env, **by_name}.items()]
        print(shlex.join(["env", *shown, *worker_command(launch.command)]))
    return 0
