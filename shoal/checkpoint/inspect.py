"""What is in checkpoints, as data: which there are, what one holds, whether it is whole, how two differ."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from fnmatch import fnmatch
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.frozen_base import BaseAltered, BaseFiles, BaseMissing, BaseProblem, Referenced, files_of, look_in
from shoal.checkpoint.rotation import CheckpointManager, note_of_damage
from shoal.checkpoint.store import MANIFEST, ROOMS, TRAINER, Checkpoint, DamagedCheckpoint, open_checkpoint
from shoal.checkpoint.stored_tensor import Stored, tensor_digest
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
class Listed:
    """A line of `ls`: what the manifest says, without reading tensors."""

    path: str
    step: int
    when: str
    bytes: int
    layout: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    """What the step was worth, where it was evaluated."""
    base: dict[str, str | None] = field(default_factory=dict)
    """Files that it refers to for frozen weights, and why they cannot be used, if so."""
    problem: str | None = None
    """Why it is damaged, if it is."""


@dataclass(frozen=True)
class Shown:
    """What one checkpoint holds."""

    path: str
    position: dict[str, Any]
    layout: dict[str, Any]
    versions: dict[str, Any]
    metrics: dict[str, Any]
    config: dict[str, Any]
    tensors: list[dict[str, Any]]
    slots: list[dict[str, Any]]
    base: dict[str, str | None]
    """Files that it refers to for frozen weights, and why they cannot be used, if so."""
    base_tensors: list[dict[str, Any]]


@dataclass(frozen=True)
class Verified:
    """Whether a checkpoint is whole."""

    problem: str | None = None
    """What is damaged: in the folder, or in the files that it refers to."""
    missing: str | None = None
    """Files that it refers to and that are not there. It is not damaged for that; what it holds itself can be used."""


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
        room, _, rest = self.name.partition("/")
        return rest.partition("/")[0] if room == "optimizer" else None


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

    def as_dict(self) -> dict[str, Any]:
        return {"equal": self.equal, **asdict(self)}


def open_step(path: Path) -> Checkpoint:
    """The checkpoint in a step folder, or a UserError that says what the path is instead."""
    if not path.is_dir():
        raise UserError(f"{path} is a file; give a step folder" if path.exists() else f"there is no folder {path}")
    if steps := _steps(path):
        raise UserError(f"{path} is a run folder; give one of its step folders, such as {steps[-1]}")
    try:
        return open_checkpoint(path)
    except DamagedCheckpoint as error:
        if not (path / MANIFEST).exists():
            raise UserError(
                f"{path} is not a checkpoint: it has no {MANIFEST}; give a folder such as RUN/checkpoints/step_00000100"
            ) from None
        raise UserError(f"damaged checkpoint: {error}") from None


def list_checkpoints(run: Path) -> list[Listed]:
    """The checkpoints of a run, oldest first, with those that are damaged; or a checkpoint that is by itself."""
    if not run.is_dir():
        raise UserError(f"{run} is a file; give a run folder" if run.exists() else f"there is no folder {run}")
    steps = [run] if (run / MANIFEST).exists() else _steps(run)
    if not steps:
        raise UserError(f"{run} holds no checkpoints; give a run folder, which has checkpoints/step_…")
    return [_listed(folder) for folder in steps]


def show(checkpoint: Checkpoint) -> Shown:
    state, manifest = checkpoint.stored(), checkpoint.manifest
    slots: dict[str, list[Stored]] = {}
    for of_parameter in state.optimizer.values():
        for slot, stored in of_parameter.items():
            slots.setdefault(slot, []).append(_lazy(stored))
    return Shown(
        path=str(checkpoint.folder),
        position=_position(checkpoint),
        layout=_dict(manifest.get("layout")),
        versions=_dict(manifest.get("versions")),
        metrics=_dict(checkpoint.trainer.get("metrics")),
        config={key: value for key in HIGHLIGHTS if (value := _value(manifest.get("config"), key)) is not None},
        tensors=[_describe(name, _lazy(stored)) for name, stored in state.model.items()],
        slots=[
            {"name": slot, "tensors": len(tensors), "bytes": sum(map(_nbytes, tensors))}
            for slot, tensors in sorted(slots.items())
        ],
        base=_base_files(checkpoint),
        base_tensors=[
            {**_describe(name, reference), "file": str(reference.path)} for name, reference in checkpoint.base.items()
        ],
    )


def verify(
    path: Path, told: Callable[[Path, Verified], None] = lambda folder, verified: None, base: Path | None = None
) -> dict[str, Verified]:
    """Reads every byte of a checkpoint, or of all of a run, and compares every digest: folder → what is wrong.

    Frozen weights that it refers to are read where they were, or in `base`; those of a run once for all.
    """
    if not path.is_dir():
        raise UserError(f"{path} is a file; give a folder" if path.exists() else f"there is no folder {path}")
    folders = _steps(path)
    if not folders and not (path / MANIFEST).exists() and not _looks_like_a_step(path):
        raise UserError(f"{path} is neither a checkpoint nor a run that has some")
    everything: dict[str, Verified] = {}
    files = BaseFiles()
    for folder in folders or [path]:
        try:
            checkpoint = open_checkpoint(folder)
            for stored in checkpoint.tensors.values():
                stored.check()
            verified = Verified(missing=_verify_base(checkpoint, files, base))
        except (DamagedCheckpoint, UserError) as error:
            verified = Verified(problem=str(error))
        everything[str(folder)] = verified
        told(folder, verified)
    return everything


def _verify_base(checkpoint: Checkpoint, files: BaseFiles, place: Path | None) -> str | None:
    """What of the base is not there; UserError if it is, but altered."""
    references = look_in(place, checkpoint.base) if place else checkpoint.base
    missing: dict[str, None] = {}
    for reference in references.values():
        try:
            replace(reference, files=files).check()
        except BaseMissing as problem:
            missing[str(problem)] = None
        except BaseAltered as problem:
            raise UserError(f"the base that it refers to: {problem}") from None
    return "; ".join(missing) or None


def diff(a: Checkpoint, b: Checkpoint, rtol: float | None = None) -> Difference:
    """Compares weights, moments and position, one tensor at a time, whatever layouts wrote them.

    To the bit, unless `rtol` is given: then a tensor may differ by that much of its largest value. What a layout keeps
    for itself (a loss scale) is compared where both have it.
    """
    left, right = _everything(a), _everything(b)
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
    if strange := sorted(entry.name for entry in path.iterdir() if not _is_ours(entry)):
        raise UserError(f"{path} holds {strange[0]!r}, which is of no checkpoint; look at it and remove it yourself")
    folder = path.resolve()
    if not force and folder.parent.name == "checkpoints" and _newest_whole(folder.parent) == folder:
        raise UserError(f"{path} is the newest good checkpoint of its run; give --force to remove it all the same")
    gone = folder.with_name(f".{folder.name}.removed")
    try:
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        shutil.rmtree(gone)
    except OSError as error:
        raise UserError(f"{path} cannot be removed: {error.strerror}") from None


def _newest_whole(run: Path) -> Path | None:
    """The newest checkpoint of a run whose every byte is as it was written."""
    for folder in reversed(_steps(run)):
        if verify(folder)[str(folder)].problem is None:
            return folder.resolve()
    return None


def _steps(run: Path) -> list[Path]:
    """The step folders of a run folder, or of its checkpoints folder."""
    return CheckpointManager(run.parent if run.name == "checkpoints" else run).steps()


def _looks_like_a_step(path: Path) -> bool:
    return path.absolute().name.startswith("step_")


def _is_ours(entry: Path) -> bool:
    ours = [MANIFEST, TRAINER, *(f"{room}{rest}.safetensors" for room in ROOMS for rest in ("", "-*-of-*"))]
    return entry.is_file() and any(fnmatch(entry.name, pattern) for pattern in ours)


def _listed(folder: Path) -> Listed:
    written = folder / MANIFEST if (folder / MANIFEST).exists() else folder
    about: dict[str, Any] = {
        "path": str(folder),
        "step": int(folder.name.removeprefix("step_")),
        "when": datetime.fromtimestamp(written.stat().st_mtime).isoformat(" ", "seconds"),
        "bytes": sum(entry.stat().st_size for entry in folder.iterdir() if entry.is_file()),
    }
    try:
        checkpoint = open_checkpoint(folder)
    except (DamagedCheckpoint, UserError) as error:
        return Listed(**about, problem=str(error))
    if note_of_damage(folder).exists():
        return Listed(**about, problem=f"{folder}: a run could not read it and passed it over")
    layout, metrics = _dict(checkpoint.manifest.get("layout")), _dict(checkpoint.trainer.get("metrics"))
    return Listed(**about, layout=say_layout(layout), metrics=metrics, base=_base_files(checkpoint))


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


def _base_files(checkpoint: Checkpoint) -> dict[str, str | None]:
    return {str(path): problem for path, problem in files_of(checkpoint.base).items()}


def _everything(checkpoint: Checkpoint) -> dict[str, Stored | Referenced]:
    """By room and name; what is frozen belongs to the model, wherever it is."""
    return {**checkpoint.tensors, **{f"model/{name}": reference for name, reference in checkpoint.base.items()}}


def _describe(name: str, stored: Stored | Referenced) -> dict[str, Any]:
    dtype = str(stored.dtype).removeprefix("torch.")
    return {"name": name, "shape": [*stored.shape], "dtype": dtype, "bytes": _nbytes(stored)}


def _nbytes(stored: Stored | Referenced) -> int:
    return stored.dtype.itemsize * torch.Size(stored.shape).numel()


def _lazy(value: Any) -> Stored:
    assert isinstance(value, Stored)
    return value


def _dict(value: Any) -> dict[str, Any]:
    """A manifest's section; one that was written by another hand may be anything."""
    return value if isinstance(value, dict) else {}


