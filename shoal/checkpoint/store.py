"""One checkpoint on disk: logical tensors in safetensors, the rest in JSON, and nothing that can run.

    step_00000100/
      model.safetensors      every tensor under the name it has in the unwrapped model
      optimizer.safetensors  "<slot>/<parameter name>", such as "exp_avg/encoder"
      strategy.safetensors   what the layout keeps, where it keeps something: the loss scale of fp16
      trainer.json           step, samples seen, counters
      manifest.json          written last: config, layout, versions, and a digest of all the rest

Several ranks write as many files, `model-00001-of-00002.safetensors` and so on: a tensor that all of them have is in
one of them, a sharded one in pieces, each in the file of a rank that holds it. The manifest says which piece is where.

A folder is written beside its final name, flushed, and renamed: it is there whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

import shoal
from shoal.checkpoint.boxes import Box, WrongLayout, local_box, why_not_whole
from shoal.checkpoint.stored import DamagedCheckpoint as DamagedCheckpoint
from shoal.checkpoint.stored import Pieces, Stored, header_digest, parse_tensors, tensor_digest
from shoal.errors import UserError
from shoal.types import TrainState

T = TypeVar("T")

FORMAT = 1
MANIFEST, TRAINER = "manifest.json", "trainer.json"
ROOMS = ("model", "optimizer", "strategy")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest is whole. Tensors are read, and checked, when asked for."""

    folder: Path
    manifest: dict[str, Any]
    trainer: dict[str, Any]
    tensors: dict[str, Stored] = field(repr=False)

    @property
    def step(self) -> int:
        return int(self.trainer["step"])

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The model's tensors: name → shape."""
        return {name: [*tensor.shape] for name, tensor in self.stored().model.items()}

    def stored(self) -> TrainState:
        """All tensors, none of them read: each value is a `Stored`, which reads itself, whole or in part."""
        return self._by_room(lambda stored: stored)

    def read(self) -> TrainState:
        """All tensors, whole, on the CPU."""
        return self._by_room(lambda stored: stored.read())

    def checked_for(self, here: dict[str, Tensor]) -> TrainState:
        """As `stored`, and everything that a rank needs which holds `here` of the model is compared with its digest.

        So damage is found before anything is overwritten. An optimizer's tensor is split as its parameter is.
        """
        for name, stored in self.tensors.items():
            room, _, rest = name.partition("/")
            tensor = here.get(rest.partition("/")[2] if room == "optimizer" else rest)
            if room != "strategy" and tensor is not None and tensor.shape == stored.shape:
                stored.check(*local_box(tensor))
            else:
                stored.check()
        return self.stored()

    def _by_room(self, value: Callable[[Stored], Any]) -> TrainState:
        state = TrainState({}, {}, {})
        for name, stored in self.tensors.items():
            room, _, rest = name.partition("/")
            if room == "optimizer":
                slot, _, parameter = rest.partition("/")
                state.optimizer.setdefault(parameter, {})[slot] = value(stored)
            else:
                (state.model if room == "model" else state.strategy)[rest] = value(stored)
        return state


def write_checkpoint(folder: Path, state: TrainState, trainer: dict[str, Any], about: dict[str, Any]) -> None:
    """Publishes `folder` whole, or leaves nothing. Every rank calls it with its state and writes a part of it.

    A plain tensor is the same on every rank that has it; of a DTensor each rank writes what it holds. If it fails
    anywhere, it raises OSError on every rank; WrongLayout if what the ranks hold does not make up the tensors.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    beside = folder.with_name(f".{folder.name}.part")
    if rank == 0:
        shutil.rmtree(beside, ignore_errors=True)
    try:
        held = _agree(lambda: _start(beside, state, rank))
        hand = _scatter(_deal(_gather(held)))
        part = _agree(lambda: _write_part(beside, state, held, hand, rank, ranks))
        parts = _gather(part)
        _agree(lambda: _publish(beside, folder, parts, trainer, about) if rank == 0 else None)
    finally:
        if rank == 0:
            shutil.rmtree(beside, ignore_errors=True)


class _Held(NamedTuple):
    """What one rank holds of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize


@dataclass(frozen=True)
class _Part:
    """What one rank wrote, for the manifest."""

    files: dict[str, Any]
    tensors: dict[str, Any]


def _start(beside: Path, state: TrainState, rank: int) -> dict[str, _Held]:
    if rank == 0:
        beside.mkdir(parents=True)
    named = {f"{room}/{name}": tensor for room, tensors in _rooms(state).items() for name, tensor in tensors.items()}
    held = {name: _Held(tensor.dtype, tuple(tensor.shape), local_box(tensor)) for name, tensor in named.items()}
    return {name: part for name, part in held.items() if part.box.numel or 0 in part.shape}


def _deal(everyone: list[dict[str, _Held]]) -> list[set[str]]:
    """Which rank writes its part of which tensors. A part that several ranks hold is written by one of them.

    In each room the parts with one holder first, then the largest, each to its holder with the least so far.
    """
    holders: dict[tuple[str, Box], list[int]] = {}
    nbytes: dict[tuple[str, Box], int] = {}
    for rank, held in enumerate(everyone):
        for name, part in held.items():
            holders.setdefault((name, part.box), []).append(rank)
            nbytes[name, part.box] = part.nbytes
    hands: list[set[str]] = [set() for _ in everyone]
    loads = {room: [0] * len(everyone) for room in ROOMS}
    for name, box in sorted(holders, key=lambda key: (len(holders[key]) > 1, -nbytes[key], key)):
        load = loads[name.partition("/")[0]]
        rank = min(holders[name, box], key=load.__getitem__)
        hands[rank].add(name)
        load[rank] += nbytes[name, box]
    return hands


