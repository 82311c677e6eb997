"""The checkpoint that a run resumes from: finds the latest, and refuses one of another model or run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.checkpoint.folders import checkpoint_folders, is_step_folder, step_folders, step_of
from shoal.checkpoint.rotation import CheckpointManager, best_first_folders
from shoal.checkpoint.store import Checkpoint, DamagedCheckpoint, open_checkpoint
from shoal.config.schema import LoaderConfig
from shoal.config.yaml import flatten
from shoal.errors import UserError

_MODEL_KEYS = ("recipe", "model.", "lora.")
"""The keys that decide which tensors a model has, by how they begin."""
_IDENTITY_KEYS = (*_MODEL_KEYS, "dataset.", "experiment.seed", "training.body")
"""The keys that must not change when a run resumes, by how they begin."""
_CHANGEABLE_KEYS = {f"dataset.{key}" for key in (*LoaderConfig.model_fields, "cache_dir")}


def find_latest_checkpoint(output_dir: str | Path) -> Path | None:
    """Returns the checkpoint with the highest step whose manifest verifies, or None; `final` comes after all steps.

    The folder is that of a run, or one in which a script has saved `step_100` and the like.
    """
    for folder in reversed(checkpoint_folders(output_dir)):
        with suppress(DamagedCheckpoint):
            return open_checkpoint(folder).folder
    return None


def named_checkpoint(path: Path) -> Path:
    """Returns the checkpoint that `RUN/last` or `RUN/best` means; any other path, or one that exists, is returned as
    it is."""
    if path.name not in ("last", "best") or path.exists():
        return path
    run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    best = (folder for folder in best_first_folders(run) if folder.exists())
    found = find_latest_checkpoint(run) if path.name == "last" else next(best, None)
    if found is None:
        missing = "no good checkpoint" if path.name == "last" else "no checkpoint that was evaluated"
        raise UserError(f"{path}: {run} has {missing}; give the path of a checkpoint")
    return found


def find_resumable(
    resume: str, manager: CheckpointManager, warn: Callable[[str], None], was_restarted: bool = False
) -> list[Path]:
    """Returns the checkpoints that a run may resume from, in the order to try them; none means a fresh start.

    `resume` is the value of checkpoint.resume. If it is a checkpoint of this run, the run goes back to it; but a
    launcher that restarts the run (`was_restarted`) must not go back again, if anything was saved since.
    """
    newest_first = step_folders(manager.output_dir)[::-1]
    if resume == "never" and newest_first:
        raise UserError(
            f"checkpoint.resume = never, but {manager.folder} already has {newest_first[0].name}; choose another "
            "experiment.output_dir or checkpoint.resume = auto"
        )
    if resume in ("never", "auto"):
        return newest_first
    path = named_checkpoint(manager.output_dir / resume if resume in ("last", "best") else Path(resume))
    is_own = manager.owns(path)
    if was_restarted and is_own:
        later = (folder for folder in newest_first if step_of(folder) > step_of(path))
        if any(_resume_key_of(folder) == resume for folder in later):
            return newest_first
    if not path.exists():
        raise UserError(f"checkpoint.resume = {resume!r}: no such folder; give a step folder or a run folder")
    found = [path] if is_step_folder(path) else step_folders(path)[::-1]
    if not found:
        raise UserError(f"checkpoint.resume = {resume!r} has no checkpoints; give a step folder or a run folder")
    if newest_first and not is_own and path.resolve() != manager.output_dir.resolve():
        warn(f"resuming in {manager.output_dir}; checkpoint.resume = {resume} was only where the run started")
        return newest_first
    return found


def _resume_key_of(folder: Path) -> str | None:
    """Returns the value of checkpoint.resume with which a checkpoint was saved, or None if it does not say."""
    with suppress(UserError, LookupError, TypeError):
        return str(open_checkpoint(folder).manifest["config"]["checkpoint"]["resume"])
    return None


def check_same_model(
    checkpoint: Checkpoint,
    shapes: dict[str, list[int]],
    advice: str = "choose another experiment.output_dir or checkpoint.resume",
    config: dict[str, Any] | None = None,
) -> None:
    """Raises UserError if a checkpoint is one of another model, and names the first tensors that differ.

    `config` is that of the run that resumes: a key of the model that was changed comes first in the message.
    """
    if not describe_differences(checkpoint.shapes, shapes):
        return
    changes = changed_keys(checkpoint, config) if config else []
    changes = [change for change in changes if change[0].startswith(_MODEL_KEYS)]
    cause = "".join(f"{key} = {now!r} (was {then!r}): " for key, now, then in changes[:1])
    differences = describe_differences(checkpoint.shapes, shapes, shown=1 if cause else 3)
    advice = f"set it back, or {advice}" if cause else advice
    raise UserError(f"{cause}{checkpoint.folder} is a checkpoint of another model: {differences}; {advice}")


def describe_differences(
    stored_shapes: Mapping[str, list[int]], model_shapes: Mapping[str, list[int]], shown: int = 3
) -> str:
    """Returns a list of the first tensors whose shapes differ, or an empty string if none do."""
    differences = [
        f"{name} is {stored_shapes.get(name, 'absent')} in the file and {model_shapes.get(name, 'absent')} in the model"
        for name in sorted({*stored_shapes, *model_shapes})
        if stored_shapes.get(name) != model_shapes.get(name)
    ]
    more = f" (and {len(differences) - shown} more)" if len(differences) > shown else ""
    return "; ".join(differences[:shown]) + more


def check_same_run(checkpoint: Checkpoint, config: dict[str, Any], allowed: list[str]) -> None:
    """Raises UserError if the recipe, model, data or seed has changed since a checkpoint was saved.

    `allowed` is checkpoint.allow_changed: keys and sections that may change.
    """
    for key, now, then in changed_keys(checkpoint, config):
        if not is_allowed(key, allowed):
            is_base = key == "model.name" and checkpoint.base
            only_if = " (shoal then checks that the same weights are there)" if is_base else ""
            raise UserError(
                f"{key} = {now!r}, but {checkpoint.folder} was saved with {then!r}; set it back, choose another "
                f"experiment.output_dir, or list it in checkpoint.allow_changed{only_if}"
            )


def changed_keys(checkpoint: Checkpoint, config: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Returns the keys of recipe, model, data and seed that have changed since a checkpoint was saved, each with its
    value now and then."""
    then, now = _identity(checkpoint.manifest["config"]), _identity(config)
    return [(key, now.get(key), then.get(key)) for key in sorted({*then, *now}) if then.get(key) != now.get(key)]


def is_allowed(key: str, allowed: list[str]) -> bool:
    """Returns whether checkpoint.allow_changed lists a key, or a section that it is in."""
    return any(key == name or key.startswith(f"{name}.") for name in allowed)


def _identity(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the values that must not change when a run resumes, by dotted key."""
    return {
        key: value
        for key, value in flatten(config).items()
        if key.startswith(_IDENTITY_KEYS) and key not in _CHANGEABLE_KEYS
    }
