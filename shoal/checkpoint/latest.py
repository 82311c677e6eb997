"""Which checkpoint a run goes on from, and whether it is one of the same run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.checkpoint.folders import is_step_folder, step_folders, step_of
from shoal.checkpoint.rotation import CheckpointManager
from shoal.checkpoint.store import Checkpoint, DamagedCheckpoint, open_checkpoint
from shoal.config.schema import LoaderConfig
from shoal.config.yaml import flatten
from shoal.errors import UserError

_IDENTITY = ("recipe", "model.", "lora.", "dataset.", "experiment.seed")
_NOT_IDENTITY = {f"dataset.{key}" for key in (*LoaderConfig.model_fields, "cache_dir")}


def find_latest_checkpoint(output_dir: str | Path) -> Path | None:
    """The highest step under a run folder whose manifest verifies."""
    for folder in reversed(step_folders(output_dir)):
        with suppress(DamagedCheckpoint):
            return open_checkpoint(folder).folder
    return None


def find_start(
    resume: str, manager: CheckpointManager, warn: Callable[[str], None], restarted: bool = False
) -> list[Path]:
    """The checkpoints a run may go on from, best first; none means a fresh start.

    `restarted`: a launcher repeats what a user wanted once, so a run that has gone back to a path goes on.
    """
    own = step_folders(manager.output_dir)[::-1]
    if resume == "never" and own:
        raise UserError(
            f"checkpoint.resume = never, but {manager.folder} already holds {own[0].name}; "
            "choose another experiment.output_dir or resume: auto"
        )
    if resume in ("never", "auto"):
        return own
    given = Path(resume)
    is_own = manager.is_own_step(given)
    if restarted and is_own:
        since = (path for path in own if step_of(path) > step_of(given))
        if any(_resumed_from(path) == resume for path in since):
            return own
    if not given.exists():
        raise UserError(f"checkpoint.resume = {resume!r}: no such folder; give a step folder or a run folder")
    found = [given] if is_step_folder(given) else step_folders(given)[::-1]
    if not found:
        raise UserError(f"checkpoint.resume = {resume!r} holds no usable checkpoint")
    if own and not is_own and given.resolve() != manager.output_dir.resolve():
        warn(f"going on in {manager.output_dir}; checkpoint.resume = {resume} was only its starting point")
        return own
    return found


def _resumed_from(path: Path) -> str | None:
    """What `checkpoint.resume` was when this was saved."""
    with suppress(DamagedCheckpoint, UserError, LookupError, TypeError):
        return str(open_checkpoint(path).manifest["config"]["checkpoint"]["resume"])
    return None


def check_same_model(
    checkpoint: Checkpoint,
    shapes: dict[str, list[int]],
    advice: str = "choose another experiment.output_dir or checkpoint.resume",
) -> None:
    """Refuses a checkpoint of another architecture, naming the first tensors that differ."""
    if differences := compare_shapes(checkpoint.shapes, shapes):
        raise UserError(f"{checkpoint.folder} is a checkpoint of another model: {differences}; {advice}")


def compare_shapes(there: Mapping[str, list[int]], here: Mapping[str, list[int]]) -> str:
    """The first tensors whose shapes differ, in words; empty if none does."""
    differences = [
        f"{name} {there.get(name, 'absent')} there, {here.get(name, 'absent')} here"
        for name in sorted({*there, *here})
        if there.get(name) != here.get(name)
    ]
    more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
    return "; ".join(differences[:3]) + more


def check_same_run(checkpoint: Checkpoint, now: dict[str, Any], allowed: list[str]) -> None:
    """Refuses to go on with another model, data, seed or batch than the checkpoint was made with."""
    then, current = _identity(checkpoint.manifest["config"]), _identity(now)
    for key in sorted({*then, *current}):
        if then.get(key) != current.get(key) and not any(key == a or key.startswith(f"{a}.") for a in allowed):
            raise UserError(
                f"{key} = {current.get(key)!r}, but {checkpoint.folder} was made with {then.get(key)!r}; "
                f"set it back, choose another experiment.output_dir, or list it in checkpoint.allow_changed"
            )


def _identity(config: dict[str, Any]) -> dict[str, Any]:
    """The values that make a run this run and no other, by dotted key."""
    flat = flatten(config)
    return {key: value for key, value in flat.items() if key.startswith(_IDENTITY) and key not in _NOT_IDENTITY}
