"""A pool of worker processes that is reused by all tests, so that a distributed test takes tenths of a second.

    def mean_rank(scale):  # top-level: the workers import it by name
        total = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(total)
        return scale * total.item() / dist.get_world_size()

    def test_mean(pool2):
        assert pool2.run(mean_rank, 10) == [5, 5]

Every run has a process group of its own and the caller's environment, folder and `sys.path`. If a rank raises, hangs or
dies, that run raises `WorkerFailure`, and the next run starts new workers; so it does if earlier runs left many threads
behind.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import multiprocessing as mp
import os
import pickle
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from garbage import keep_imports_frozen
from ports import free_port

LOOPBACK = "127.0.0.1"
PATIENCE_SECONDS = 300  # long enough that a run does not time out on a busy machine
RESET_SECONDS = 60  # after a run that has succeeded
GRACE_SECONDS = 1.0  # the time that other ranks have to report their errors after a first one
STACK_SECONDS = 30  # the time that all ranks have to write their stacks
MAX_THREADS = 200  # above this, workers are replaced
"""DeepSpeed's engines are never freed, nor are their process groups, whose threads poll a hundred times a second."""
TAIL_CHARACTERS = 4000  # how much of each worker's output a failure shows
STACK_SIGNAL = signal.SIGPROF  # unlike SIGUSR1 and SIGTERM, nothing under test handles it
POOL_FRAMES = re.compile(
    rf'(Thread .*\n)?  File "{re.escape(__file__)}", line \d+ in (_worker_main|_end_with_pytest)\n(  File .*\n)*\n?'
)
"""The frames of the pool itself, which are left out of the stacks that a failure shows."""

# A fork server: forking pytest itself would copy its threads' locks, and spawning imports torch once per worker.
CONTEXT = mp.get_context("forkserver")
PRELOAD = ["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch.distributed.pipelining"]
# Modules that only some test sessions use. They are preloaded if their package was imported before the workers start.
PRELOAD_IF_IMPORTED = ["pytest", "hypothesis", "shoal.training", "shoal.verify"]
# It imports packages that look at the GPU, and a process that has done so cannot be forked.
PRELOAD_WITHOUT_GPU = ["transformers.modeling_utils"]


class WorkerFailure(Exception):
    """A run in which `rank` failed first; the message has its traceback and every worker's stack and output."""

    def __init__(self, rank: int, message: str):
        super().__init__(message)
        self.rank = rank


class WorkerHang(WorkerFailure):
    """A run that did not end in time."""


@dataclass(frozen=True)
class Call:
    """A function call that is sent to all workers."""

    number: int
    pickled_work: bytes  # (function, args, kwargs); it is unpickled after `sys.path` is set to the caller's
    init: bool
    environment: dict[str, str]
    path: list[str]
    folder: str


@dataclass(frozen=True)
class Reply:
    """The outcome of a call in one worker: a pickled result, or an error."""

    result: bytes = b""
    error: str = ""
    trace: str = ""
    failed_at: float = 0.0  # from `time.monotonic`, which all processes of a machine share


@dataclass(frozen=True)
class Worker:
    """A worker process, the connection to it, and the files with its output and its stacks."""

    process: Any
    connection: Connection
    log: Path
    stack: Path

    def reply(self) -> Reply | None:
        """Returns the worker's reply, or an error if the worker died, or None if it is still busy."""
        died = not self.process.is_alive()  # checked before the connection: a worker may reply and then die
        try:
            if self.connection.poll():
                return pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            self.process.join(GRACE_SECONDS)
            died = True
        # `failed_at` is 0, so that a death counts as the first failure: other ranks often see the lost connection, and
        # raise, before the pool sees the death.
        return Reply(error=f"died (exit code {self.process.exitcode})") if died else None

    def kill(self) -> None:
        """Kills the worker and the processes that it started."""
        self.process.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its children, such as data loader workers
        self.process.join()
        self.connection.close()


