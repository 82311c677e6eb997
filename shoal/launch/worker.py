"""What one of several processes does with its output and its errors, so that the user sees each thing once."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.config import Run
from shoal.errors import UserError
from shoal.parallel.world import World


@dataclass(frozen=True)
class WorkerError:
    rank: int
    by_user: bool
    text: str


def log_folder(run: Run) -> Path:
    return Path(run.config.output_dir) / "logs"


@contextmanager
def among_others(run: Run, world: World) -> Iterator[None]:
    """Rank 0 keeps the terminal, the others write to `logs/rank_<n>.log`; the first error reaches the terminal.

    The process ends here if there was one: its peers may hang in a collective, and taking leave of them would too.
    """
    folder = log_folder(run)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"experiment.output_dir = {run.config.output_dir!r} cannot be written: {error.strerror}"
        ) from None
    _end_with_parent()
    terminal = os.dup(2)
    with (folder / f"rank_{world.rank}.log").open("a", buffering=1) as log:
        if world.rank > 0:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        try:
            yield
        except Exception as error:
            by_user = isinstance(error, UserError)
            show_traceback = not by_user or "--debug" in sys.argv
            text = traceback.format_exc() if show_traceback else f"shoal: error: {error}\n"
            log.write(text)
            if _is_first(folder, WorkerError(world.rank, by_user, text)):
                header = "" if by_user else f"shoal: rank {world.rank} failed\n"
                os.write(terminal, (header + text).encode())
            sys.stdout.flush()
            os._exit(2 if by_user else 1)


def first_error(run: Run, run_id: str) -> WorkerError | None:
    """What the first rank to fail in an attempt left, if it could."""
    try:
        return WorkerError(**json.loads((log_folder(run) / f"error_{run_id}_0.json").read_text()))
    except (OSError, ValueError):
        return None


def _is_first(folder: Path, error: WorkerError) -> bool:
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        with (folder / f"error_{run_id}_{attempt}.json").open("x") as file:
            json.dump(asdict(error), file)
    except FileExistsError:
        return False
    return True


def _end_with_parent() -> None:
    """On Linux: a launcher that is killed takes its workers along, which save and leave on SIGTERM."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
