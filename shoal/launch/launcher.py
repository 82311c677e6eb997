"""Starts the processes of a machine with torch's elastic launcher, and restarts all of them when one dies."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Event, Thread
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shoal.config import Run
from shoal.errors import UserError, printable
from shoal.launch.guard import guarded_workers
from shoal.launch.worker import FINAL_EXIT_CODE, log_path
from shoal.processes.board import HANG_REPORT, connect_to_board
from shoal.processes.detect import detect_launchers
from shoal.processes.group import LOST_PEERS_EXIT_CODE, describe_exit
from shoal.processes.watchdog import kill_local_processes
from shoal.processes.world import World

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""A worker that gets one of these signals saves and exits with 128 + its number. It is not restarted."""

DISTANCE_FROM_CAUSE = {LOST_PEERS_EXIT_CODE: 1, -signal.SIGABRT: 2, -signal.SIGINT: 3, -signal.SIGTERM: 4}
"""When one process dies, its peers fail or are stopped. The exit code with the lowest number here is the likely cause.

Other exit codes have the number 0. NCCL calls abort() when it loses a peer.
"""


def start(run: Run, arguments: Sequence[str]) -> int:
    """Runs `shoal <arguments>` in every process of this machine, and returns the exit code for the user's shell."""
    launch = run.config.launch
    world = detect_launchers(launch.nodes, launch.procs_per_node)
    try:
        board = connect_to_board(world, run.config.distributed.init_timeout)  # open until the run has ended
        os.environ["SHOAL_LAUNCHER"] = str(os.getpid())
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // launch.procs_per_node)))
        # torch's 30 s do not suffice to save large models.
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")
        logging.disable(logging.ERROR)  # hides messages of torch's launcher; shoal prints one line instead
        with guarded_workers(float(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])):
            return _run_until_it_ends(run, world.rank, board, arguments)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except dist.DistError as error:
        if launch.nodes == 1:
            raise
        raise UserError(
            f"launch.nodes = {launch.nodes}: other machines did not connect in time, or the connection was lost "
            f"({str(error).splitlines()[0]}); run the same command on all of them, with "
            f"MASTER_ADDR = {world.address}, MASTER_PORT = {world.port}"
        ) from None
    finally:
        logging.disable(logging.NOTSET)


def _run_until_it_ends(run: Run, node: int, board: Any, arguments: Sequence[str]) -> int:
    """Starts the run again and again, until it ends well or must not be restarted; returns the exit code."""
    max_restarts = run.config.launch.max_restarts
    # The number of the attempt is on the board, so that a machine that starts late takes part in the same attempt.
    for attempt in range(int(board.compare_set("attempt", "", "0")), max_restarts + 1):
        run_id = f"attempt {attempt}"
        report_key = HANG_REPORT.format(World(run_id=run_id).attempt_name)
        exit_codes = _run_attempt(run, node, board, run_id, report_key, arguments)
        if not exit_codes:
            return 0
        # An error that would come again; the worker has printed it. It comes first: torch then stops the other workers,
        # whose exit codes look as if somebody had stopped the run.
        if board.check([FINAL_EXIT_CODE]):
            return int(board.get(FINAL_EXIT_CODE))
        codes = {*exit_codes.values()}
        if codes <= {-number for number in STOP_SIGNALS}:  # the signal came before the first step
            codes = {128 - code for code in codes}
        if stopped := codes & {128 + number for number in STOP_SIGNALS}:
            return min(stopped)
        board.compare_set("attempt", str(attempt), str(attempt + 1))
        restarting = f"starting again, from the last checkpoint if there is one ({attempt + 1} of {max_restarts})"
        next_action = restarting if attempt < max_restarts else f"giving up after {max_restarts} restarts"
        cause = printable(_describe_cause(exit_codes, run, board, report_key))
        print(f"shoal: {cause}; {next_action}", file=sys.stderr, flush=True)
    return 1


def _run_attempt(
    run: Run, node: int, board: Any, run_id: str, report_key: str, arguments: Sequence[str]
) -> dict[int, int]:
    """Runs the processes of this machine until they end; returns the exit codes of those that failed, by rank."""
    # Schedulers send SIGUSR1 as a warning. torch forwards SIGTERM to the workers, which treat both alike.
    signal.signal(signal.SIGUSR1, lambda *_: signal.raise_signal(signal.SIGTERM))
    for number in (signal.SIGINT, signal.SIGTERM):  # a Python handler would not run while torch waits for machines
        signal.signal(number, signal.SIG_DFL)
    launch, ended = run.config.launch, Event()
    if launch.nodes > 1:
        Thread(target=_kill_silent_workers, args=(board.clone(), report_key, ended), daemon=True).start()
    try:
        with tempfile.TemporaryDirectory(prefix="shoal-") as scratch:
            config = LaunchConfig(
                min_nodes=launch.nodes,
                max_nodes=launch.nodes,
                nproc_per_node=launch.procs_per_node,
                rdzv_backend="static",
                rdzv_endpoint=f"{board.host}:{board.port}",
                rdzv_configs={"rank": node, "timeout": int(run.config.distributed.init_timeout)},
                local_addr=board.host,
                run_id=run_id,
                max_restarts=0,  # torch would neither name the rank that died nor know which errors come again
                monitor_interval=0.1,
                logs_specs=DefaultLogsSpecs(log_dir=scratch),
            )
            elastic_launch(config, sys.executable)("-m", "shoal", *arguments)
    except ChildFailedError as failed:
        return {rank: failure.exitcode for rank, failure in failed.failures.items()}
    finally:
        ended.set()
    return {}


def _kill_silent_workers(board: Any, report_key: str, ended: Event) -> None:
    """Kills the processes of this machine that a hang report lists as silent, once there is one.

    Workers do this for other workers of their machine; the launcher does it for a machine on which all are silent.
    """
    with suppress(dist.DistError):
        while not ended.wait(1):
            if board.check([report_key]):
                kill_local_processes(json.loads(board.get(report_key))["silent"])
                break


def _describe_cause(exit_codes: Mapping[int, int], run: Run, board: Any, report_key: str) -> str:
    """Returns which rank failed first, and how."""
    if board.check([report_key]):  # the workers have printed what hangs, and have killed each other
        return f"{json.loads(board.get(report_key))['who']} hung"
    rank = min(exit_codes, key=lambda rank: DISTANCE_FROM_CAUSE.get(exit_codes[rank], 0))
    lost = f"lost the connection to other ranks (see {log_path(run, rank)})"
    return f"rank {rank} {lost if exit_codes[rank] == LOST_PEERS_EXIT_CODE else describe_exit(exit_codes[rank])}"