class Pool:
    """`size` worker processes that run functions together. They are started by the first run.

    Modules that were imported from inside the folder `scratch` are removed from `sys.modules` after each run, because
    another test may write other modules with the same names.
    """

    def __init__(self, size: int, scratch: Path | None = None):
        self.size = size
        self.scratch = scratch
        self.workers: list[Worker] = []
        self._calls = 0
        self._logs: str | None = None
        self._store: dist.TCPStore | None = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = PATIENCE_SECONDS,
        init: bool = True,
        **kwargs: Any,
    ):
        """Runs `function(*args, **kwargs)` on every rank and returns the results, ordered by rank.

        With `init=False` the function makes its own process group; the environment has the variables for `env://`, with
        a free port.
        """
        __tracebackhide__ = True
        try:
            work = pickle.dumps((function, args, kwargs))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"{function!r} or its arguments cannot be sent to the workers ({error}): "
                "give a function defined at the top of a module, not a closure or lambda, and arguments that pickle"
            ) from error
        if not all(worker.process.is_alive() for worker in self.workers):
            self.close()
        try:
            if not self.workers:
                self._start()
            self._calls += 1
            environment = {
                **os.environ,
                "WORLD_SIZE": str(self.size),
                "LOCAL_WORLD_SIZE": str(self.size),
                "MASTER_ADDR": LOOPBACK,
                "MASTER_PORT": str(free_port()),
            }
            self._send(Call(self._calls, work, init, environment, list(sys.path), str(Path.cwd())))
            results = self._replies(timeout)
            # Workers are reset after all have returned: a rank that left early would break the collective of another.
            self._send(None)
            threads = self._threads_after_reset()
        except BaseException:  # a failure, Ctrl-C or pytest's timeout: other ranks may wait in a collective for ever
            self.close()
            raise
        if max(threads, default=MAX_THREADS + 1) > MAX_THREADS:
            self.close()
        return [pickle.loads(result) for result in results]

    def _threads_after_reset(self) -> list[int]:
        """Returns the number of threads of each worker; none if a worker hangs, although the run has succeeded.

        Rarely a process group that is freed as garbage waits for its thread, while that waits for Python.
        """
        try:
            return [pickle.loads(count) for count in self._replies(RESET_SECONDS)]
        except WorkerHang as hang:
            warnings.warn(f"the workers are started anew: {hang}", stacklevel=1)
            return []

    def close(self) -> None:
        """Ends the workers; a later run starts new ones."""
        while self.workers:
            self.workers.pop().kill()
        self._store = None
        if self._logs:
            shutil.rmtree(self._logs, ignore_errors=True)
        atexit.unregister(self.close)

    def _start(self) -> None:
        _start_fork_server()
        atexit.register(self.close)
        self._logs = tempfile.mkdtemp(prefix="pool-", dir=self.scratch)
        self._store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        for rank in range(self.size):
            log, stack = (Path(self._logs, f"rank{rank}.{kind}") for kind in ("log", "stack"))
            log.touch()
            stack.touch()
            pool_end, worker_end = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_worker_main,
                args=(rank, self.size, worker_end, self._store.port, log, stack, self.scratch),
                name=f"rank{rank}",
                daemon=False,  # a daemon may not have children, such as data loader workers
            )
            process.start()
            self.workers.append(Worker(process, pool_end, log, stack))
            worker_end.close()
        self._replies(PATIENCE_SECONDS)

    def _send(self, message: Call | None) -> None:
        data = pickle.dumps(message)
        for worker in self.workers:
            with contextlib.suppress(BrokenPipeError):  # `_replies` reports a dead worker
                worker.connection.send_bytes(data)

    def _replies(self, timeout: float) -> list[bytes]:
        """Returns the pickled results of all workers; raises WorkerFailure if one failed or did not reply in time."""
        __tracebackhide__ = True
        deadline = time.monotonic() + timeout
        replies: dict[int, Reply] = {}
        while (waiting := [r for r in range(self.size) if r not in replies]) and time.monotonic() < deadline:
            workers = [self.workers[rank] for rank in waiting]
            events = [w.connection for w in workers] + [w.process.sentinel for w in workers]
            wait(events, max(0, deadline - time.monotonic()))
            replies.update({rank: reply for rank in waiting if (reply := self.workers[rank].reply())})
            if any(reply.error for reply in replies.values()):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if failed := [rank for rank in replies if replies[rank].error]:
            first = min(failed, key=lambda rank: replies[rank].failed_at)
            raise self._failure(first, f"rank {first} {replies[first].error}\n{replies[first].trace}", replies)
        if waiting:
            ranks = ", ".join(map(str, waiting))
            failure = self._failure(waiting[0], f"rank {ranks} of {self.size} did not finish in {timeout:g} s", replies)
            raise WorkerHang(failure.rank, str(failure))
        return [replies[rank].result for rank in range(self.size)]

    def _failure(self, first: int, headline: str, replies: dict[int, Reply]) -> WorkerFailure:
        """Returns an exception that shows the stacks and the output of all workers."""
        alive = [worker for worker in self.workers if worker.process.is_alive()]
        for worker in alive:
            os.kill(worker.process.pid, STACK_SIGNAL)
        deadline, sizes = time.monotonic() + STACK_SECONDS, [0]
        while time.monotonic() < deadline:
            before, sizes = sizes, [worker.stack.stat().st_size for worker in alive]
            if all(sizes) and sizes == before:  # all stacks are complete
                break
            time.sleep(0.05)
        report = headline.rstrip()
        for rank, worker in enumerate(self.workers):
            reply = replies.get(rank)
            report += f"\n---- rank {rank}: {(reply.error or 'returned') if reply else 'still running'}\n"
            report += reply.trace if reply and rank != first else ""
            report += POOL_FRAMES.sub("", worker.stack.read_text()).rstrip() or "no stack"
            if output := worker.log.read_text(errors="replace").rstrip():
                report += f"\noutput of rank {rank}:\n{output[-TAIL_CHARACTERS:]}"
        return WorkerFailure(first, report)


