"""A file layer that fails: the k-th call to the system under a folder raises an error, or is where the process dies.

It wraps the functions of `os` and `io` by which shoal and the standard library change and read files. Calls elsewhere
are left alone.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from shoal.checkpoint import pieces

CHANGES = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "link", "utime", "write", "pwrite")
READS = ("open", "stat", "lstat", "scandir", "listdir")


class Killed(BaseException):
    """Stands for SIGKILL: no call to the system happens after it, whatever handlers of exceptions try."""


class FaultyFiles:
    """Counts the calls under `folder`, and lets the one with the number `at` fail.

    `fault` is the number of an error, or `raise` or `exit` for a process that dies. A write is cut in half before the
    process dies.
    """

    def __init__(self, folder: Path, at: int = 0, fault: int | str = "raise"):
        self.folder, self.at, self.fault = str(folder), at, fault
        self.calls: list[str] = []
        self.dead = False
        self._descriptors: set[int] = set()

    @contextmanager
    def installed(self) -> Iterator[FaultyFiles]:
        """Every call goes through this object inside of the context. Nothing waits for the disk."""
        faulty = self

        class File(io.FileIO):
            def __init__(self, path: Any, mode: str = "r"):
                faulty._call("open", partial(io.FileIO.__init__, self, path, mode))

            def write(self, data: Any) -> int:  # type: ignore[override]
                def torn() -> None:
                    io.FileIO.write(self, memoryview(data)[: len(data) // 2])

                return int(faulty._call("write", partial(io.FileIO.write, self, data), torn))

        def open_file(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if not faulty._is_inside(path):
                return real_open(path, mode, *args, **options)
            if set(mode) <= set("rbt"):
                return faulty._call("open to read", partial(real_open, path, mode, *args, **options))
            raw = File(path, mode.replace("b", "").replace("t", ""))
            return io.BufferedWriter(raw) if "b" in mode else io.TextIOWrapper(io.BufferedWriter(raw), "utf-8")

        def wrap(name: str) -> Callable[..., Any]:
            real = getattr(os, name)

            def call(target: Any, *args: Any, **options: Any) -> Any:
                inside = "dir_fd" in options or target in faulty._descriptors or faulty._is_inside(target)
                if not inside:
                    return real(target, *args, **options)
                act = (lambda: None) if name == "fsync" else partial(real, target, *args, **options)
                result = faulty._call(name, act)
                if name == "open":
                    faulty._descriptors.add(result)
                return result

            return call

        real_open = io.open
        wrapped = {name: wrap(name) for name in (*CHANGES, *READS)}
        with (
            patch.multiple(os, **wrapped),
            patch.object(io, "open", open_file),
            patch.object(pieces, "FileIO", File),
            patch.object(pieces, "fsync", lambda descriptor: faulty._call("fsync", lambda: None)),
        ):
            yield self

    def _is_inside(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.folder)

    def _call(self, name: str, act: Callable[[], Any], torn: Callable[[], None] = lambda: None) -> Any:
        if self.dead:
            raise Killed
        self.calls.append(name)
        if len(self.calls) != self.at:
            return act()
        if isinstance(self.fault, int):
            raise OSError(self.fault, os.strerror(self.fault))
        torn()
        if self.fault == "exit":
            os._exit(137)
        self.dead = True
        raise Killed


def can_fail(name: str, fault: int | str) -> bool:
    """Returns whether a call of this kind can fail in this way: reading does not run out of space."""
    return fault != errno.ENOSPC or name in (*CHANGES, "open")
