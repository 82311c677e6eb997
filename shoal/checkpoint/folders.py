"""The folders of checkpoints: what they are called, and how one appears, is replaced and is removed in one moment."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

_STEP = re.compile(r"^step_(\d{8,})$")


def step_folder(output_dir: str | Path, step: int) -> Path:
    """Returns where a run keeps the checkpoint of a step."""
    return Path(output_dir) / "checkpoints" / f"step_{step:08d}"


def step_folders(output_dir: str | Path) -> list[Path]:
    """Returns the step folders of a run, oldest first, damaged ones among them."""
    folder = Path(output_dir) / "checkpoints"
    return sorted(filter(is_step_folder, folder.iterdir() if folder.is_dir() else ()), key=step_of)


def is_step_folder(path: Path) -> bool:
    return _STEP.match(path.name) is not None


def step_of(path: Path) -> int:
    """Returns the step that a step folder is of."""
    return int(path.name.removeprefix("step_"))


def damage_note(path: Path) -> Path:
    """Returns the empty file beside a checkpoint that a run leaves if it could not read a tensor of it.

    The manifest alone does not show such damage.
    """
    return path.with_name(f".{path.name}.damaged")


def make_empty_folder(path: Path) -> None:
    discard(path)
    path.mkdir(parents=True)


def swap_in(beside: Path, target: Path) -> None:
    """Renames what was written `beside` to `target`. A folder of that name is moved out of the way first, because
    a rename cannot replace a folder."""
    if target.is_dir():
        old = target.with_name(f".{target.name}.old")
        discard(old)
        target.rename(old)
        beside.rename(target)
        discard(old)
    else:
        beside.replace(target)
    flush(target.parent)


def remove_checkpoint(path: Path) -> None:
    """Renames a checkpoint to a hidden name, so that nobody sees half of it, and then removes it. Raises OSError."""
    hidden = path.with_name(f".{path.name}.removed")
    discard(hidden)
    path.rename(hidden)
    damage_note(path).unlink(missing_ok=True)
    shutil.rmtree(hidden)


def discard(path: Path) -> None:
    """Removes a file or a folder as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def flush(path: Path) -> None:
    """Returns when a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