def _value(tree: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        tree = _dict(tree).get(key)
    return tree


def _not_of_a_layout(names: set[str]) -> list[str]:
    return sorted(name for name in names if not name.startswith("strategy/"))


def _compare(name: str, a: Stored | Referenced, b: Stored | Referenced, rtol: float | None) -> Differing | None:
    if a.shape != b.shape:
        return Differing(name, problem=f"{[*a.shape]} in one, {[*b.shape]} in the other")
    if a.dtype != b.dtype and rtol is None:
        return Differing(name, problem=f"{a.dtype} in one, {b.dtype} in the other".replace("torch.", ""))
    try:
        if _same_digest(a, b):
            return None
        left, right = a.read().contiguous().view(-1), b.read().contiguous().view(-1)
    except DamagedCheckpoint as error:
        raise UserError(f"damaged checkpoint: {error}") from None
    except BaseProblem as problem:
        return Differing(name, problem=f"cannot be compared: {problem}")
    if left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8)):
        return None
    max_abs, largest = 0.0, 0.0
    for one, other in _in_chunks(left, right):
        apart = (one - other).abs()
        apart[(one == other) | (one.isnan() & other.isnan())] = 0  # infinities minus themselves are no numbers
        max_abs = max(max_abs, apart.nan_to_num(nan=torch.inf, posinf=torch.inf).max().item())
        largest = max(largest, one.abs().nan_to_num(0, 0).max().item(), other.abs().nan_to_num(0, 0).max().item())
    relative = max_abs / largest if largest else max_abs
    return None if rtol is not None and relative <= rtol else Differing(name, max_abs, relative)


def _same_digest(a: Stored | Referenced, b: Stored | Referenced) -> bool:
    """Whether two tensors are known to be equal without looking for a base, which may not be there."""
    if isinstance(a, Stored):
        a, b = b, a
    if isinstance(a, Stored):
        return False
    if isinstance(b, Referenced):
        return a.same_as(b) and a.dtype == b.dtype
    return a.file_dtype == a.dtype == b.dtype and tensor_digest(b.read()) == a.sha256


def _in_chunks(left: Tensor, right: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """In float64, which takes several times the memory, so a part at a time."""
    for one, other in zip(left.split(_CHUNK), right.split(_CHUNK), strict=True):
        pair = (torch.view_as_real(t) if t.is_complex() else t for t in (one, other))
        first, second = (t.to(torch.float64, copy=True) for t in pair)
        yield first, second
