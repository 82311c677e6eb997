"""Cleans torch.compile's cache of what a killed process has left there half-written."""

from __future__ import annotations

from pathlib import Path
from struct import error, unpack_from

from filelock import FileLock, Timeout  # torch needs it, too

from shoal.errors import UserError
from shoal.torch_private import compile_cache_folders


def check_cache() -> None:
    """Raises UserError if torch.compile cannot store what it makes."""
    folder, _ = compile_cache_folders()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"training.compile = true: torch.compile cannot write to {folder} ({error.strerror}); set "
            "TORCHINDUCTOR_CACHE_DIR to another folder"
        ) from None


def remove_broken_libraries() -> None:
    """Removes libraries that are not whole, which torch would fail to load at every start, for CPUs.

    The compiler writes a library under its final name, so one that is killed leaves a part, and most often an empty
    file. torch holds a lock on what it writes; a library whose lock is taken is left alone.
    """
    cache, locks = compile_cache_folders()
    for library in cache.glob("??/*.so"):
        if is_whole(library):
            continue
        try:
            with FileLock(locks / f"{library.name.partition('.')[0]}.lock", timeout=0):
                if not is_whole(library):
                    library.unlink(missing_ok=True)
        except (Timeout, OSError):
            continue


def is_whole(library: Path) -> bool:
    """Returns whether a library reaches to its end, which is the table of its sections; one that is gone counts as
    whole. Of files that are not ELF it only says whether they are empty."""
    try:
        with library.open("rb") as file:
            size, head = library.stat().st_size, file.read(64)
        if head[:4] not in (b"\x7fELF"[: len(head)], b"\0\0\0\0"):  # linkers write the first lines last
            return True
        table, entry_size, num_entries = (unpack_from(f, head, at)[0] for f, at in (("<Q", 40), ("<H", 58), ("<H", 60)))
    except error:  # shorter than its first lines
        return False
    except OSError:
        return True
    return bool(0 < table + entry_size * num_entries <= size)
