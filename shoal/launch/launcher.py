"""Starts the processes of a machine with torch's own elastic launcher, and starts them again when one dies."""

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
from shoal.errors import UserError
from shoal.launch.worker import ENDING, log_path
from shoal.processes.board import HUNG, board_of
from shoal.processes.detect import detect_launchers, is_worker
from shoal.processes.group import LOST_PEERS, say_exit
from shoal.processes.watchdog import kill_here
from shoal.processes.world import World

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""A worker that was asked to stop by one of these saves and leaves with 128 + its number: nothing to repair."""

CONSEQUENCES = {LOST_PEERS: 1, -signal.SIGABRT: 2, -signal.SIGINT: 3, -signal.SIGTERM: 4}
"""When one process dies its peers fail too, or are ended: exit codes by how far each is from the cause.

NCCL aborts when it loses a peer."""


def wants_processes(run: Run) -> bool:
    """Whether this process is to start others instead of training itself."""
    return not is_worker() and run.config.launch.processes > 1


def start(run: Run, arguments: Sequence[str]) -> int:
    """Runs `shoal <arguments>` in every process; returns the exit code for the user's shell."""
    launch = run.config.launch
    world = detect_launchers(launch.nodes, launch.procs_per_node)
    board = board_of(world, run.config.distributed.init_timeout)  # kept by the first machine, as long as the run lasts
    os.environ["SHOAL_LAUNCHER"] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // launch.procs_per_node)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")  # a large model is not saved in torch's 30 s
    logging.disable(logging.ERROR)  # of torch's launcher: we say it in one line ourselves
    try:
        return _run_until_it_ends(run, world.rank, board, arguments)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except dist.DistError as error:
        if launch.nodes == 1:
            raise
        raise UserError(
            f"launch.nodes = {launch.nodes}, but the other machines did not come, or the one at {world.address} left: "
            f"{str(error).splitlines()[0]}"
        ) from None


def _run_until_it_ends(run: Run, node: int, board: Any, arguments: Sequence[str]) -> int:
    max_restarts = run.config.launch.max_restarts
    first = int(board.compare_set("attempt", "", "0"))  # of all machines: one that comes late joins in
    for attempt in range(first, max_restarts + 1):
        run_id = f"attempt {attempt}"
        hung = HUNG.format(World(run_id=run_id).attempt_name)
        exit_codes = _run_attempt(run, node, board, run_id, hung, arguments)
        if not exit_codes:
            return 0
        codes = {*exit_codes.values()}
        if codes <= {-number for number in STOP_SIGNALS}:  # before there was anything to save
            codes = {128 - code for code in codes}
        if stopped := codes & {128 + number for number in STOP_SIGNALS}:
            return min(stopped)
        if board.check([ENDING]):  # an error that would only come again; the worker has told it
            return int(board.get(ENDING))
        board.compare_set("attempt", str(attempt), str(attempt + 1))
        again = f"starting again, from the last checkpoint if there is one ({attempt + 1} of {max_restarts})"
        then = again if attempt < max_restarts else f"giving up after {max_restarts} restarts"
        print(f"shoal: {_say_cause(exit_codes, run, board, hung)}; {then}", file=sys.stderr, flush=True)
    return 1


def _run_attempt(run: Run, node: int, board: Any, run_id: str, hung: str, arguments: Sequence[str]) -> dict[int, int]:
    """Runs the processes of this machine to their end; returns the exit codes of all that failed, by rank."""
    # Schedulers warn by SIGUSR1. torch passes SIGTERM on to the workers, and it means the same to them.
    signal.signal(signal.SIGUSR1, lambda *_: signal.raise_signal(signal.SIGTERM))
    for number in (signal.SIGINT, signal.SIGTERM):  # while torch waits for other machines, it sees no handler
        signal.signal(number, signal.SIG_DFL)
    launch, ended = run.config.launch, Event()
    if launch.nodes > 1:
        Thread(target=_end_silent_workers, args=(board.clone(), hung, ended), daemon=True).start()
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
                max_restarts=0,  # it would not say who died, nor know what is worth repeating
                monitor_interval=0.1,
                logs_specs=DefaultLogsSpecs(log_dir=scratch),
            )
            elastic_launch(config, sys.executable)("-m", "shoal", *arguments)
    except ChildFailedError as failed:
        return {rank: failure.exitcode for rank, failure in failed.failures.items()}
    finally:
        ended.set()
    return {}


def _end_silent_workers(board: Any, hung: str, ended: Event) -> None:
    """Workers end those of their machine that hang and do not answer; where none answers, the launcher has to."""
    with suppress(dist.DistError):
        while not ended.wait(1):
            if board.check([hung]):
                kill_here(json.loads(board.get(hung))["silent"])
                break


def _say_cause(exit_codes: Mapping[int, int], run: Run, board: Any, hung: str) -> str:
    if board.check([hung]):  # which the workers have told, and have ended each other for
        return f"{json.loads(board.get(hung))['who']} hung"
    rank = min(exit_codes, key=lambda rank: CONSEQUENCES.get(exit_codes[rank], 0))
    lost = f"lost the others (see {log_path(run, rank)})"
    return f"rank {rank} {lost if exit_codes[rank] == LOST_PEERS else say_exit(exit_codes[rank])}"
