"""One checkpoint on disk: logical tensors in safetensors, the rest in JSON, and nothing that can run.

    step_00000100/
      model.safetensors      every tensor under the name it has in the unwrapped model
      optimizer.safetensors  "<slot>/<parameter name>", such as "exp_avg/encoder"
      strategy.safetensors   what the layout keeps, where it keeps something: the loss scale of fp16
      trainer.json           step, samples seen, counters
      manifest.json          written last: config, layout, versions, and a digest of all the rest

Frozen weights that a run read from files are not in it: the manifest refers to them (frozen_base.py).

Several ranks write as many files, `model-00001-of-00002.safetensors` and so on: a tensor that all of them have is in
one of them, a sharded one in pieces, each in the file of a rank that holds it. The manifest says which piece is where.

A folder is written beside its final name, flushed, and renamed: it is there whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import shoal
from shoal.checkpoint.folders import discard, flush, make_empty_folder, swap_in
from shoal.checkpoint.frozen_base import BaseProblem, Referenced, parse_base
from shoal.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    SECTIONS,
    dtype_name,
    parse_tensors,
    read_manifest,
    write_manifest,
)
from shoal.checkpoint.peers import ALL, Peers
from shoal.checkpoint.pieces import DamagedCheckpoint as DamagedCheckpoint
from shoal.checkpoint.pieces import StoredTensor, write_safetensors
from shoal.checkpoint.regions import Held, Region, WrongLayout, local_region, why_not_whole
from shoal.tensors import local_part
from shoal.types import TrainState

TRAINER = "trainer.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest is whole. Tensors are read, and checked, when asked for."""

    folder: Path
    manifest: dict[str, Any]
    trainer: dict[str, Any]
    tensors: dict[str, StoredTensor] = field(repr=False)
    """What is in the folder, by section and name."""
    base: dict[str, Referenced] = field(default_factory=dict, repr=False)
    """Frozen weights that it refers to, by their names in the model."""

    @property
    def everything(self) -> dict[str, StoredTensor]:
        """All tensors by section and name, those of the base among them."""
        return {**self.tensors, **{f"model/{name}": reference for name, reference in self.base.items()}}

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The model's tensors, those of the base among them: name → shape."""
        return {name: [*tensor.shape] for name, tensor in unflatten(self.everything).model.items()}

    def stored(self) -> TrainState:
        """All tensors in the folder, none of them read: each value is a `StoredTensor`."""
        return unflatten(self.tensors)

    def read(self) -> TrainState:
        """All tensors, whole, on the CPU, with those of the base: BaseProblem if that cannot be read."""
        return unflatten({name: tensor.read() for name, tensor in self.everything.items()})

    def checked_for(self, here: Mapping[str, Held], with_base: bool = False) -> TrainState:
        """As `stored`, and everything that a rank needs which holds `here` of the model is compared with its digest.

        So damage is found before anything is overwritten. An optimizer's tensor is split as its parameter is. The base
        is the caller's to look for, unless it is asked for: BaseProblem if it cannot be read.
        """
        for name, stored in self.tensors.items():
            section, _, rest = name.partition("/")
            parameter = rest.partition("/")[2] if section == "optimizer" else rest
            held = here.get(parameter) if section != "strategy" else None
            if held is not None and held.region is not None and held.shape == stored.shape:
                stored.check(held.region)
            else:
                stored.check()
        state = self.stored()
        for name, reference in self.base.items() if with_base else ():
            if name in here:
                self.check_base(reference)
                state.model[name] = reference  # type: ignore[assignment]  # a StoredTensor, as all others are
        return state

    def check_base(self, reference: Referenced) -> None:
        """Reads a tensor of the base; BaseProblem if it is not what it was."""
        try:
            reference.check()
        except BaseProblem as problem:
            raise type(problem)(f"{self.folder} refers to frozen weights, and {problem}; put the file back") from None


