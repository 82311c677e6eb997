"""Runs a function in several processes of this machine, as torchrun runs a script."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from shoal.errors import UserError
from shoal.processes.board import open_board
from shoal.processes.detect import nodes_by_hand, rank_from_launcher
from shoal.processes.group import describe_exit

DEATH_NOTICE_SECONDS = 0.5
"""How long a process waits after an error before it exits.

If a peer died, the error is only a consequence; the parent must notice the death first.
"""


def run_function(function: Callable[..., Any], args: Sequence[Any], processes: int, start_method: str) -> list[Any]:
    """Runs `function(*args)` in every process and returns the results by rank.

    The first error ends the other processes and is raised in this one. If the environment says that several machines
    run the same script, these are the processes of this machine.
    """
    if processes < 1:
        raise UserError(f"launch_distributed: processes = {processes}: it must be at least 1")
    if (own_rank := rank_from_launcher(os.environ)) is not None:
        raise UserError(
            f"launch_distributed: this process is already rank {own_rank} of a run; call the function itself"
        )
    node = nodes_by_hand(processes)
    method, function, args = _choose_method(function, args, start_method)
    # A forked process lacks the other threads of its parent, also OpenMP's, and would wait for those forever.
    threads = 1 if method == "fork" else max(1, (os.cpu_count() or 1) // processes)
    if method == "fork":
        # The error of an earlier call keeps the board of that call in a reference cycle. If a forked process collected
        # it, the board would wait forever for its thread, which only this process has.
        gc.collect()
    board = None
    shared = {
        "WORLD_SIZE": node.size * processes,
        "LOCAL_WORLD_SIZE": processes,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # the store is open, so rank 0 must not open one
        "TORCHELASTIC_RESTART_COUNT": 0,
        "SHOAL_SPAWN": method,
    }
    context: Any = multiprocessing.get_context(method)
    places = context.SimpleQueue()
    with TemporaryDirectory(prefix="shoal-") as folder:
        workers: list[Any] = []
        try:
            for rank in range(processes):
                variables = {"RANK": node.rank * processes + rank, "LOCAL_RANK": rank, **shared}
                child_args = (rank, processes, Path(folder), threads, variables, places, function, args)
                # Not a daemon: daemons may not start processes, such as the workers of a data loader.
                worker = context.Process(target=_run_in_child, args=child_args)
                with _without_ctrl_c():
                    worker.start()
                workers.append(worker)
            # The board comes last. Its thread takes a lock of the C library while it accepts a connection, and a
            # process that is forked at that moment would wait for the lock forever.
            address, port = node.address, node.port
            if node.rank == 0:
                alone = node.size == 1
                board = open_board("127.0.0.1" if alone else address, 0 if alone else port, loopback_only=alone)
                address, port = board.host, board.port
            for _ in workers:
                places.put({"MASTER_ADDR": address, "MASTER_PORT": port})
            running: list[Any] = workers
            while running:
                wait([worker.sentinel for worker in running])
                running = [worker for worker in workers if worker.exitcode is None]
                _raise_if_any_failed(workers, Path(folder), method)
            results = [pickle.loads(Path(folder, f"result {rank}").read_bytes()) for rank in range(processes)]
            return [pickle.loads(result.pickled) if isinstance(result, _ByValue) else result for result in results]
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
            # The traceback of an error keeps this frame. A process that is forked later would wait forever if it had
            # to close the board for Python's garbage collector: the board's thread is not in a forked process.
            del board


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Delays Ctrl-C. A process that is started meanwhile delays it until it can handle it: while it imports, it would
    print a traceback."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _choose_method(
    function: Callable[..., Any], args: Sequence[Any], start_method: str
) -> tuple[str, Callable[..., Any], Sequence[Any]]:
    """Returns how to start processes, and what they have to call.

    `auto` is `spawn` if a new process can import the function, else `fork`, which needs no import. A process that uses
    CUDA cannot be forked; then the function is sent by value.
    """
    importable = _is_importable(function, args)
    if start_method == "auto":
        can_fork = "fork" in multiprocessing.get_all_start_methods() and not torch.cuda.is_initialized()
        start_method = "fork" if can_fork and not importable else "spawn"
    if start_method == "fork" or importable:
        return start_method, function, args
    try:
        import cloudpickle
    except ImportError:
        raise UserError(
            f"launch_distributed: a new process cannot import {function!r}, and this process cannot be forked; define "
            'the function at the top level of a file, or pip install "shoal[notebook]"'
        ) from None
    return start_method, _call_by_value, (cloudpickle.dumps((function, args)),)


def _is_importable(function: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Returns whether a new process can import what it has to call.

    It cannot import lambdas, functions inside functions, and what a notebook or a prompt has defined.
    """
    with suppress(Exception):  # pickle raises several types, and classes may raise others
        main_file = Path(getattr(sys.modules["__main__"], "__file__", ""))  # or "<stdin>"
        return b"__main__" not in pickle.dumps((function, args)) or main_file.is_file()
    return False