def start_process(function: Callable[..., Any], *args: Any, out: Path | None = None, err: Path | None = None) -> Any:
    """Starts a process that has imported torch and shoal already, so that this takes tenths of a second.

    It has the caller's environment, folder and `sys.path`. What it prints goes to the files `out` and `err`.
    """
    _start_fork_server()
    files = (out or Path(os.devnull), err or Path(os.devnull))
    process = CONTEXT.Process(target=_process_main, args=(function, args, {**os.environ}, Path.cwd(), files))
    process.start()
    return process


def _process_main(
    function: Callable[..., Any], args: Any, environment: dict[str, str], folder: Path, files: tuple[Path, Path]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, path in enumerate(files, 1):
        with path.open("ab") as file:
            os.dup2(file.fileno(), number)
    function(*args)


def _start_fork_server() -> None:
    """Starts the process that all workers are forked from, unless it runs already."""
    preload = PRELOAD + [name for name in PRELOAD_IF_IMPORTED if name.split(".")[0] in sys.modules]
    chosen_before = os.environ.get("DS_ACCELERATOR")
    if not torch.accelerator.is_available():  # DeepSpeed chooses the device when it is imported
        preload += ["deepspeed", *(name for name in PRELOAD_WITHOUT_GPU if name.split(".")[0] in sys.modules)]
        os.environ["DS_ACCELERATOR"] = "cpu"
    CONTEXT.set_forkserver_preload(preload)
    forkserver.ensure_running()
    os.environ.pop("DS_ACCELERATOR", None)
    if chosen_before is not None:
        os.environ["DS_ACCELERATOR"] = chosen_before


def _worker_main(
    rank: int, size: int, connection: Connection, port: int, log: Path, stack: Path, scratch: Path | None
) -> None:
    """Answers calls until pytest ends. The message `None` says that a run is over and resets the worker."""
    os.setsid()  # so that Ctrl-C reaches pytest alone, and one signal reaches all processes that this worker starts
    threading.Thread(target=_end_with_pytest, daemon=True).start()
    with log.open("ab", buffering=0) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    faulthandler.register(STACK_SIGNAL, file=stack.open("a"), all_threads=True)
    store = dist.TCPStore(LOOPBACK, port, is_master=False)
    _reset(scratch)
    connection.send_bytes(pickle.dumps(Reply()))
    while True:
        try:
            call = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            os._exit(0)
        try:
            reply = Reply(_execute(call, rank, size, store) if call else _reset(scratch))
        except BaseException as error:  # SystemExit, and torch's CheckpointException, are not Exceptions
            trace = "".join(traceback.format_exception(error))
            reply = Reply(error=f"raised {type(error).__name__}: {error}", trace=trace, failed_at=time.monotonic())
        connection.send_bytes(pickle.dumps(reply))


def _end_with_pytest() -> None:
    """Kills this worker and its children when pytest ends, also while the worker waits in a collective.

    The sentinel is a pipe that closes however pytest ends. PR_SET_PDEATHSIG would not work: the parent of a worker is
    the fork server, which lives as long as any worker does.
    """
    os.read(mp.parent_process().sentinel, 1)
    os.killpg(0, signal.SIGKILL)


def _execute(call: Call, rank: int, size: int, store: dist.Store) -> bytes:
    """Runs a call in the caller's folder and environment, and returns its pickled result."""
    os.ftruncate(1, 0)
    os.chdir(call.folder)
    os.environ.clear()
    os.environ.update(call.environment, RANK=str(rank), LOCAL_RANK=str(rank))
    sys.path[:] = call.path
    importlib.invalidate_caches()
    function, args, kwargs = pickle.loads(call.pickled_work)
    if call.init:
        prefixed = dist.PrefixStore(f"run{call.number}", store)
        dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size)
    return pickle.dumps(function(*args, **kwargs))


def num_threads() -> int:
    """Returns the number of this process's threads, those of libraries among them; 0 where Linux does not say."""
    return len([*Path("/proc/self/task").glob("*")])


def _reset(scratch: Path | None) -> bytes:
    """Resets the state of this process that a run may have changed, so that the next run starts as in a new process.

    Returns the number of its threads, pickled.
    """
    from torch.distributed.tensor import debug  # slow to import, and only workers need it

    if dist.is_initialized():
        dist.destroy_process_group()
    # DTensor caches results by layout; these contain a mesh that finds its groups by the names that they had in the
    # earlier run.
    debug._clear_python_sharding_prop_cache()
    debug._clear_fast_path_sharding_prop_cache()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.compiler.reset()
    if scratch:
        prefix = f"{scratch}{os.sep}"
        for name, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(prefix):
                del sys.modules[name]
    keep_imports_frozen()  # it frees models and process groups, whose threads would go on polling
    return pickle.dumps(num_threads())
