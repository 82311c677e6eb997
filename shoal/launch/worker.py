"""What one of several processes does with its output and its errors, so that the user sees each thing once."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from shoal.checkpoint import step_folders
from shoal.config import Run
from shoal.errors import UserError
from shoal.processes.board import board_of, store_of
from shoal.processes.group import LOST_PEERS, peers_are_lost
from shoal.processes.world import World

ENDING = "ending"
"""On the board: the exit code of a run that would only fail again."""


def log_path(run: Run, rank: int) -> Path:
    return Path(run.config.output_dir) / "logs" / f"rank_{rank}.log"


@contextmanager
def among_others(run: Run, world: World, check: Callable[[], None] = lambda: None) -> Iterator[int]:
    """Rank 0 keeps the terminal, the others write to `logs/rank_<n>.log`; the first error reaches the terminal.

    Yields a file descriptor that writes to the terminal on every rank.

    The process ends here if there was one: its peers may hang in a collective, and taking leave of them would too.
    `check` comes before there are logs, so that a run which it refuses leaves no folder.
    """
    _end_with_launcher(world)
    board = board_of(world)
    if board.check([ENDING]):
        os._exit(int(board.get(ENDING)))
    path, output_dir = log_path(run, world.rank), run.config.output_dir
    terminal = os.dup(2)
    try:
        saved_before = step_folders(output_dir)
        check()
        with _open_log(path, run) as log:
            if world.rank > 0:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            yield terminal
            _leave_after_rank_0(world)
    except Exception as error:
        by_user = isinstance(error, UserError | PermissionError)
        is_short = by_user and "--debug" not in sys.argv
        text = f"shoal: error: {error}\n" if is_short else traceback.format_exc()
        with suppress(OSError), path.open("a") as file:
            file.write(text)
        if peers_are_lost(error):
            os._exit(LOST_PEERS)
        code = 2 if by_user else 1
        if board.add(f"errors of {world.attempt_name}", 1) == 1:
            os.write(terminal, (text if by_user else f"shoal: rank {world.rank} failed\n{text}").encode())
            if by_user or step_folders(output_dir) == saved_before:
                board.set(ENDING, str(code))
        sys.stdout.flush()
        os._exit(code)


def _open_log(path: Path, run: Run) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a")
    except OSError as error:
        raise UserError(
            f"experiment.output_dir = {run.config.output_dir!r} cannot be written: {error.strerror}"
        ) from None


def _leave_after_rank_0(world: World) -> None:
    """A launcher ends all processes when the first leaves with a code, and rank 0 has to say goodbye."""
    with suppress(dist.DistError):  # the board went with whoever kept it
        store = store_of(world, "leaving")
        if world.rank == 0:
            store.set("rank 0 leaves", "")
        else:
            store.wait(["rank 0 leaves"], timedelta(minutes=1))


def _end_with_launcher(world: World) -> None:
    """On Linux: a launcher that is killed takes its workers along, which save and leave on SIGTERM."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG
    if world.launcher_pid not in (None, os.getppid()):
        os._exit(128 + signal.SIGTERM)  # it was killed before we asked to be told
