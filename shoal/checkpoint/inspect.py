"""Behind `shoal checkpoint`: lists, describes, verifies, compares and removes checkpoints, and returns plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from math import inf, prod
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.folders import damage_note, is_step_folder, remove_checkpoint, step_folders, step_of
from shoal.checkpoint.frozen_base import (
    BaseFiles,
    BaseTensor,
    FrozenBaseError,
    FrozenBaseMissing,
    base_files,
    find_base_in,
)
from shoal.checkpoint.latest import named_checkpoint
from shoal.checkpoint.manifest import MANIFEST, SECTIONS, dtype_name
from shoal.checkpoint.pieces import DamagedCheckpoint, StoredTensor, tensor_digest
from shoal.checkpoint.store import TRAINER, Checkpoint, open_checkpoint
from shoal.config.mesh import say_mesh
from shoal.errors import UserError, as_user_error

CONFIG_HIGHLIGHTS = (
    "recipe",
    "experiment.name",
    "experiment.seed",
    "model",
    "lora",
    "dataset.name",
    "dataset.tokenizer",
    "dataset.seq_length",
    "dataset.train_file",
    "dataset.max_seq_length",
    "training.optimizer.name",
    "training.learning_rate",
    "training.mixed_precision",
)
_CHUNK_NUMEL = 1 << 22


@dataclass(frozen=True)
class TensorDifference:
    """How one tensor differs between two checkpoints."""

    name: str
    max_abs: float | None = None
    """The largest difference of two elements."""
    relative: float | None = None
    """The largest difference divided by the largest absolute value of the tensor."""
    problem: str = ""
    """Why the two cannot be compared, if they cannot."""

    @property
    def slot(self) -> str | None:
        """Returns the optimizer's slot, such as exp_avg, or None for a weight."""
        return _slot_of(self.name)


@dataclass(frozen=True)
class Difference:
    """How two checkpoints a and b differ."""

    compared: int
    """The number of tensors that both have."""
    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    position: dict[str, list[Any]] = field(default_factory=dict)
    """The entries of trainer.json that differ, with both values."""
    tensors: list[TensorDifference] = field(default_factory=list)
    """Weights before optimizer slots, the largest relative difference first."""

    @property
    def equal(self) -> bool:
        return not (self.only_in_a or self.only_in_b or self.position or self.tensors)


def open_step_folder(path: Path, base: Path | None = None) -> Checkpoint:
    """Opens the checkpoint in a step folder, or `RUN/last`, `RUN/best`. Raises UserError that says what else the path
    is.

    `base` is where its frozen weights are now, if they were moved.
    """
    path = named_checkpoint(path)
    _check_folder(path, "a step folder")
    if steps := _steps_in(path):
        raise UserError(
            f"{path} is a run folder; give {path}/last, {path}/best or one of its checkpoints, such as {steps[-1]}"
        )
    if not (path / MANIFEST).exists():
        runs = [str(folder) for folder in sorted(path.iterdir()) if folder.is_dir() and _steps_in(folder)]
        example = (
            f"{runs[0]}/last, a checkpoint of a run in it" if runs else "RUN/last or RUN/checkpoints/step_00000100"
        )
        raise UserError(f"{path} is neither a checkpoint (it has no {MANIFEST}) nor a run folder; give {example}")
    checkpoint = open_checkpoint(path)
    if base is None:
        return checkpoint
    if not checkpoint.base:
        raise UserError(f"--base: {path} stores all its weights and has no frozen base; leave it out")
    return replace(checkpoint, base=find_base_in(base, checkpoint.base))


def list_checkpoints(run: Path) -> list[dict[str, Any]]:
    """Returns the checkpoints of a run, oldest first, damaged ones among them; or the one in a single step folder.

    Each is as `shoal checkpoint ls --json` prints it. Only manifests are read, no tensors.
    """
    _check_folder(run, "a run folder")
    steps = [run] if (run / MANIFEST).exists() else _steps_in(run)
    if not steps:
        raise UserError(f"{run} has no checkpoints; give a run folder, which has checkpoints/step_…")
    return [_describe_folder(folder) for folder in steps]


