"""One checkpoint on disk: logical tensors in safetensors, the rest in JSON, and nothing that can run.

    step_00000100/
      model.safetensors      every tensor under the name it has in the unwrapped model
      optimizer.safetensors  "<slot>/<parameter name>", such as "exp_avg/encoder"
      trainer.json           step, samples seen, counters
      manifest.json          written last: config, layout, versions, and a digest of all the rest

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
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import shoal
from shoal.errors import UserError
from shoal.types import TrainState

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
        optimizer: dict[str, dict[str, Tensor]] = {}
        by_file: dict[str, list[str]] = {}
        for name, about in self.manifest["tensors"].items():
            for piece in about["pieces"]:
                by_file.setdefault(piece["file"], []).append(name)
        for file, names in by_file.items():
            for name, tensor in self._read_file(file, names).items():
                room, _, rest = name.partition("/")
                if room == "model":
                    model[rest] = tensor
                else:
                    slot, _, parameter = rest.partition("/")
                    optimizer.setdefault(parameter, {})[slot] = tensor
        return TrainState(model, optimizer)

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
    """Publishes `folder` whole, or leaves nothing."""
    rooms = {
        "model": state.model,
        "optimizer": {f"{slot}/{name}": t for name, slots in state.optimizer.items() for slot, t in slots.items()},
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir()
        files: dict[str, Any] = {}
        tensors: dict[str, Any] = {}
        for room, named in rooms.items():
            if not named:
                continue
            file = f"{room}.safetensors"
            on_cpu = {name: tensor.detach().to("cpu").contiguous() for name, tensor in named.items()}
            save_file(on_cpu, beside / file)
            files[file] = {"bytes": (beside / file).stat().st_size, "header": _header_digest(beside / file)}
            for name, tensor in on_cpu.items():
                piece = {
                    "file": file,
                    "offset": [0] * tensor.ndim,
                    "shape": [*tensor.shape],
                    "sha256": _tensor_digest(tensor),
                }
                dtype = str(tensor.dtype).removeprefix("torch.")
                tensors[f"{room}/{name}"] = {"dtype": dtype, "shape": [*tensor.shape], "pieces": [piece]}
        text = json.dumps(trainer, indent=1)
        (beside / TRAINER).write_text(text)
        files[TRAINER] = {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
        versions = {"shoal": shoal.__version__, "torch": torch.__version__, "python": platform.python_version()}
        manifest = {"format": FORMAT, "versions": versions, **about, "files": files, "tensors": tensors}
        manifest["digest"] = _manifest_digest(manifest)
        (beside / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for path in (*beside.iterdir(), beside):
            _flush(path)
        _swap_in(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


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
