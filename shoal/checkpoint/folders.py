"""The folders of checkpoints: their names, and how one is published, replaced and removed by a single rename."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

_STEP, _ANY_STEP = re.compile(r"^step_(\d{8,})$"), re.compile(r"^step_(\d+)$")
FINAL = "final"
"""The name of a checkpoint that rotation spares, beside the step folders."""


def step_folder(output_dir: str | Path, step: int) -> Path:
    """Returns the folder in which a run keeps the checkpoint of a step."""
    return Path(output_dir) / "checkpoints" / f"step_{step:08d}"


def step_folders(output_dir: str | Path) -> list[Path]:
    """Returns the step folders of a run, oldest first, damaged ones among them."""
    folder = Path(output_dir) / "checkpoints"
    return sorted(filter(is_step_folder, folder.iterdir() if folder.is_dir() else ()), key=step_of)


def checkpoint_folders(folder: str | Path) -> list[Path]:
    """Returns what may be checkpoints in a folder or in its folder `checkpoints`, by their steps, oldest first.

    Beside step folders of a run these are `step_100` and others that a script has named, and `final`, which is the last
    whatever its step is. A run itself looks at its step folders alone, because it also removes them.
    """
    places = [place for place in (Path(folder), Path(folder) / "checkpoints") if place.is_dir()]
    named = [path for place in places for path in place.iterdir() if path.name == FINAL or _ANY_STEP.match(path.name)]
    return sorted(named, key=lambda path: (path.name == FINAL, 0 if path.name == FINAL else step_of(path), str(path)))


def is_step_folder(path: Path) -> bool:
    """Returns True for a name such as step_00000100."""
    return _STEP.match(path.name) is not None


def step_of(path: Path) -> int:
    """Returns the step in the name of a step folder."""
    return int(path.name.removeprefix("step_"))


def damage_note(path: Path) -> Path:
    """Returns the path of the note that a run leaves beside a checkpoint with a damaged tensor.

    The note is an empty file. It is needed because a manifest that is whole does not show such damage.
    """
    return path.with_name(f".{path.name}.damaged")


def make_empty_folder(path: Path) -> None:
    """Makes a new folder in the place of whatever has this name."""
    discard(path)
    path.mkdir(parents=True)


def swap_in(beside: Path, target: Path) -> None:
    """Renames `beside`, which was written completely, to `target`.

    A folder with the target's name is moved away first, because a rename cannot replace a folder. It is put back if
    the second rename fails.
    """
    if target.is_dir():
        old = target.with_name(f".{target.name}.old")
        discard(old)
        target.rename(old)
        try:
            beside.rename(target)
        except OSError:
            old.rename(target)
            raise
        discard(old)
    else:
        beside.replace(target)
    flush(target.parent)


def remove_checkpoint(path: Path) -> None:
    """Renames a checkpoint to a hidden name, so that no reader sees half of it, and deletes that. Raises OSError."""
    hidden = path.with_name(f".{path.name}.removed")
    discard(hidden)
    path.rename(hidden)
    damage_note(path).unlink(missing_ok=True)
    shutil.rmtree(hidden)


def discard(path: Path) -> None:
    """Deletes a file or a folder, and ignores errors."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def flush(path: Path) -> None:
    """Waits until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