def _describe_folder(folder: Path) -> dict[str, Any]:
    """Returns one entry of `list_checkpoints`."""
    written = folder / MANIFEST if (folder / MANIFEST).exists() else folder
    row: dict[str, Any] = {
        "path": str(folder),
        "step": step_of(folder) if is_step_folder(folder) else None,
        "when": datetime.fromtimestamp(written.stat().st_mtime).isoformat(" ", "seconds"),
        "bytes": sum(entry.stat().st_size for entry in folder.iterdir() if entry.is_file()),
        "layout": None,
        "metrics": {},
        "base": {},
        "problem": None,
    }
    try:
        checkpoint = open_checkpoint(folder)
        if damage_note(folder).exists():
            raise DamagedCheckpoint(f"{folder}: a run could not read one of its tensors and skipped it")
        row["layout"] = describe_layout(as_dict(checkpoint.manifest.get("layout")))
        row |= {"metrics": as_dict(checkpoint.trainer.get("metrics")), "base": base_files(checkpoint.base)}
    except UserError as error:
        row["problem"] = str(error)
    return {**row, "good": row["problem"] is None}


def show(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns what a checkpoint holds, as `shoal checkpoint show --json` prints it."""
    manifest, tensors = checkpoint.manifest, checkpoint.tensors
    described = {name: _describe_tensor(name.partition("/")[2], tensor) for name, tensor in tensors.items()}
    slots: dict[str, list[int]] = {}
    for name in tensors:
        if slot := _slot_of(name):
            slots.setdefault(slot, []).append(described[name]["bytes"])
    return {
        "path": str(checkpoint.folder),
        "position": _position_of(checkpoint),
        "layout": as_dict(manifest.get("layout")),
        "versions": as_dict(manifest.get("versions")),
        "metrics": as_dict(checkpoint.trainer.get("metrics")),
        "config": {
            key: value for key in CONFIG_HIGHLIGHTS if (value := _value_at(manifest.get("config"), key)) is not None
        },
        "tensors": [row for name, row in described.items() if name.startswith("model/")],
        "slots": [{"name": slot, "tensors": len(n), "bytes": sum(n)} for slot, n in sorted(slots.items())],
        "base": base_files(checkpoint.base),
        "base_tensors": [
            {**_describe_tensor(name, t), "file": str(t.source.path)} for name, t in checkpoint.base.items()
        ],
    }


def verify(path: Path, base: Path | None = None) -> Iterator[dict[str, Any]]:
    """Reads every byte of a checkpoint, or of all checkpoints of a run, and compares every digest.

    Yields one entry for each, as `shoal checkpoint verify --json` prints it. The frozen base is read from the files in
    the manifest, or from `base`, and only once for a whole run. A checkpoint whose frozen base is missing is not
    damaged, because its stored tensors can be used.
    """
    path = named_checkpoint(path)
    _check_folder(path, "a folder")
    folders = _steps_in(path)
    if not folders and not (path / MANIFEST).exists() and not path.absolute().name.startswith("step_"):
        raise UserError(f"{path} is neither a checkpoint nor a run with checkpoints; give a step or run folder")
    files = BaseFiles()
    for folder in folders or [path]:
        problem, missing = None, dict[str, None]()
        try:
            checkpoint = open_checkpoint(folder)
            base_tensors = find_base_in(base, checkpoint.base) if base else checkpoint.base
            for tensor in (*checkpoint.tensors.values(), *(replace(t, files=files) for t in base_tensors.values())):
                try:
                    tensor.check()
                except FrozenBaseMissing as error:
                    missing[str(error)] = None  # a dict, so that each file is named once
        except UserError as error:
            problem = str(error)
        yield {"path": str(folder), "good": not problem, "problem": problem, "missing": "; ".join(missing) or None}


def diff(a: Checkpoint, b: Checkpoint, rtol: float | None = None) -> Difference:
    """Compares the weights, optimizer slots and positions of two checkpoints, written by any layouts.

    Tensors must be equal to the bit unless `rtol` is given: then they may differ by that fraction of their largest
    value. Tensors of the strategy, such as a loss scale, are compared only if both have them. One tensor of each
    checkpoint is in memory at a time.
    """
    tensors_a, tensors_b = a.all_tensors, b.all_tensors
    shared = sorted(tensors_a.keys() & tensors_b.keys())
    not_shared = sorted(name for name in tensors_a.keys() ^ tensors_b.keys() if not name.startswith("strategy/"))
    differing = [found for name in shared if (found := _compare(name, tensors_a[name], tensors_b[name], rtol))]
    position_a, position_b = _position_of(a), _position_of(b)
    return Difference(
        compared=len(shared),
        only_in_a=[name for name in not_shared if name in tensors_a],
        only_in_b=[name for name in not_shared if name in tensors_b],
        position={
            key: [position_a.get(key), position_b.get(key)]
            for key in sorted(position_a.keys() | position_b.keys())
            if position_a.get(key) != position_b.get(key)
        },
        tensors=sorted(differing, key=lambda d: (d.slot is not None, -inf if d.relative is None else -d.relative)),
    )


def remove(path: Path, force: bool = False) -> None:
    """Removes a checkpoint, damaged or not. Refuses folders with other files, and the newest good one of a run."""
    if not path.is_dir() or path.is_symlink():
        raise UserError(f"{path} is not a step folder; give one such as RUN/checkpoints/step_00000100")
    if not path.absolute().name.startswith("step_"):
        raise UserError(f"{path} is not a checkpoint, so it is not removed; give a folder named step_…")
    known = [MANIFEST, TRAINER, *(f"{section}{rest}.safetensors" for section in SECTIONS for rest in ("", "-*-of-*"))]
    foreign = [entry.name for entry in path.iterdir() if not (entry.is_file() and any(map(entry.match, known)))]
    if foreign:
        raise UserError(f"{path} has {min(foreign)!r}, which is not part of a checkpoint; remove the folder yourself")
    folder = path.resolve()
    newest_first = reversed(step_folders(folder.parent.parent)) if folder.parent.name == "checkpoints" else ()
    if not force and folder == next((step for step in newest_first if next(verify(step))["good"]), None):
        raise UserError(f"{path} is the newest good checkpoint of its run; give --force to remove it anyway")
    with as_user_error(f"{path} cannot be removed", OSError):
        remove_checkpoint(folder)


def _check_folder(path: Path, kind: str) -> None:
    """Raises UserError if a path is not a folder; `kind` says what to give."""
    if not path.is_dir():
        raise UserError(f"{path} is a file; give {kind}" if path.exists() else f"{path}: no such folder")


def _steps_in(run: Path) -> list[Path]:
    """Returns the step folders of a run folder, or of its folder `checkpoints`."""
    return step_folders(run.parent if run.name == "checkpoints" else run)


def describe_layout(layout: dict[str, Any]) -> str:
    """Returns a layout in words. A manifest is not trusted, and those of hand-written loops say less."""
    mesh = {side: size for side, size in as_dict(layout.get("mesh")).items() if type(size) is int and size > 1}
    words = [f"ZeRO-{layout['zero_stage']}"] if "zero_stage" in layout else []
    words += [say_mesh(mesh)] if mesh else []
    name = f"{layout.get('strategy', 'unknown')} on {layout.get('world_size', '?')}"
    return ": ".join(filter(None, (name, ", ".join(words))))


def _position_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns where in its run a checkpoint was saved: trainer.json without metrics, sums and callbacks."""
    left_out = ("metrics", "last_metrics", "since_log", "callbacks")
    return {key: value for key, value in checkpoint.trainer.items() if key not in left_out}


def _describe_tensor(name: str, tensor: StoredTensor) -> dict[str, Any]:
    """Returns one entry of a checkpoint's tensors, as `show` returns it."""
    return {
        "name": name,
        "shape": [*tensor.shape],
        "dtype": dtype_name(tensor.dtype),
        "bytes": tensor.dtype.itemsize * prod(tensor.shape),
    }


def _slot_of(name: str) -> str | None:
    """Returns the optimizer's slot in the name of a stored tensor, such as exp_avg, or None for a weight."""
    section, _, rest = name.partition("/")
    return rest.partition("/")[0] if section == "optimizer" else None


def as_dict(value: Any) -> dict[str, Any]:
    """Returns an entry of a manifest that should be a dict, or an empty one if it is something else."""
    return value if isinstance(value, dict) else {}


def _value_at(tree: Any, dotted: str) -> Any:
    """Returns the value under a dotted key, or None."""
    for key in dotted.split("."):
        tree = as_dict(tree).get(key)
    return tree


def _compare(name: str, a: StoredTensor, b: StoredTensor, rtol: float | None) -> TensorDifference | None:
    """Returns how two tensors differ, or None if they count as equal."""
    if a.shape != b.shape:
        return TensorDifference(name, problem=f"{[*a.shape]} in one, {[*b.shape]} in the other")
    if a.dtype != b.dtype and rtol is None:
        return TensorDifference(name, problem=f"{a.dtype} in one, {b.dtype} in the other".replace("torch.", ""))
    try:
        if _have_same_digest(a, b):
            return None
        left, right = a.read().contiguous().view(-1), b.read().contiguous().view(-1)
    except FrozenBaseError as error:
        return TensorDifference(name, problem=f"cannot be compared: {error}")
    if left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8)):
        return None
    if not _has_numbers(left.dtype) or not _has_numbers(right.dtype):
        return TensorDifference(name, problem="differs, and torch cannot compute with its dtype")
    max_abs, largest = 0.0, 0.0
    # In chunks, because float64 takes several times the memory.
    for chunks in zip(left.split(_CHUNK_NUMEL), right.split(_CHUNK_NUMEL), strict=True):
        one, other = ((torch.view_as_real(t) if t.is_complex() else t).to(torch.float64, copy=True) for t in chunks)
        distance = (one - other).abs()
        distance[(one == other) | (one.isnan() & other.isnan())] = 0  # inf - inf is NaN, but the two are equal
        max_abs = max(max_abs, distance.nan_to_num(nan=torch.inf, posinf=torch.inf).max().item())
        largest = max(largest, one.abs().nan_to_num(0, 0).max().item(), other.abs().nan_to_num(0, 0).max().item())
    relative = max_abs / largest if largest else max_abs
    return None if rtol is not None and relative <= rtol else TensorDifference(name, max_abs, relative)


def _has_numbers(dtype: torch.dtype) -> bool:
    """Returns whether torch can convert a dtype to float64 or complex128; it cannot for bits8 and the like."""
    try:
        torch.empty(1, dtype=dtype).to(torch.complex128 if dtype.is_complex else torch.float64)
    except RuntimeError:
        return False
    return True


def _have_same_digest(a: StoredTensor, b: StoredTensor) -> bool:
    """Returns whether two tensors, one of them in a frozen base, are equal by their digests.

    The files of the frozen base need not exist for that.
    """
    if not isinstance(a, BaseTensor) and not isinstance(b, BaseTensor):
        return False
    if isinstance(a, BaseTensor) and isinstance(b, BaseTensor) and a.dtype == b.dtype and a.same_as(b):
        return True
    if any(isinstance(t, BaseTensor) and t.derivation is not None for t in (a, b)):
        return False  # the files hold something else than the tensor
    digests = (t.source.sha256 if isinstance(t, BaseTensor) else tensor_digest(t.read()) for t in (a, b))
    return (a.dtype, a.pieces[0].dtype) == (b.dtype, b.pieces[0].dtype) and next(digests) == next(digests)