def flatten(state: TrainState) -> dict[str, Tensor]:
    """Returns the tensors of a state by section and name: model/…, optimizer/<slot>/<parameter>, strategy/…"""
    flat = {f"model/{name}": tensor for name, tensor in state.model.items()}
    flat |= {f"optimizer/{slot}/{name}": t for name, slots in state.optimizer.items() for slot, t in slots.items()}
    return flat | {f"strategy/{name}": tensor for name, tensor in state.strategy.items()}


def unflatten(tensors: Mapping[str, Any]) -> TrainState:
    """The inverse of `flatten`; values may also stand for tensors that are not read yet."""
    state = TrainState({}, {}, {})
    for name, tensor in tensors.items():
        section, _, rest = name.partition("/")
        if section == "optimizer":
            slot, _, parameter = rest.partition("/")
            state.optimizer.setdefault(parameter, {})[slot] = tensor
        else:
            (state.model if section == "model" else state.strategy)[rest] = tensor
    return state


def write_checkpoint(
    folder: Path, state: TrainState, trainer: dict[str, Any], about: dict[str, Any], peers: Peers = ALL
) -> None:
    """Publishes `folder` whole, or leaves nothing. Every rank calls it with its state and writes a part of it.

    A plain tensor is the same on every rank that has it; of a DTensor each rank writes what it holds. If it fails
    anywhere, it raises OSError on every rank; WrongLayout if what the ranks hold does not make up the tensors.
    """
    publish(folder, deal_out(state, peers), trainer, about, peers)


class LocalShard(NamedTuple):
    """What one rank holds of a tensor, and may have to write."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the whole."""
    region: Region
    tensor: Tensor
    """Its own part."""


def deal_out(state: TrainState, peers: Peers = ALL) -> dict[str, LocalShard]:
    """What this rank is to write of a state, by section and name. Every rank calls it."""
    held = peers.run_together(lambda: local_shards(state))
    told = {name: (shard.region, shard.region.numel * shard.dtype.itemsize) for name, shard in held.items()}
    return {name: held[name] for name in peers.scatter(_deal(peers.gather(told)))}


def local_shards(state: TrainState) -> dict[str, LocalShard]:
    """What this rank holds, by section and name; where it holds nothing of a tensor, that is left out."""
    shards = {
        name: LocalShard(tensor.dtype, tuple(tensor.shape), local_region(tensor), local_part(tensor))
        for name, tensor in flatten(state).items()
    }
    return {name: shard for name, shard in shards.items() if shard.region.numel or 0 in shard.shape}


def _deal(everyone: list[dict[str, tuple[Region, int]]]) -> list[set[str]]:
    """Which rank writes its part of which tensors, given the region and bytes that each has of each.

    A region that several ranks hold is written by one of them. In each section the regions with one holder first, then
    the largest, each to its holder with the least so far.
    """
    holders: dict[tuple[str, Region, int], list[int]] = {}
    for rank, held in enumerate(everyone):
        for name, (region, nbytes) in held.items():
            holders.setdefault((name, region, nbytes), []).append(rank)
    hands: list[set[str]] = [set() for _ in everyone]
    loads = {section: [0] * len(everyone) for section in SECTIONS}
    for key in sorted(holders, key=lambda key: (len(holders[key]) > 1, -key[2], key)):
        name, _, nbytes = key
        load = loads[name.partition("/")[0]]
        rank = min(holders[key], key=load.__getitem__)
        hands[rank].add(name)
        load[rank] += nbytes
    return hands


def publish(
    folder: Path, shards: dict[str, LocalShard], trainer: dict[str, Any], about: dict[str, Any], peers: Peers = ALL
) -> None:
    """Writes what `deal_out` gave each rank, and makes it appear as `folder`. Every rank calls it."""
    beside = folder.with_name(f".{folder.name}.part")
    try:
        peers.run_on_first(lambda: make_empty_folder(beside))
        written = peers.gather(peers.run_together(lambda: _write_shards(beside, shards, peers)))
        peers.run_on_first(lambda: _finish(beside, folder, written, trainer, about))
    finally:
        if peers.rank == 0:
            discard(beside)


