"""What is in checkpoints, as data: which there are, what one holds, whether it is whole, how two differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from math import inf, prod
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.folders import damage_note, is_step_folder, remove_checkpoint, step_folders, step_of
from shoal.checkpoint.frozen_base import BaseFiles, BaseMissing, BaseProblem, Referenced, files_of, look_in
from shoal.checkpoint.manifest import MANIFEST, SECTIONS, dtype_name
from shoal.checkpoint.pieces import DamagedCheckpoint, StoredTensor, tensor_digest
from shoal.checkpoint.store import TRAINER, Checkpoint, open_checkpoint
from shoal.config.mesh import say_mesh
from shoal.errors import UserError

HIGHLIGHTS = (
    "recipe",
    "experiment.name",
    "experiment.seed",
    "model",
    "lora",
    "dataset.name",
    "dataset.tokenizer",
    "dataset.seq_length",
    "training.optimizer.name",
    "training.learning_rate",
    "training.mixed_precision",
)
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Differing:
    """A tensor that is not the same in two checkpoints."""

    name: str
    max_abs: float | None = None
    relative: float | None = None
    """The largest difference over the largest value of the tensor."""
    problem: str = ""
    """Why they cannot be compared."""

    @property
    def slot(self) -> str | None:
        """Of the optimizer, such as exp_avg, if it is a moment."""
        return _slot(self.name)


@dataclass(frozen=True)
class Difference:
    """Between two checkpoints, weights before moments, worst tensors first."""

    compared: int
    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    position: dict[str, list[Any]] = field(default_factory=dict)
    tensors: list[Differing] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return not (self.only_in_a or self.only_in_b or self.position or self.tensors)


def open_step(path: Path) -> Checkpoint:
    """The checkpoint in a step folder, or a UserError that says what the path is instead."""
    _check_folder(path, "a step folder")
    if steps := _steps(path):
        raise UserError(f"{path} is a run folder; give one of its step folders, such as {steps[-1]}")
    if not (path / MANIFEST).exists():
        raise UserError(
            f"{path} is not a checkpoint: it has no {MANIFEST}; give a folder such as RUN/checkpoints/step_00000100"
        )
    return open_checkpoint(path)


def list_checkpoints(run: Path) -> list[dict[str, Any]]:
    """The checkpoints of a run, oldest first, with those that are damaged; or a checkpoint that is by itself.

    As `shoal checkpoint ls --json` prints them: what the manifests say, without reading tensors.
    """
    _check_folder(run, "a run folder")
    steps = [run] if (run / MANIFEST).exists() else _steps(run)
    if not steps:
        raise UserError(f"{run} holds no checkpoints; give a run folder, which has checkpoints/step_…")
    return [_describe_folder(folder) for folder in steps]


def _describe_folder(folder: Path) -> dict[str, Any]:
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
            raise DamagedCheckpoint(f"{folder}: a run could not read it and passed it over")
        row["layout"] = say_layout(_dict(checkpoint.manifest.get("layout")))
        row |= {"metrics": _dict(checkpoint.trainer.get("metrics")), "base": files_of(checkpoint.base)}
    except UserError as error:
        row["problem"] = str(error)
    return {**row, "good": row["problem"] is None}


def show(checkpoint: Checkpoint) -> dict[str, Any]:
    """What one checkpoint holds, as `shoal checkpoint show --json` prints it."""
    manifest, tensors = checkpoint.manifest, checkpoint.tensors
    described = {name: _describe(name.partition("/")[2], tensor) for name, tensor in tensors.items()}
    slots: dict[str, list[int]] = {}
    for name in tensors:
        if slot := _slot(name):
            slots.setdefault(slot, []).append(described[name]["bytes"])
    return {
        "path": str(checkpoint.folder),
        "position": _position(checkpoint),
        "layout": _dict(manifest.get("layout")),
        "versions": _dict(manifest.get("versions")),
        "metrics": _dict(checkpoint.trainer.get("metrics")),
        "config": {key: value for key in HIGHLIGHTS if (value := _value(manifest.get("config"), key)) is not None},
        "tensors": [row for name, row in described.items() if name.startswith("model/")],
        "slots": [{"name": slot, "tensors": len(n), "bytes": sum(n)} for slot, n in sorted(slots.items())],
        "base": files_of(checkpoint.base),
        "base_tensors": [{**_describe(name, t), "file": str(t.source.path)} for name, t in checkpoint.base.items()],
    }


def verify(path: Path, base: Path | None = None) -> Iterator[dict[str, Any]]:
    """Reads every byte of a checkpoint, or of all of a run one after another, and compares every digest.

    Frozen weights that it refers to are read where they were, or in `base`; those of a run once for all. Yields what
    `shoal checkpoint verify --json` prints. A checkpoint is not damaged if a file that it refers to is missing: what
    it holds itself can be used.
    """
    _check_folder(path, "a folder")
    folders = _steps(path)
    if not folders and not (path / MANIFEST).exists() and not _looks_like_a_step(path):
        raise UserError(f"{path} is neither a checkpoint nor a run that has some")
    files = BaseFiles()
    for folder in folders or [path]:
        problem, missing = None, dict[str, None]()
        try:
            checkpoint = open_checkpoint(folder)
            referenced = look_in(base, checkpoint.base) if base else checkpoint.base
            for tensor in (*checkpoint.tensors.values(), *(replace(t, files=files) for t in referenced.values())):
                try:
                    tensor.check()
                except BaseMissing as error:
                    missing[str(error)] = None  # each once
        except UserError as error:
            problem = str(error)
        yield {"path": str(folder), "good": not problem, "problem": problem, "missing": "; ".join(missing) or None}


def diff(a: Checkpoint, b: Checkpoint, rtol: float | None = None) -> Difference:
    """Compares weights, moments and position, one tensor at a time, whatever layouts wrote them.

    To the bit, unless `rtol` is given: then a tensor may differ by that much of its largest value. What a layout keeps
    for itself (a loss scale) is compared where both have it.
    """
    left, right = a.everything, b.everything
    shared = sorted(left.keys() & right.keys())
    differing = [found for name in shared if (found := _compare(name, left[name], right[name], rtol))]
    here, there = _position(a), _position(b)
    moved = (key for key in sorted(here.keys() | there.keys()) if here.get(key) != there.get(key))
    return Difference(
        compared=len(shared),
        only_in_a=_not_of_a_layout(left.keys() - right.keys()),
        only_in_b=_not_of_a_layout(right.keys() - left.keys()),
        position={key: [here.get(key), there.get(key)] for key in moved},
        tensors=sorted(differing, key=lambda d: (d.slot is not None, -inf if d.relative is None else -d.relative)),
    )


def remove(path: Path, force: bool = False) -> None:
    """Removes a checkpoint, damaged or not: first its name, so that no reader sees half of it, then its files."""
    if not path.is_dir() or path.is_symlink():
        raise UserError(f"{path} is not a step folder; give one such as RUN/checkpoints/step_00000100")
    if not _looks_like_a_step(path):
        raise UserError(f"{path} is not a checkpoint, so it is not removed; give a folder named step_…")
    ours = [MANIFEST, TRAINER, *(f"{section}{rest}.safetensors" for section in SECTIONS for rest in ("", "-*-of-*"))]
    entries = (entry for entry in path.iterdir() if not (entry.is_file() and any(map(entry.match, ours))))
    if strange := sorted(entry.name for entry in entries):
        raise UserError(f"{path} holds {strange[0]!r}, which is of no checkpoint; look at it and remove it yourself")
    folder = path.resolve()
    newest_first = reversed(step_folders(folder.parent.parent)) if folder.parent.name == "checkpoints" else ()
    if not force and folder == next((step for step in newest_first if next(verify(step))["good"]), None):
        raise UserError(f"{path} is the newest good checkpoint of its run; give --force to remove it all the same")
    try:
        remove_checkpoint(folder)
    except OSError as error:
        raise UserError(f"{path} cannot be removed: {error.strerror}") from None


def _check_folder(path: Path, kind: str) -> None:
    if not path.is_dir():
        raise UserError(f"{path} is a file; give {kind}" if path.exists() else f"there is no folder {path}")


def _steps(run: Path) -> list[Path]:
    """The step folders of a run folder, or of its checkpoints folder."""
    return step_folders(run.parent if run.name == "checkpoints" else run)


def _looks_like_a_step(path: Path) -> bool:
    return path.absolute().name.startswith("step_")


def say_layout(layout: dict[str, Any]) -> str:
    """What a manifest says of it; those of hand-written loops and of other hands may say less."""
    mesh = {side: size for side, size in _dict(layout.get("mesh")).items() if type(size) is int and size > 1}
    words = [f"ZeRO-{layout['zero_stage']}"] if "zero_stage" in layout else []
    words += [say_mesh(mesh)] if mesh else []
    name = f"{layout.get('strategy', 'unknown')} on {layout.get('world_size', '?')}"
    return ": ".join(filter(None, (name, ", ".join(words))))


def _position(checkpoint: Checkpoint) -> dict[str, Any]:
    """Where the run was; what an evaluation said is not part of it."""
    return {key: value for key, value in checkpoint.trainer.items() if key != "metrics"}


def _describe(name: str, tensor: StoredTensor) -> dict[str, Any]:
    nbytes = tensor.dtype.itemsize * prod(tensor.shape)
    return {"name": name, "shape": [*tensor.shape], "dtype": dtype_name(tensor.dtype), "bytes": nbytes}


def _slot(name: str) -> str | None:
    """Of the optimizer, such as exp_avg, if the tensor is a moment."""
    section, _, rest = name.partition("/")
    return rest.partition("/")[0] if section == "optimizer" else None


def _dict(value: Any) -> dict[str, Any]:
    """A manifest's section; one that was written by another hand may be anything."""
    return value if isinstance(value, dict) else {}


