"""Runs a function in several processes of this machine: for a function what torchrun is for a script."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from shoal.errors import UserError
from shoal.processes.board import keep_board
from shoal.processes.detect import rank_in
from shoal.processes.group import say_exit

GRACE_SECONDS = 0.5
"""After an error: peers of a process that died see a lost connection, often before its death is seen here."""


def run_function(function: Callable[..., Any], args: Sequence[Any], processes: int, start_method: str) -> list[Any]:
    """What `function(*args)` returns, by rank. The first error ends the other processes and is raised here."""
    if processes < 1:
        raise UserError(f"launch_distributed: processes = {processes}; it must be at least 1")
    if (rank_here := rank_in(os.environ)) is not None:
        raise UserError(f"launch_distributed: this process is already rank {rank_here} of a run")
    method = _choose_method(function, args) if start_method == "auto" else start_method
    # Of a forked process the other threads are gone, and with them OpenMP's, for which it would wait for ever.
    threads = 1 if method == "fork" else max(1, (os.cpu_count() or 1) // processes)
    board = keep_board("127.0.0.1", 0, loopback_only=True)
    shared = {
        "WORLD_SIZE": processes,
        "LOCAL_WORLD_SIZE": processes,
        "MASTER_ADDR": board.host,
        "MASTER_PORT": board.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # as torchrun says it: the store is there, so that rank 0 opens none
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    context: Any = multiprocessing.get_context(method)
    with TemporaryDirectory(prefix="shoal-") as folder:
        workers: list[Any] = []
        try:
            for rank in range(processes):
                variables = {"RANK": rank, "LOCAL_RANK": rank, **shared}
                # Not a daemon: those may have no children, so no workers that load data.
                worker = context.Process(
                    target=_work, args=(rank, processes, Path(folder), threads, variables, function, args)
                )
                worker.start()
                workers.append(worker)
            running: list[Any] = workers
            while running:
                wait([worker.sentinel for worker in running])
                running = [worker for worker in workers if worker.exitcode is None]
                _raise_if_any_failed(workers, Path(folder), method)
            return [pickle.loads(Path(folder, f"result {rank}").read_bytes()) for rank in range(processes)]
        finally:
            for worker in workers:
                worker.kill()
                worker.join()


def _choose_method(function: Callable[..., Any], args: Sequence[Any]) -> str:
    """spawn where a new process can import the function; else fork, which takes it along as it is.

    A new process cannot import lambdas, functions inside functions, and whatever a notebook or a prompt defined.
    """
    with suppress(Exception):  # pickle raises several kinds, and classes may raise their own
        main_file = getattr(sys.modules["__main__"], "__file__", "")
        if b"__main__" not in pickle.dumps((function, args)) or Path(main_file).is_file():  # it may be "<stdin>"
            return "spawn"
    if "fork" not in multiprocessing.get_all_start_methods() or torch.cuda.is_initialized():
        raise UserError(
            f"launch_distributed: a new process cannot import {function!r}, and this "
            "one cannot be forked because it uses CUDA; define the function at the top of a file"
        )
    return "fork"


def _raise_if_any_failed(workers: Sequence[Any], folder: Path, method: str) -> None:
    # Who died comes first, for its peers raise an error and leave with 1.
    for rank in sorted(range(len(workers)), key=lambda rank: workers[rank].exitcode == 1):
        code, error_file = workers[rank].exitcode, folder / f"error {rank}"
        if code is None or (folder / f"result {rank}").exists():
            continue
        if error_file.exists():
            error, trace = pickle.loads(error_file.read_bytes())
            error.add_note(f"This was raised in rank {rank}:\n{trace}")
            raise error
        hint = "; the call needs `if __name__ == '__main__':` around it" if method == "spawn" and code == 1 else ""
        raise RuntimeError(f"rank {rank} {say_exit(code)} before it returned{hint}")


def _work(
    rank: int,
    size: int,
    folder: Path,
    threads: int,
    variables: dict[str, Any],
    function: Callable[..., Any],
    args: Sequence[Any],
) -> None:
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    os.environ |= {name: str(value) for name, value in variables.items()}
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", threads)))
    try:
        # By plain pickle: torch would hand over shared memory, which is gone when this process ends.
        result = pickle.dumps(function(*args))
    except BaseException as error:  # SystemExit, and torch's CheckpointException, are not Exceptions
        (folder / f"error {rank}").write_bytes(pickle.dumps((_sendable(error), traceback.format_exc())))
        sys.stdout.flush()
        time.sleep(GRACE_SECONDS)
        os._exit(1)  # whatever threads the function has left behind
    (folder / f"result {rank}").write_bytes(result)
    while len([*folder.glob("result *")]) < size:  # leaving before the others would break their last collective
        time.sleep(0.01)
    if dist.is_initialized():
        dist.destroy_process_group()


def _sendable(error: BaseException) -> BaseException:
    """The error itself, or one that says the same if it does not survive pickling."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)
