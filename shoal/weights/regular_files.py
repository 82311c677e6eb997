"""Opens files that are not trusted: only regular files of a sane size, so that no open or read waits or has no end."""

from __future__ import annotations

import os
import stat
from pathlib import Path

MAX_JSON_BYTES = 1 << 31
"""More than the manifest of any model and number of ranks takes."""
MAX_HEADER_BYTES = 100_000_000
"""The longest header that the safetensors library reads."""

_NONBLOCK, _NOFOLLOW = (getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOFOLLOW"))  # Windows has neither


def check_regular(path: Path, follow_links: bool = False) -> os.stat_result:
    """Returns the status of a file; raises ValueError if it is a link, a folder, a pipe, a socket or a device."""
    status = path.stat() if follow_links else path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path.name} is not a regular file but a {_kind(status.st_mode)}")
    return status


def read_regular(path: Path, max_bytes: int = MAX_JSON_BYTES, follow_links: bool = False) -> bytes:
    """Returns the content of a regular file, or its first `max_bytes` bytes for a file that ends later.

    Raises ValueError for everything else. Opening a pipe does not wait for a writer.
    """
    check_regular(path, follow_links)
    descriptor = os.open(path, os.O_RDONLY | _NONBLOCK | (0 if follow_links else _NOFOLLOW))
    with open(descriptor, "rb") as file:  # noqa: PTH123  it was opened with flags that Path has no name for
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # it was replaced a moment ago
            raise ValueError(f"{path.name} is not a regular file")
        return file.read(max_bytes)


def read_json_text(path: Path, follow_links: bool = False) -> bytes:
    """Returns the content of a JSON file. Raises ValueError if it is not a regular file, or too large."""
    if (size := check_regular(path, follow_links).st_size) > MAX_JSON_BYTES:
        raise ValueError(f"{path.name} has {size:,} bytes, more than any checkpoint's")
    return read_regular(path, follow_links=follow_links)


def _kind(mode: int) -> str:
    """Returns what a file is, in words."""
    kinds = {
        stat.S_IFLNK: "symbolic link; put the file itself there",
        stat.S_IFDIR: "folder",
        stat.S_IFIFO: "pipe",
        stat.S_IFSOCK: "socket",
        stat.S_IFCHR: "device",
        stat.S_IFBLK: "device",
    }
    return kinds.get(stat.S_IFMT(mode), "special file")
