"""One checkpoint on disk: logical tensors in safetensors, the rest in JSON, and nothing that can run.

    step_00000100/
      model.safetensors      every tensor under the name it has in the unwrapped model
      optimizer.safetensors  "<slot>/<parameter name>", such as "exp_avg/encoder"
      strategy.safetensors   what the layout keeps, where it keeps something: the loss scale of fp16
      trainer.json           step, samples seen, counters
      manifest.json          written last: config, layout, versions, and a digest of all the rest

Frozen weights that a run read from files are not in it: the manifest refers to them (base.py).

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import shoal
from shoal.checkpoint.frozen_base import BaseProblem, Referenced, parse_base
from shoal.checkpoint.peers import ALL, Peers
from shoal.checkpoint.regions import Box, Held, WrongLayout, local_box, why_not_whole
from shoal.checkpoint.safetensors_files import write_safetensors
from shoal.checkpoint.stored_tensor import DamagedCheckpoint as DamagedCheckpoint
from shoal.checkpoint.stored_tensor import Pieces, Stored, parse_tensors
from shoal.errors import UserError
from shoal.tensors import local_part
from shoal.types import TrainState

FORMAT = 2
"""Of a checkpoint that refers to a base; a shoal that knows 1 alone would load half of it. Others are of format 1."""
MANIFEST, TRAINER = "manifest.json", "trainer.json"
ROOMS = ("model", "optimizer", "strategy")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest is whole. Tensors are read, and checked, when asked for."""

    folder: Path
    manifest: dict[str, Any]
    trainer: dict[str, Any]
    tensors: dict[str, Stored] = field(repr=False)
    """What is in the folder, by room and name."""
    base: dict[str, Referenced] = field(default_factory=dict, repr=False)
    """Frozen weights that it refers to, by their names in the model."""

    @property
    def step(self) -> int:
        return int(self.trainer["step"])

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The model's tensors, those of the base among them: name → shape."""
        stored = {name: [*tensor.shape] for name, tensor in self.stored().model.items()}
        return stored | {name: [*reference.shape] for name, reference in self.base.items()}

    def stored(self) -> TrainState:
        """All tensors in the folder, none of them read: each value is a `Stored`, which reads itself or a part."""
        return self._by_room(lambda stored: stored)

    def read(self) -> TrainState:
        """All tensors, whole, on the CPU, with those of the base: BaseProblem if that cannot be read."""
        state = self._by_room(lambda stored: stored.read())
        state.model.update({name: reference.read() for name, reference in self.base.items()})
        return state

    def checked_for(self, here: Mapping[str, Held], with_base: bool = False) -> TrainState:
        """As `stored`, and everything that a rank needs which holds `here` of the model is compared with its digest.

        So damage is found before anything is overwritten. An optimizer's tensor is split as its parameter is. The base
        is the caller's to look for, unless it is asked for: BaseProblem if it cannot be read.
        """
        for name, stored in self.tensors.items():
            room, _, rest = name.partition("/")
            held = here.get(rest.partition("/")[2] if room == "optimizer" else rest)
            if room != "strategy" and held is not None and held.box is not None and held.shape == stored.shape:
                stored.check(*held.box)
            else:
                stored.check()
        state = self.stored()
        for name, reference in self.base.items() if with_base else ():
            if name in here:
                self.check_base(reference)
                state.model[name] = reference  # type: ignore[assignment]  # as Stored, which is no Tensor either
        return state

    def check_base(self, reference: Referenced) -> None:
        """Reads a tensor of the base; BaseProblem if it is not what it was."""
        try:
            reference.check()
        except BaseProblem as problem:
            raise type(problem)(f"{self.folder} refers to frozen weights, and {problem}; put the file back") from None

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


def write_checkpoint(
    folder: Path, state: TrainState, trainer: dict[str, Any], about: dict[str, Any], peers: Peers = ALL
) -> None:
    """Publishes `folder` whole, or leaves nothing. Every rank calls it with its state and writes a part of it.

    A plain tensor is the same on every rank that has it; of a DTensor each rank writes what it holds. If it fails
    anywhere, it raises OSError on every rank; WrongLayout if what the ranks hold does not make up the tensors.
    """
    publish(folder, deal_out(state, peers), trainer, about, peers)


class Share(NamedTuple):
    """What one rank holds of a tensor, and may have to write."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the whole."""
    box: Box
    tensor: Tensor
    """Its own part."""


def deal_out(state: TrainState, peers: Peers = ALL) -> dict[str, Share]:
    """What this rank is to write of a state, by room and name. Every rank calls it."""
    held = peers.agree(lambda: shares_of(state))
    told = {name: (share.box, share.box.numel * share.dtype.itemsize) for name, share in held.items()}
    return {name: held[name] for name in peers.scatter(_deal(peers.gather(told)))}


def shares_of(state: TrainState) -> dict[str, Share]:
    """What this rank holds, by room and name; where it holds nothing of a tensor, that is left out."""
    shares: dict[str, Share] = {}
    for room, named in _rooms(state).items():
        for name, tensor in named.items():
            share = Share(tensor.dtype, tuple(tensor.shape), local_box(tensor), local_part(tensor))
            if share.box.numel or 0 in share.shape:
                shares[f"{room}/{name}"] = share
    return shares