def _write_part(
    beside: Path, state: TrainState, held: dict[str, _Held], hand: set[str], rank: int, ranks: int
) -> _Part:
    part = _Part({}, {})
    for room, named in _rooms(state).items():
        own = {name: _local(tensor) for name, tensor in named.items() if f"{room}/{name}" in hand}
        if not own:
            continue
        file = f"{room}.safetensors" if ranks == 1 else f"{room}-{rank + 1:05d}-of-{ranks:05d}.safetensors"
        try:
            save_file(own, beside / file)
        except SafetensorError as error:  # a full disk, for one
            raise OSError(f"{file}: {error}") from None
        _flush(beside / file)
        part.files[file] = {"bytes": (beside / file).stat().st_size, "header": header_digest(beside / file)}
        for name, tensor in own.items():
            dtype, shape, box = held[f"{room}/{name}"]
            piece = {"file": file, "offset": [*box.offset], "shape": [*box.shape], "sha256": tensor_digest(tensor)}
            about = {"dtype": str(dtype).removeprefix("torch."), "shape": [*shape], "pieces": [piece]}
            part.tensors[f"{room}/{name}"] = about
    return part


def _publish(beside: Path, folder: Path, parts: list[_Part], trainer: dict[str, Any], about: dict[str, Any]) -> None:
    text = json.dumps(trainer, indent=1)
    (beside / TRAINER).write_text(text)
    files: dict[str, Any] = {TRAINER: {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}}
    for part in parts:
        files |= part.files
    for file in files:  # safetensors are written for their owner's eyes alone; a checkpoint is as open as other files
        (beside / file).chmod((beside / TRAINER).stat().st_mode)
    versions = {"shoal": shoal.__version__, "torch": torch.__version__, "python": platform.python_version()}
    manifest = {
        "format": FORMAT,
        "versions": versions,
        **about,
        "files": files,
        "tensors": _join(parts),
    }
    manifest["digest"] = _manifest_digest(manifest)
    (beside / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in (beside / TRAINER, beside / MANIFEST, beside):
        _flush(path)
    _swap_in(beside, folder)


def _join(parts: list[_Part]) -> dict[str, Any]:
    """The logical tensors from the pieces that the ranks wrote."""
    tensors: dict[str, Any] = {}
    for name, about in ((name, about) for part in parts for name, about in part.tensors.items()):
        joined = tensors.setdefault(name, about | {"pieces": []})
        if (joined["dtype"], joined["shape"]) != (about["dtype"], about["shape"]):
            theirs, ours = (f"{one['dtype']} {one['shape']}" for one in (joined, about))
            raise WrongLayout(f"{name} is {theirs} on one rank and {ours} on another")
        joined["pieces"] += about["pieces"]
    for name, about in tensors.items():
        about["pieces"].sort(key=lambda piece: piece["offset"])
        boxes = [Box(tuple(piece["offset"]), tuple(piece["shape"])) for piece in about["pieces"]]
        if problem := why_not_whole(about["shape"], boxes):
            raise WrongLayout(f"{name}: {problem}")
    return dict(sorted(tensors.items()))


def _rooms(state: TrainState) -> dict[str, dict[str, Tensor]]:
    slots = {f"{slot}/{name}": t for name, slots in state.optimizer.items() for slot, t in slots.items()}
    return {"model": state.model, "optimizer": slots, "strategy": state.strategy}


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).to("cpu").contiguous()


def _agree(task: Callable[[], T]) -> T:
    """Does `task` on every rank, or raises the first rank's error on every rank."""
    error: Exception | None = None
    try:
        result = task()
    except (OSError, WrongLayout) as caught:
        error = caught
    errors: list[Exception | None] = [error]
    if dist.is_initialized():
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
    for error in errors:
        if error:
            raise error
    return result


def _gather(value: T) -> list[T]:
    """All ranks' values on rank 0, which alone has to hold them; nothing on the others."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values)
    return values or []


def _scatter(values: list[T]) -> T:
    """To every rank its own of rank 0's."""
    if not dist.is_initialized():
        return values[0]
    received: list[Any] = [None]
    dist.scatter_object_list(received, values if dist.get_rank() == 0 else None)
    return received[0]


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
        sizes = {file: about["bytes"] for file, about in manifest["files"].items()}
        tensors = parse_tensors(manifest["tensors"], Pieces(folder, manifest["files"]), sizes)
        if strangers := [name for name in tensors if name.partition("/")[0] not in ROOMS]:
            raise DamagedCheckpoint(f"{folder / MANIFEST} has a tensor that belongs to nothing: {strangers[0]!r}")
        trainer_text = (folder / TRAINER).read_bytes()
        if hashlib.sha256(trainer_text).hexdigest() != manifest["files"][TRAINER]["sha256"]:
            raise DamagedCheckpoint(f"{folder / TRAINER} does not match its digest")
        return Checkpoint(folder, manifest, json.loads(trainer_text), tensors)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
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
