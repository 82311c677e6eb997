"""The output and errors of one of several processes, handled so that the user sees everything once."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist

from shoal.checkpoint import step_folders
from shoal.config import Run
from shoal.errors import UserError, one_line, printable
from shoal.launch.cards import card_of, check_equal
from shoal.launch.ends import FINAL_EXIT_CODE, REFUSED, log_path
from shoal.launch.mistakes import RecipeFailure, harmless
from shoal.processes.board import REMINDER_SECONDS, board_section, connect_to_board
from shoal.processes.group import LOST_PEERS_EXIT_CODE, is_lost_peer_error
from shoal.processes.world import World
from shoal.training.refused_start import StartTraces


@contextmanager
def as_worker(run: Run, world: World, check: Callable[[], None] = lambda: None) -> Iterator[int]:
    """Sends the output of all ranks but rank 0 to `logs/rank_<n>.log`, and shows only the first error on the terminal.

    Yields a file descriptor that writes to the terminal on every rank. After an error the process exits at once:
    peers may hang in a collective, and leaving the process group would hang as well. `check` runs before log files
    are made, so that a run that it refuses leaves no folder.
    """
    _exit_with_launcher(world)
    traces = StartTraces(Path(run.config.output_dir))
    terminal, init_timeout = os.dup(2), run.config.distributed.init_timeout

    def remind(line: str) -> None:
        os.write(terminal, f"shoal: {line}\n".encode())

    board = connect_to_board(world, init_timeout, remind if world.local_rank == 0 else lambda line: None)
    if board.check([FINAL_EXIT_CODE]):
        os._exit(int(board.get(FINAL_EXIT_CODE)))
    path, output_dir = log_path(run, world.rank), run.config.output_dir
    try:
        call_the_roll(run, world, remind)
        saved_before = step_folders(output_dir)
        check()
        with _open_log(path, run) as log:
            if world.rank > 0:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            if board.check([REFUSED]):  # before this log was made; otherwise the rank that was refused removes it
                raise UserError("another rank was refused")
            yield terminal
            _exit_after_rank_0(world)
    except SystemExit:  # a signal before the first step: launchers stop all ranks once one has failed
        _take_back_if_refused(board, traces)
        raise
    except Exception as error:
        is_user_error = isinstance(error, UserError | PermissionError)
        hide_traceback = is_user_error and "--debug" not in sys.argv
        text = f"shoal: error: {one_line(error, limit=10_000)}\n" if hide_traceback else _format_traceback()
        with suppress(OSError), path.open("a") as file:
            file.write(_format_traceback() if isinstance(error, RecipeFailure) else text)
        if is_lost_peer_error(error):
            _take_back_if_refused(board, traces)
            os._exit(LOST_PEERS_EXIT_CODE)
        code, is_certain = 2 if is_user_error else 1, is_user_error and not isinstance(error, RecipeFailure)
        if board.add(f"errors of {world.attempt_name}", 1) == 1:
            if isinstance(error, RecipeFailure) and hide_traceback:
                line = f"rank {world.rank}: {one_line(error, limit=10_000)}; traceback in {printable(str(path))}"
                text = f"shoal: error: {line}\n"
            os.write(terminal, (text if is_user_error else f"shoal: rank {world.rank} failed\n{text}").encode())
            if is_certain:
                board.set(REFUSED, "")
            if is_certain or step_folders(output_dir) == saved_before:
                board.set(FINAL_EXIT_CODE, str(code))
        _take_back_if_refused(board, traces)
        sys.stdout.flush()
        os._exit(code)


def _take_back_if_refused(board: Any, traces: StartTraces) -> None:
    """Removes what the start has made if the error that the user was shown is a refusal, of this rank or another.

    Each rank does it: they end one after another, and another launcher than shoal's does not clean up after them.
    """
    with suppress(dist.DistError):  # the process that kept the board may be gone
        if board.check([REFUSED]):
            traces.take_back()


def call_the_roll(run: Run, world: World, remind: Callable[[str], None]) -> None:
    """Waits in rank 0 until all ranks have come, and names those that have not. Compares what machines run with.

    A launcher of shoal has compared the machines before it has started processes.
    """
    if world.group != "to make":
        return
    board, init_timeout = board_section(world, "roll"), run.config.distributed.init_timeout
    if world.rank == 0:
        board.set("card", card_of(run).to_json())
    elif world.local_rank == 0 and world.launcher_pid is None:
        board.wait(["card"], timedelta(seconds=init_timeout))
        try:
            check_equal(card_of(run), board.get("card").decode())
        except UserError as error:
            board.set("refusal", f"{_name_rank(world.rank, world)}: {error}")
            raise
    board.set(f"rank {world.rank}", "")
    began = time.monotonic()
    reminder = began + REMINDER_SECONDS
    while world.rank == 0 and not board.check([f"rank {rank}" for rank in range(world.size)]):
        waited = time.monotonic() - began
        if board.check(["refusal"]):  # that rank prints it on its own machine
            remind(f"error: {one_line(board.get('refusal').decode(), limit=10_000)}")
            os._exit(2)
        if waited < min(reminder - began, init_timeout):
            time.sleep(0.02)
            continue
        reminder += REMINDER_SECONDS
        missing = [rank for rank in range(world.size) if not board.check([f"rank {rank}"])]
        names = ", ".join(_name_rank(rank, world) for rank in missing[:8]) + (", …" if len(missing) > 8 else "")
        limit = f"distributed.init_timeout = {init_timeout:g} s"
        if waited >= init_timeout:
            raise UserError(
                f"WORLD_SIZE={world.size}: {names} did not come within {limit}; start all of them, with "
                f"MASTER_ADDR = {world.address}, MASTER_PORT = {world.port}"
            )
        remind(f"waiting for {names} for {waited:.0f} s (until {limit})")


def _name_rank(rank: int, world: World) -> str:
    """Returns a rank with its machine, for messages."""
    node = rank // world.local_size
    host = f", {world.hosts[node]}" if node < len(world.hosts) else ""
    return f"rank {rank} (node {node}{host})"


def _format_traceback() -> str:
    return harmless(traceback.format_exc())


def _open_log(path: Path, run: Run) -> TextIO:
    """Opens the log of this rank to append. Raises UserError if the run folder cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a")
    except OSError as error:
        raise UserError(
            f"experiment.output_dir = {run.config.output_dir!r}: cannot be written ({error.strerror}); choose another"
        ) from None


def _exit_after_rank_0(world: World) -> None:
    """Lets rank 0 print its last lines: a launcher stops all processes once one has exited with a code."""
    with suppress(dist.DistError):  # the process that kept the board may be gone
        board = board_section(world, "leaving")
        if world.rank == 0:
            board.set("rank 0 leaves", "")
        else:
            board.wait(["rank 0 leaves"], timedelta(minutes=1))


def _exit_with_launcher(world: World) -> None:
    """On Linux, makes this process get SIGTERM when its launcher is killed, so that it saves and exits.

    A process that is stopped at that time gets the signal when shoal.launch.guard continues it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG
    if world.launcher_pid not in (None, os.getppid()):
        os._exit(128 + signal.SIGTERM)  # the launcher was killed before prctl was called
