"""Starts the processes of one machine with torch's own elastic launcher, and starts them again when one dies."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shoal.checkpoint import CheckpointManager
from shoal.config import Run
from shoal.errors import UserError
from shoal.launch.worker import first_error
from shoal.parallel.world import free_port, port_is_taken

STOPPED = {128 + signal.SIGINT, 128 + signal.SIGTERM}
"""Exit codes of a worker that was asked to stop, saved and left: nothing to repair."""


def wants_processes(run: Run) -> bool:
    """Whether this process is to start others instead of training itself."""
    return "LOCAL_RANK" not in os.environ and run.config.launch.processes > 1


def start(run: Run, arguments: Sequence[str]) -> int:
    """Runs `shoal <arguments>` in every process; returns the exit code for the user's shell."""
    launch = run.config.launch
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // launch.procs_per_node)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we say it in one line ourselves
    manager = CheckpointManager(run.config.output_dir)
    for attempt in range(launch.max_restarts + 1):
        run_id = uuid.uuid4().hex[:8]
        before = manager.steps()
        try:
            elastic_launch(_launch_config(run, run_id), sys.executable)("-m", "shoal", *arguments)
            return 0
        except SignalException as stopped:
            return 128 + int(stopped.sigval)
        except ChildFailedError as failed:
            rank, failure = failed.get_first_failure()
            if failure.exitcode in STOPPED:
                return failure.exitcode
            error = first_error(run, run_id)
            if error is not None and error.by_user:
                return 2
            if error is not None and manager.steps() == before:
                return 1  # an exception that would only come again; the worker has told it
            what = f"rank {rank} {_how_it_ended(failure)}"
            if attempt == launch.max_restarts:
                print(f"shoal: {what}; giving up after {launch.max_restarts} restarts", file=sys.stderr)
                return 1
            print(
                f"shoal: {what}; starting again from the last checkpoint ({attempt + 1} of {launch.max_restarts})",
                file=sys.stderr,
                flush=True,
            )
    raise AssertionError("unreachable")


def _launch_config(run: Run, run_id: str) -> LaunchConfig:
    launch = run.config.launch
    if launch.nodes == 1:
        # A rendezvous of its own for every attempt, on a free port of the loopback interface: nothing stale in it.
        endpoint, local_address, is_host = f"127.0.0.1:{free_port()}", "127.0.0.1", True
    else:
        address, port, node_rank = _read_node_variables(launch.nodes)
        endpoint, local_address, is_host = f"{address}:{port}", None, node_rank == 0
        run_id = run.config.experiment.name
    return LaunchConfig(
        min_nodes=launch.nodes,
        max_nodes=launch.nodes,
        nproc_per_node=launch.procs_per_node,
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint,
        rdzv_configs={"is_host": is_host},
        local_addr=local_address,
        run_id=run_id,
        max_restarts=0 if launch.nodes == 1 else launch.max_restarts,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(),
    )


def _read_node_variables(nodes: int) -> tuple[str, int, int]:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if name not in os.environ]
    if missing:
        raise UserError(
            f"launch.nodes = {nodes} needs MASTER_ADDR, MASTER_PORT and NODE_RANK in the environment of every node; "
            f"missing: {', '.join(missing)}"
        )
    address, port, node_rank = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], os.environ["NODE_RANK"]
    if not port.isdigit() or not node_rank.isdigit() or int(node_rank) >= nodes:
        raise UserError(f"MASTER_PORT={port}, NODE_RANK={node_rank}: both are numbers, and NODE_RANK is below {nodes}")
    if node_rank == "0" and port_is_taken(int(port)):
        raise UserError(f"MASTER_PORT={port} is taken on this machine; choose another port on every node")
    return address, int(port), int(node_rank)


def _how_it_ended(failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        return f"was killed by {signal.Signals(-failure.exitcode).name}"
    return f"failed with exit code {failure.exitcode}"
