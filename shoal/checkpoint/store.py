"""One checkpoint on disk: logical tensors in safetensors, the rest in JSON, and nothing that can run.

    step_00000100/
      model.safetensors      every tensor under the name it has in the unwrapped model
      optimizer.safetensors  "<slot>/<parameter name>", such as "exp_avg/encoder"
      strategy.safetensors   what the layout keeps, where it keeps something: the loss scale of fp16
      trainer.json           step, samples seen, counters
      manifest.json          written last: config, layout, versions, and a digest of all the rest

Several ranks write as many files, `model-00001-of-00002.safetensors` and so on, each tensor in one of them.

A folder is written beside its final name, flushed, and renamed: it is there whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import shoal
from shoal.errors import UserError
from shoal.types import TrainState

T = TypeVar("T")

FORMAT = 1
MANIFEST, TRAINER = "manifest.json", "trainer.json"


class DamagedCheckpoint(Exception):
    """The folder is not what its manifest says: cut short, altered, or never finished."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest is whole. Tensors are read, and checked, when asked for."""

    folder: Path
    manifest: dict[str, Any]
    trainer: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.trainer["step"])

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The model's tensors: name → shape."""
        tensors = self.manifest["tensors"].items()
        return {name.removeprefix("model/"): about["shape"] for name, about in tensors if name.startswith("model/")}

    def read(self) -> TrainState:
        """All tensors, on the CPU, each compared with its digest."""
        model: dict[str, Tensor] = {}
        strategy: dict[str, Tensor] = {}
        optimizer: dict[str, dict[str, Tensor]] = {}
        by_file: dict[str, list[str]] = {}
        for name, about in self.manifest["tensors"].items():
            for piece in about["pieces"]:
                by_file.setdefault(piece["file"], []).append(name)
        for file, names in by_file.items():
            for name, tensor in self._read_file(file, names).items():
                room, _, rest = name.partition("/")
                if room == "optimizer":
                    slot, _, parameter = rest.partition("/")
                    optimizer.setdefault(parameter, {})[slot] = tensor
                else:
                    (model if room == "model" else strategy)[rest] = tensor
        return TrainState(model, optimizer, strategy)

    def _read_file(self, file: str, names: list[str]) -> dict[str, Tensor]:
        path = self.folder / file
        try:
            if _header_digest(path) != self.manifest["files"][file]["header"]:
                raise DamagedCheckpoint(f"{path}: its header was altered")
            tensors: dict[str, Tensor] = {}
            with safe_open(path, framework="pt") as shard:
                for name in names:
                    (piece,) = self.manifest["tensors"][name]["pieces"]
                    tensor = shard.get_tensor(name.partition("/")[2])
                    if _tensor_digest(tensor) != piece["sha256"]:
                        raise DamagedCheckpoint(f"{path}: {name} does not match its digest")
                    tensors[name] = tensor
            return tensors
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise DamagedCheckpoint(f"{path}: {error}") from None


