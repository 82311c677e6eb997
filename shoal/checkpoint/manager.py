"""Which checkpoints a run keeps, and which one it goes on from."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.checkpoint.store import Checkpoint, DamagedCheckpoint, open_checkpoint, write_checkpoint
from shoal.config.schema import LoaderConfig
from shoal.errors import UserError
from shoal.types import TrainState

_STEP = re.compile(r"^step_(\d{8,})$")


class CheckpointManager:
    """Saves into `<output_dir>/checkpoints/step_<n>`, keeps the last k.

    All ranks save together; only the main process moves and removes folders.
    """

    def __init__(self, output_dir: str | Path, keep_last: int = 3, is_main_process: bool = True):
        self.folder = Path(output_dir) / "checkpoints"
        self.keep_last = keep_last
        self.is_main_process = is_main_process

    def steps(self) -> list[Path]:
        """The step folders, oldest first."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((path for path in found if _STEP.match(path.name)), key=_step_of)

    def save(self, state: TrainState, trainer: dict[str, Any], about: dict[str, Any]) -> Path:
        path = self.folder / f"step_{trainer['step']:08d}"
        write_checkpoint(path, state, trainer, about)
        if self.is_main_process:
            for old in self.steps()[: -self.keep_last]:
                shutil.rmtree(old)
        return path

    def set_aside_after(self, step: int) -> None:
        """Moves the checkpoints of an abandoned continuation out of the way, without deleting them."""
        for path in self.steps() if self.is_main_process else ():
            if _step_of(path) > step:
                aside = self.folder / "abandoned"
                aside.mkdir(exist_ok=True)
                shutil.rmtree(aside / path.name, ignore_errors=True)
                path.rename(aside / path.name)


def find_latest_checkpoint(output_dir: str | Path) -> Path | None:
    """The highest step under a run folder whose manifest verifies."""
    for folder in reversed(CheckpointManager(output_dir).steps()):
        with suppress(DamagedCheckpoint):
            return open_checkpoint(folder).folder
    return None


def find_start(resume: str, manager: CheckpointManager, warn: Callable[[str], None]) -> list[Path]:
    """The checkpoints a run may go on from, best first; none means a fresh start. None of them is opened yet."""
    own = manager.steps()[::-1]
    if resume == "never" and own:
        raise UserError(
            f"checkpoint.resume = never, but {manager.folder} already holds {own[0].name}; "
            "choose another experiment.output_dir or resume: auto"
        )
    if resume in ("never", "auto"):
        return own
    given = Path(resume)
    if not given.exists():
        raise UserError(f"checkpoint.resume = {resume!r}: no such folder; give a step folder or a run folder")
    if _STEP.match(given.name) and given.resolve().parent == manager.folder.resolve():
        manager.set_aside_after(_step_of(given))
        return [given]
    found = [given] if _STEP.match(given.name) else CheckpointManager(given).steps()[::-1]
    if not found:
        raise UserError(f"checkpoint.resume = {resume!r} holds no usable checkpoint")
    if own and given.resolve() != manager.folder.parent.resolve():
        warn(f"going on in {manager.folder.parent}; checkpoint.resume = {resume} was only its starting point")
        return own
    return found


def check_same_model(
    checkpoint: Checkpoint,
    shapes: dict[str, list[int]],
    advice: str = "choose another experiment.output_dir or checkpoint.resume",
) -> None:
    """Refuses a checkpoint of another architecture, naming the first tensors that differ."""
    theirs = checkpoint.shapes
    differences = [
        f"{name} {theirs.get(name, 'absent')} there, {shapes.get(name, 'absent')} here"
        for name in sorted({*theirs, *shapes})
        if theirs.get(name) != shapes.get(name)
    ]
    if differences:
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise UserError(
            f"{checkpoint.folder} is a checkpoint of another model: {'; '.join(differences[:3])}{more}; {advice}"
        )


def check_same_run(checkpoint: Checkpoint, now: dict[str, Any], allowed: list[str]) -> None:
    """Refuses to go on with another model, data, seed or batch than the checkpoint was made with."""
    then = _identity(checkpoint.manifest["config"])
    current = _identity(now)
    for key in sorted({*then, *current}):
        if then.get(key) != current.get(key) and not any(key == a or key.startswith(f"{a}.") for a in allowed):
            raise UserError(
                f"{key} = {current.get(key)!r}, but {checkpoint.folder} was made with {then.get(key)!r}; "
                f"set it back, choose another experiment.output_dir, or list it in checkpoint.allow_changed"
            )


_NOT_IDENTITY = {f"dataset.{key}" for key in (*LoaderConfig.model_fields, "cache_dir")}


def _identity(config: dict[str, Any]) -> dict[str, Any]:
    """The values that make a run this run and no other, by dotted key."""
    flat = _flatten(config)
    kept = ("recipe", "model.", "lora.", "dataset.", "experiment.seed")
    return {key: value for key, value in flat.items() if key.startswith(kept) and key not in _NOT_IDENTITY}


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _step_of(path: Path) -> int:
    match = _STEP.match(path.name)
    assert match, path
    return int(match[1])
