"""Runs a function in several processes of this machine: for a function what torchrun is for a script."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.errors import UserError
from shoal.processes.detect import rank_in
from shoal.processes.group import free_port

GRACE_SECONDS = 0.5
"""After an error: peers of a process that died see a lost connection, often before its death is seen here."""


@dataclass(frozen=True)
class _Worker:
    rank: int
    process: Any
    connection: Connection


def run_function(function: Callable[..., Any], args: Sequence[Any], processes: int, start_method: str) -> list[Any]:
    """What `function(*args)` returns, by rank. The first error ends the other processes and is raised here."""
    if processes < 1:
        raise UserError(f"launch_distributed: processes = {processes}; it must be at least 1")
    if (rank_here := rank_in(os.environ)) is not None:
        raise UserError(f"launch_distributed: this process is already rank {rank_here} of a run")
    method = _choose_method(function, args) if start_method == "auto" else start_method
    # Of a forked process the other threads are gone, and with them OpenMP's, for which it would wait for ever.
    threads = 1 if method == "fork" else max(1, (os.cpu_count() or 1) // processes)
    world = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    context: Any = multiprocessing.get_context(method)
    workers: list[_Worker] = []
    try:
        for rank in range(processes):
            variables = {"RANK": rank, "LOCAL_RANK": rank, **world, **place}
            ours, theirs = context.Pipe()
            # Not a daemon: those may have no children, so no workers that load data.
            process = context.Process(target=_work, args=(theirs, variables, threads, function, args))
            process.start()
            theirs.close()
            workers.append(_Worker(rank, process, ours))
        results = _collect(workers, method)
        for worker in workers:
            worker.connection.send_bytes(b"all have returned")
        for worker in workers:
            worker.process.join()
        return results
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()
            worker.connection.close()


def _choose_method(function: Callable[..., Any], args: Sequence[Any]) -> str:
    """spawn where a new process can import the function; else fork, which takes it along as it is.

    A new process cannot import lambdas, functions inside functions, and whatever a notebook or a prompt defined.
    """
    try:
        told = pickle.dumps((function, args))
    except Exception:  # pickle raises several kinds, and classes may raise their own
        told = b""
    main_file = getattr(sys.modules["__main__"], "__file__", None)
    if told and (b"__main__" not in told or (main_file and Path(main_file).exists())):  # else it may be "<stdin>"
        return "spawn"
    if "fork" not in multiprocessing.get_all_start_methods() or torch.cuda.is_initialized():
        raise UserError(
            f"launch_distributed: a new process cannot import {function!r}, and this "
            "one cannot be forked because it uses CUDA; define the function at the top of a file"
        )
    return "fork"


def _collect(workers: list[_Worker], method: str) -> list[Any]:
    results: dict[int, Any] = {}
    while waiting := [worker for worker in workers if worker.rank not in results]:
        wait([worker.connection for worker in waiting] + [worker.process.sentinel for worker in waiting])
        for worker in waiting:
            died = not worker.process.is_alive()  # asked first: one that replies and then dies has replied
            error, trace = None, ""
            with suppress(EOFError, ConnectionError):
                if worker.connection.poll():
                    results[worker.rank], error, trace = pickle.loads(worker.connection.recv_bytes())
                    died = False
            if error is not None or died:
                wait([other.process.sentinel for other in workers], 0 if died else GRACE_SECONDS)
                _raise_if_any_died(workers, method)
                assert error is not None
                error.add_note(f"This was raised in rank {worker.rank}:\n{trace}")
                raise error
    return [results[worker.rank] for worker in workers]


def _raise_if_any_died(workers: list[_Worker], method: str) -> None:
    for worker in workers:
        code = worker.process.exitcode
        if code is not None:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            hint = "; the call needs `if __name__ == '__main__':` around it" if method == "spawn" and code == 1 else ""
            raise RuntimeError(f"rank {worker.rank} {how} before it returned{hint}")


def _work(
    connection: Connection, variables: dict[str, Any], threads: int, function: Callable[..., Any], args: Sequence[Any]
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ |= {name: str(value) for name, value in variables.items()}
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)
    try:
        # By plain pickle: torch would hand over shared memory, which is gone when this process ends.
        told = pickle.dumps((function(*args), None, ""))
    except BaseException as error:  # SystemExit, and torch's CheckpointException, are not Exceptions
        told = pickle.dumps((None, _sendable(error), traceback.format_exc()))
    connection.send_bytes(told)
    with suppress(EOFError, ConnectionError):
        connection.recv_bytes()  # leaving before the others have returned would break their last collective
    if dist.is_initialized():
        dist.destroy_process_group()


def _sendable(error: BaseException) -> BaseException:
    """The error itself, or one that says the same if it does not survive pickling."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
