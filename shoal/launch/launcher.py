"""Starts the processes of a machine with torch's own elastic launcher, and starts them again when one dies."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from threading import Event, Thread
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shoal.config import Run, derive_batches
from shoal.errors import UserError
from shoal.launch.worker import ENDING, log_path
from shoal.processes.board import HUNG, find_board, keep_board
from shoal.processes.detect import Node, detect_node, is_worker
from shoal.processes.group import LOST_PEERS
from shoal.processes.watchdog import kill_here
from shoal.processes.world import World

STOPPED = {128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGUSR1}
"""Exit codes of a worker that was asked to stop, saved and left: nothing to repair."""


def wants_processes(run: Run) -> bool:
    """Whether this process is to start others instead of training itself."""
    return not is_worker() and run.config.launch.processes > 1


def start(run: Run, arguments: Sequence[str]) -> int:
    """Runs `shoal <arguments>` in every process; returns the exit code for the user's shell."""
    launch = run.config.launch
    derive_batches(run.config.training, launch.processes)  # refuses before there is anything to end
    node = detect_node(launch.nodes, launch.procs_per_node)
    board = _open_board(run, node)
    os.environ["SHOAL_LAUNCHER"] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // launch.procs_per_node)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")  # a large model is not saved in torch's 30 s
    logging.disable(logging.ERROR)  # of torch's launcher: we say it in one line ourselves
    try:
        return _run_until_it_ends(run, node.rank, board, arguments)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except dist.DistError as error:
        if launch.nodes == 1:
            raise
        raise UserError(
            f"launch.nodes = {launch.nodes}, but the other machines did not come, or the one at {node.address} left: "
            f"{str(error).splitlines()[0]}"
        ) from None


def _run_until_it_ends(run: Run, node: int, board: Any, arguments: Sequence[str]) -> int:
    launch = run.config.launch
    attempt = int(board.compare_set("attempt", "", "0"))  # of all machines: one that comes late joins in
    while True:
        # Schedulers warn by SIGUSR1. torch passes SIGTERM on to the workers, and it means the same to them.
        signal.signal(signal.SIGUSR1, lambda *_: signal.raise_signal(signal.SIGTERM))
        for number in (signal.SIGINT, signal.SIGTERM):  # while torch waits for other machines, it sees no handler
            signal.signal(number, signal.SIG_DFL)
        run_id = f"attempt {attempt}"
        hung = HUNG.format(World(run_id=run_id).attempt_name)
        with (
            tempfile.TemporaryDirectory(prefix="shoal-") as scratch,
            _ending_silent_workers(board, hung) if launch.nodes > 1 else nullcontext(),
        ):
            try:
                elastic_launch(_launch_config(run, node, board, run_id, scratch), sys.executable)(
                    "-m", "shoal", *arguments
                )
                return 0
            except ChildFailedError as failed:
                exit_codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
        codes = {*exit_codes.values()}
        if codes <= {-signal.SIGINT, -signal.SIGTERM, -signal.SIGUSR1}:  # before there was anything to save
            codes = {128 - code for code in codes}
        if stopped := STOPPED & codes:
            return min(stopped)
        if board.check([ENDING]):  # an error that would only come again; the worker has told it
            return int(board.get(ENDING))
        if board.check([hung]):  # which the workers have told, and have ended each other for
            what = f"{json.loads(board.get(hung))['who']} hung"
        else:
            rank = min(exit_codes, key=lambda rank: _distance_from_cause(exit_codes[rank]))
            what = f"rank {rank} {_how_it_ended(exit_codes[rank], run, rank)}"
        if attempt >= launch.max_restarts:
            print(f"shoal: {what}; giving up after {launch.max_restarts} restarts", file=sys.stderr)
            return 1
        board.compare_set("attempt", str(attempt), str(attempt + 1))
        attempt += 1
        again = f"starting again, from the last checkpoint if there is one ({attempt} of {launch.max_restarts})"
        print(f"shoal: {what}; {again}", file=sys.stderr, flush=True)


@contextmanager
def _ending_silent_workers(board: Any, hung: str) -> Iterator[None]:
    """Workers end those of their machine that hang and do not answer; where none answers, the launcher has to."""
    ended = Event()

    def watch() -> None:
        with suppress(dist.DistError):
            own = find_board(board.host, board.port)  # for no two threads can share a connection
            while not ended.wait(1):
                if own.check([hung]):
                    kill_here(json.loads(own.get(hung))["silent"])
                    return

    watcher = Thread(target=watch, name="shoal-silent-workers", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join(10)


def _open_board(run: Run, node: Node) -> Any:
    """The first machine keeps the board as long as the run lasts."""
    if node.rank == 0:
        return keep_board(node.address, node.port, loopback_only=run.config.launch.nodes == 1)
    return find_board(node.address, node.port, run.config.distributed.init_timeout)


def _launch_config(run: Run, node: int, board: Any, run_id: str, scratch: str) -> LaunchConfig:
    launch = run.config.launch
    return LaunchConfig(
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


def _distance_from_cause(exit_code: int) -> int:
    """When one process dies its peers fail too, or are ended: ranks exit codes by how likely each is the cause."""
    consequences = [LOST_PEERS, -signal.SIGABRT, -signal.SIGINT, -signal.SIGTERM]  # NCCL aborts when it loses a peer
    return 1 + consequences.index(exit_code) if exit_code in consequences else 0


def _how_it_ended(exit_code: int, run: Run, rank: int) -> str:
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    if exit_code == LOST_PEERS:
        return f"lost the others (see {log_path(run, rank)})"
    return f"failed with exit code {exit_code}"