def _call_by_value(pickled: bytes) -> Any:
    """Calls a function that was sent as bytes; what it returns may be of a class that only the notebook has."""
    import cloudpickle

    function, args = cloudpickle.loads(pickled)
    return _ByValue(cloudpickle.dumps(function(*args)))


@dataclass(frozen=True)
class _ByValue:
    """A result that plain pickle could not send."""

    pickled: bytes


def _raise_if_any_failed(workers: Sequence[Any], folder: Path, method: str) -> None:
    """Raises the error of a process that ended without a result."""
    # A process that died comes first. Its peers only report the lost connection, and exit with code 1.
    for rank in sorted(range(len(workers)), key=lambda rank: workers[rank].exitcode == 1):
        code, error_file = workers[rank].exitcode, folder / f"error {rank}"
        if code is None or (folder / f"result {rank}").exists():
            continue
        if error_file.exists():
            error, trace = pickle.loads(error_file.read_bytes())
            if isinstance(error, SystemExit) and not error.code:  # it would end the caller as if all were well
                error = RuntimeError(f"rank {rank} called sys.exit({error.code}) before it returned")
            error.add_note(f"This was raised in rank {rank}:\n{trace}")
            raise error
        hint = "; the call needs `if __name__ == '__main__':` around it" if method == "spawn" and code == 1 else ""
        raise RuntimeError(f"rank {rank} {describe_exit(code)} before it returned{hint}")


def _run_in_child(
    rank: int,
    size: int,
    folder: Path,
    threads: int,
    variables: dict[str, Any],
    places: Any,
    function: Callable[..., Any],
    args: Sequence[Any],
) -> None:
    """Calls the function as one rank, and writes its result or its error into a file of `folder`.

    `places` is a queue with the variables that say where the board is, for each process.
    """
    if sys.platform == "linux":  # a thread could not end a process that is stopped, or that holds the GIL
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG: the kernel kills it when its parent dies
    threading.Thread(target=_exit_after, args=(multiprocessing.parent_process(),), daemon=True).start()
    try:
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        os.environ |= {name: str(value) for name, value in {**variables, **places.get()}.items()}
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", threads)))
        # Plain pickle copies tensors. torch would send shared memory, which is gone when this process ends.
        result = pickle.dumps(function(*args))
    except BaseException as error:  # SystemExit, and torch's CheckpointException, are not Exceptions
        (folder / f"error {rank}").write_bytes(pickle.dumps((_picklable(error), traceback.format_exc())))
        sys.stdout.flush()
        time.sleep(DEATH_NOTICE_SECONDS)
        os._exit(1)  # does not wait for threads that the function may have started
    (folder / f"result {rank}").write_bytes(result)
    while len([*folder.glob("result *")]) < size:  # or the last collective of the others would break
        time.sleep(0.01)
    if dist.is_initialized():
        dist.destroy_process_group()


def _picklable(error: BaseException) -> BaseException:
    """Returns the error itself, or a RuntimeError with the same message if the error cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _exit_after(parent: Any) -> None:
    """Ends this process when its parent has ended."""
    parent.join()
    os._exit(1)