def publish(
    folder: Path, shares: dict[str, Share], trainer: dict[str, Any], about: dict[str, Any], peers: Peers = ALL
) -> None:
    """Writes what `deal_out` gave each rank, and makes it appear as `folder`. Every rank calls it."""
    beside = folder.with_name(f".{folder.name}.part")
    try:
        peers.agree(lambda: _make_anew(beside) if peers.rank == 0 else None)
        part = peers.agree(lambda: _write_part(beside, shares, peers))
        parts = peers.gather(part)
        peers.agree(lambda: _finish(beside, folder, parts, trainer, about) if peers.rank == 0 else None)
    finally:
        if peers.rank == 0:
            shutil.rmtree(beside, ignore_errors=True)


@dataclass(frozen=True)
class _Part:
    """What one rank wrote, for the manifest."""

    files: dict[str, Any]
    tensors: dict[str, Any]


def _make_anew(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _deal(everyone: list[dict[str, tuple[Box, int]]]) -> list[set[str]]:
    """Which rank writes its part of which tensors, given the box and bytes that each has of each.

    A part that several ranks hold is written by one of them. In each room the parts with one holder first, then the
    largest, each to its holder with the least so far.
    """
    holders: dict[tuple[str, Box], list[int]] = {}
    nbytes: dict[tuple[str, Box], int] = {}
    for rank, held in enumerate(everyone):
        for name, (box, size) in held.items():
            holders.setdefault((name, box), []).append(rank)
            nbytes[name, box] = size
    hands: list[set[str]] = [set() for _ in everyone]
    loads = {room: [0] * len(everyone) for room in ROOMS}
    for name, box in sorted(holders, key=lambda key: (len(holders[key]) > 1, -nbytes[key], key)):
        load = loads[name.partition("/")[0]]
        rank = min(holders[name, box], key=load.__getitem__)
        hands[rank].add(name)
        load[rank] += nbytes[name, box]
    return hands


def _write_part(beside: Path, shares: dict[str, Share], peers: Peers) -> _Part:
    part = _Part({}, {})
    for room in ROOMS:
        own = {name: share for name, share in shares.items() if name.startswith(f"{room}/")}
        if not own:
            continue
        number = f"-{peers.rank + 1:05d}-of-{peers.size:05d}" if peers.size > 1 else ""
        file = f"{room}{number}.safetensors"
        written = write_safetensors(
            beside / file, {name.removeprefix(f"{room}/"): share.tensor for name, share in own.items()}
        )
        part.files[file] = {"bytes": written.nbytes, "header": written.header}
        for name, (dtype, shape, box, _) in own.items():
            digest = written.tensors[name.removeprefix(f"{room}/")]
            piece = {"file": file, "offset": [*box.offset], "shape": [*box.shape], "sha256": digest}
            about = {"dtype": str(dtype).removeprefix("torch."), "shape": [*shape], "pieces": [piece]}
            part.tensors[name] = about
    return part


def _finish(beside: Path, folder: Path, parts: list[_Part], trainer: dict[str, Any], about: dict[str, Any]) -> None:
    text = json.dumps(trainer, indent=1)
    (beside / TRAINER).write_text(text)
    files: dict[str, Any] = {TRAINER: {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}}
    for part in parts:
        files |= part.files
    versions = {"shoal": shoal.__version__, "torch": torch.__version__, "python": platform.python_version()}
    manifest = {
        "format": FORMAT if "base" in about else 1,
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


def open_checkpoint(folder: Path) -> Checkpoint:
    """Checks the manifest and everything it can without reading tensors; DamagedCheckpoint if anything is off."""
    try:
        text = (folder / MANIFEST).read_text()
        manifest = json.loads(text)
        if not isinstance(manifest, dict) or "format" not in manifest:
            raise DamagedCheckpoint(f"{folder / MANIFEST} is not a manifest")
        # First, and in every format: a flipped bit in its number is damage too. One that means the same is in the text.
        unaltered = text == json.dumps(manifest, indent=1)
        if manifest.pop("digest", None) != _manifest_digest(manifest) or not unaltered:
            raise DamagedCheckpoint(f"{folder / MANIFEST} does not match its own digest")
        if manifest["format"] not in (1, FORMAT):
            raise UserError(
                f"{folder} has checkpoint format {manifest['format']}, but shoal {shoal.__version__} reads 1 and "
                f"{FORMAT}; use the version of shoal that wrote it"
            )
        for file, about in manifest["files"].items():
            if Path(file).name != file:
                raise DamagedCheckpoint(f"{folder / MANIFEST} points outside its folder: {file!r}")
            if (folder / file).stat().st_size != about["bytes"]:
                raise DamagedCheckpoint(f"{folder / file} is not {about['bytes']} bytes long")
        sizes = {file: about["bytes"] for file, about in manifest["files"].items()}
        tensors = parse_tensors(manifest["tensors"], Pieces(folder, manifest["files"]), sizes)
        if strangers := [name for name in tensors if name.partition("/")[0] not in ROOMS]:
            raise DamagedCheckpoint(f"{folder / MANIFEST} has a tensor that belongs to nothing: {strangers[0]!r}")
        base = parse_base(manifest["base"]) if "base" in manifest else {}
        if twice := [name for name in base if f"model/{name}" in tensors]:
            raise DamagedCheckpoint(f"{folder / MANIFEST} both has {twice[0]!r} and refers to it")
        trainer_text = (folder / TRAINER).read_bytes()
        if hashlib.sha256(trainer_text).hexdigest() != manifest["files"][TRAINER]["sha256"]:
            raise DamagedCheckpoint(f"{folder / TRAINER} does not match its digest")
        return Checkpoint(folder, manifest, json.loads(trainer_text), tensors, base)
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