def write_checkpoint(folder: Path, state: TrainState, trainer: dict[str, Any], about: dict[str, Any]) -> None:
    """Publishes `folder` whole, or leaves nothing. Every rank calls it with the same state and writes a part of it.

    If it fails anywhere, it raises OSError on every rank.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    beside = folder.with_name(f".{folder.name}.part")
    if rank == 0:
        shutil.rmtree(beside, ignore_errors=True)
        _agree(lambda: beside.mkdir(parents=True))
    else:
        _agree(lambda: None)
    try:
        parts = _agree(lambda: _write_part(beside, state, rank, ranks))
        _agree(lambda: _publish(beside, folder, parts, trainer, about) if rank == 0 else None)
    finally:
        if rank == 0:
            shutil.rmtree(beside, ignore_errors=True)


@dataclass(frozen=True)
class _Part:
    """What one rank wrote, for the manifest."""

    files: dict[str, Any]
    tensors: dict[str, Any]


def _write_part(beside: Path, state: TrainState, rank: int, ranks: int) -> _Part:
    part = _Part({}, {})
    for room, named in _rooms(state).items():
        own = {name: named[name].detach().to("cpu").contiguous() for name in _deal(named, ranks)[rank]}
        if not own:
            continue
        file = f"{room}.safetensors" if ranks == 1 else f"{room}-{rank + 1:05d}-of-{ranks:05d}.safetensors"
        save_file(own, beside / file)
        _flush(beside / file)
        part.files[file] = {"bytes": (beside / file).stat().st_size, "header": _header_digest(beside / file)}
        for name, tensor in own.items():
            shape = [*tensor.shape]
            piece = {"file": file, "offset": [0] * tensor.ndim, "shape": shape, "sha256": _tensor_digest(tensor)}
            dtype = str(tensor.dtype).removeprefix("torch.")
            part.tensors[f"{room}/{name}"] = {"dtype": dtype, "shape": shape, "pieces": [piece]}
    return part


def _publish(beside: Path, folder: Path, parts: list[_Part], trainer: dict[str, Any], about: dict[str, Any]) -> None:
    text = json.dumps(trainer, indent=1)
    (beside / TRAINER).write_text(text)
    files: dict[str, Any] = {TRAINER: {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}}
    tensors: dict[str, Any] = {}
    for part in parts:
        files |= part.files
        tensors |= part.tensors
    versions = {"shoal": shoal.__version__, "torch": torch.__version__, "python": platform.python_version()}
    manifest = {
        "format": FORMAT,
        "versions": versions,
        **about,
        "files": files,
        "tensors": dict(sorted(tensors.items())),
    }
    manifest["digest"] = _manifest_digest(manifest)
    (beside / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in (beside / TRAINER, beside / MANIFEST, beside):
        _flush(path)
    _swap_in(beside, folder)


def _rooms(state: TrainState) -> dict[str, dict[str, Tensor]]:
    slots = {f"{slot}/{name}": t for name, slots in state.optimizer.items() for slot, t in slots.items()}
    return {"model": state.model, "optimizer": slots, "strategy": state.strategy}


def _deal(named: dict[str, Tensor], ranks: int) -> list[list[str]]:
    """Which rank writes which tensor: the largest first, each to the rank with the least so far."""
    hands: list[list[str]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for name in sorted(named, key=lambda name: (-named[name].nbytes, name)):
        rank = loads.index(min(loads))
        hands[rank].append(name)
        loads[rank] += named[name].nbytes
    return hands


def _agree(task: Callable[[], T]) -> list[T]:
    """Does `task` on every rank and returns all results, or raises the first rank's OSError on every rank."""
    try:
        outcome: T | OSError = task()
    except OSError as error:
        outcome = error
    outcomes: list[Any] = [outcome]
    if dist.is_initialized():
        outcomes = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, outcome)
    for other in outcomes:
        if isinstance(other, OSError):
            raise other
    return outcomes


def open_checkpoint(folder: Path) -> Checkpoint:
    """Checks the manifest and everything it can without reading tensors; DamagedCheckpoint if anything is off."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if not isinstance(manifest, dict) or "format" not in manifest:
            raise DamagedCheckpoint(f"{folder / MANIFEST} is not a manifest")
        if manifest["format"] != FORMAT:
            raise UserError(
                f"{folder} has checkpoint format {manifest['format']}, but shoal {shoal.__version__} reads {FORMAT}; "
                "use the version of shoal that wrote it"
            )
        if manifest.pop("digest", None) != _manifest_digest(manifest):
            raise DamagedCheckpoint(f"{folder / MANIFEST} does not match its own digest")
        for file, about in manifest["files"].items():
            if Path(file).name != file:
                raise DamagedCheckpoint(f"{folder / MANIFEST} points outside its folder: {file!r}")
            if (folder / file).stat().st_size != about["bytes"]:
                raise DamagedCheckpoint(f"{folder / file} is not {about['bytes']} bytes long")
        trainer_text = (folder / TRAINER).read_bytes()
        if hashlib.sha256(trainer_text).hexdigest() != manifest["files"][TRAINER]["sha256"]:
            raise DamagedCheckpoint(f"{folder / TRAINER} does not match its digest")
        return Checkpoint(folder, manifest, json.loads(trainer_text))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{folder}: {error}") from None


def _swap_in(beside: Path, folder: Path) -> None:
    """Renames; a damaged folder of the same name is moved out of the way first, since rename cannot replace it."""
    if folder.exists():
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        beside.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        beside.rename(folder)
    _flush(folder.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _manifest_digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _header_digest(path: Path) -> str:
    """safetensors: eight bytes of length, then that much JSON."""
    with path.open("rb") as file:
        length = file.read(8)
        header = file.read(min(int.from_bytes(length, "little"), 1 << 30))
    return hashlib.sha256(length + header).hexdigest()


def _tensor_digest(tensor: Tensor) -> str:
    flat = tensor.contiguous().view(-1)
    raw: Callable[[], Any] = flat.view(torch.uint8).numpy if flat.numel() else lambda: b""
    return hashlib.sha256(memoryview(raw())).hexdigest()