def _value(tree: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        tree = _dict(tree).get(key)
    return tree


def _not_of_a_layout(names: set[str]) -> list[str]:
    return sorted(name for name in names if not name.startswith("strategy/"))


def _compare(name: str, a: StoredTensor, b: StoredTensor, rtol: float | None) -> Differing | None:
    if a.shape != b.shape:
        return Differing(name, problem=f"{[*a.shape]} in one, {[*b.shape]} in the other")
    if a.dtype != b.dtype and rtol is None:
        return Differing(name, problem=f"{a.dtype} in one, {b.dtype} in the other".replace("torch.", ""))
    try:
        if _same_digest(a, b):
            return None
        left, right = a.read().contiguous().view(-1), b.read().contiguous().view(-1)
    except BaseProblem as problem:
        return Differing(name, problem=f"cannot be compared: {problem}")
    if left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8)):
        return None
    max_abs, largest = 0.0, 0.0
    for chunks in zip(left.split(_CHUNK), right.split(_CHUNK), strict=True):  # float64 takes several times the memory
        one, other = ((torch.view_as_real(t) if t.is_complex() else t).to(torch.float64, copy=True) for t in chunks)
        apart = (one - other).abs()
        apart[(one == other) | (one.isnan() & other.isnan())] = 0  # infinities minus themselves are no numbers
        max_abs = max(max_abs, apart.nan_to_num(nan=torch.inf, posinf=torch.inf).max().item())
        largest = max(largest, one.abs().nan_to_num(0, 0).max().item(), other.abs().nan_to_num(0, 0).max().item())
    relative = max_abs / largest if largest else max_abs
    return None if rtol is not None and relative <= rtol else Differing(name, max_abs, relative)


def _same_digest(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two tensors are known to be equal without looking for a base, which may not be there."""
    if not isinstance(a, Referenced) and not isinstance(b, Referenced):
        return False
    digests = (t.source.sha256 if isinstance(t, Referenced) else tensor_digest(t.read()) for t in (a, b))
    return (a.dtype, a.pieces[0].dtype) == (b.dtype, b.pieces[0].dtype) and next(digests) == next(digests)