Written = tuple[dict[str, Any], list[dict[str, Any]]]
"""What one rank wrote: what the manifest says of its files, and its pieces, each with the tensor it is of."""


def _write_shards(beside: Path, shards: dict[str, LocalShard], peers: Peers) -> Written:
    files: dict[str, Any] = {}
    pieces: list[dict[str, Any]] = []
    number = f"-{peers.rank + 1:05d}-of-{peers.size:05d}" if peers.size > 1 else ""
    for section in SECTIONS:
        file = f"{section}{number}.safetensors"
        names = {name.partition("/")[2]: name for name in shards if name.startswith(f"{section}/")}
        if not names:
            continue
        tensors = {key: shards[name].tensor for key, name in names.items()}
        files[file], digests = write_safetensors(beside / file, tensors)
        for key, name in names.items():
            dtype, shape, region, _ = shards[name]
            piece = {"file": file, "offset": [*region.offset], "shape": [*region.shape], "sha256": digests[key]}
            pieces.append({"name": name, "dtype": dtype_name(dtype), "shape": [*shape], "piece": piece})
    return files, pieces


def _finish(beside: Path, folder: Path, written: list[Written], trainer: dict[str, Any], about: dict[str, Any]) -> None:
    text = json.dumps(trainer, indent=1)
    (beside / TRAINER).write_text(text)
    files = {TRAINER: {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}}
    files |= {file: facts for rank_files, _ in written for file, facts in rank_files.items()}
    versions = {"shoal": shoal.__version__, "torch": torch.__version__, "python": platform.python_version()}
    head = {"format": FORMAT if "base" in about else 1, "versions": versions, **about}
    tensors = _join([piece for _, pieces in written for piece in pieces])
    write_manifest(beside, {**head, "files": files, "tensors": tensors})
    for path in (beside / TRAINER, beside / MANIFEST, beside):
        flush(path)
    swap_in(beside, folder)


def _join(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """The logical tensors from the pieces that the ranks wrote."""
    tensors: dict[str, Any] = {}
    for entry in sorted(pieces, key=lambda entry: (entry["name"], entry["piece"]["offset"])):
        name, dtype, shape = entry["name"], entry["dtype"], entry["shape"]
        tensor = tensors.setdefault(name, {"dtype": dtype, "shape": shape, "pieces": []})
        if (dtype, shape) != (tensor["dtype"], tensor["shape"]):
            other = f"{tensor['dtype']} {tensor['shape']}"
            raise WrongLayout(f"{name} is {other} on one rank and {dtype} {shape} on another")
        tensor["pieces"].append(entry["piece"])
    for name, tensor in tensors.items():
        regions = [Region(tuple(piece["offset"]), tuple(piece["shape"])) for piece in tensor["pieces"]]
        if problem := why_not_whole(tensor["shape"], regions):
            raise WrongLayout(f"{name}: {problem}")
    return tensors


def open_checkpoint(folder: Path) -> Checkpoint:
    """Checks the manifest and everything it can without reading tensors; DamagedCheckpoint if anything is off."""
    try:
        manifest = read_manifest(folder)
        tensors = parse_tensors(folder, manifest)
        base = parse_base(manifest["base"]) if "base" in manifest else {}
        if twice := [name for name in base if f"model/{name}" in tensors]:
            raise ValueError(f"{MANIFEST} both has {twice[0]!r} and refers to it")
        text = (folder / TRAINER).read_bytes()
        if hashlib.sha256(text).hexdigest() != manifest["files"][TRAINER]["sha256"]:
            raise ValueError(f"{TRAINER} does not match its digest")
        return Checkpoint(folder, manifest, json.loads(text), tensors, base)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{folder}: {error}") from None
