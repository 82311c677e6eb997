"""Offload to a local disk: the folder for DeepSpeed's files, and the operator that reads and writes them."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from shoal.errors import UserError

PREFIX = "shoal-zero-"


class SwapFolder:
    """A folder inside `place` that lives as long as this process. Folders of killed processes are removed."""

    def __init__(self, place: str, key: str, needed: int = 0):
        """`needed` is the number of bytes that all ranks of this machine will write."""
        beside = Path(place).expanduser()
        if not beside.is_dir():
            raise UserError(f"{key} = {place}: there is no such folder; make it on a local disk, or use cpu")
        try:
            self.path, self._alive = _open_beside(beside)
            free = shutil.disk_usage(beside).free
        except OSError as error:
            raise UserError(f"{key} = {place}: {error.strerror or error}") from None
        if free < needed:  # DeepSpeed would abort the process when the disk is full
            self.remove()
            there = f"{free / 2**30:.3g} GiB are free and the ranks of this machine need {needed / 2**30:.3g}"
            raise UserError(f"{key} = {place}: {there}; make room, or use cpu")

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._alive.close()


def _open_beside(place: Path) -> tuple[Path, IO[str]]:
    import fcntl  # here and not above, because Windows has none

    with (place / f".{PREFIX}lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for other in place.glob(f"{PREFIX}*"):
            if not _is_alive(other):
                shutil.rmtree(other, ignore_errors=True)
        own = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        alive = (own / "alive").open("w")
        fcntl.flock(alive, fcntl.LOCK_EX)
        try:
            os.close(os.open(own / "direct", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
        except OSError:
            shutil.rmtree(own)
            raise OSError(None, "its file system has no direct I/O; use a folder on a local disk, or cpu") from None
        return own, alive


def _is_alive(folder: Path) -> bool:
    """Returns whether the process that made a folder still runs: its lock ends with it, however it ends."""
    import fcntl

    try:
        with (folder / "alive").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def load_operator(speaks: bool, key: str) -> None:
    """Loads DeepSpeed's asynchronous I/O operator, which is compiled at its first use."""
    from deepspeed.accelerator import get_accelerator

    builder: Any = get_accelerator().create_op_builder("AsyncIOBuilder")
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        raise UserError(f"{key} on a disk needs a C++ compiler for DeepSpeed's operator; install one, or use cpu")
    if not builder.is_compatible(verbose=False):
        raise UserError(
            f"{key} on a disk needs libaio, which DeepSpeed reads and writes with: install libaio-dev, or use cpu"
        )
    if speaks:
        print("shoal: loading DeepSpeed's I/O operator; the first time it is compiled, for minutes", file=sys.stderr)
    try:
        builder.load(verbose=False)
    except Exception as error:  # compilers fail in many ways
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"{key} on a disk needs an operator that DeepSpeed could not compile: {reason}") from None
