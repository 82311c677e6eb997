"""One checkpoint on disk: logical tensors in safetensors files, everything else in JSON, and no code.

    step_00000100/
      model.safetensors      every tensor under its name in the unwrapped model
      optimizer.safetensors  "<slot>/<parameter name>", such as "exp_avg/encoder"
      strategy.safetensors   tensors of the strategy itself, if it has any: the loss scale of fp16
      callbacks.safetensors  "<callback>/<name>", such as "ema/average/encoder", if callbacks keep tensors
      trainer.json           step, consumed samples, counters, and what else callbacks keep
      manifest.json          written last: config, layout, versions, and a digest of everything else

Frozen weights that a run read from files are not stored: the manifest refers to them (frozen_base.py).

Each of several ranks writes files of its own, `model-00001-of-00002.safetensors` and so on. A tensor that all ranks
have is in one of them; a sharded tensor is stored in pieces, each in the file of a rank that holds it. The manifest
says which piece is in which file.

A folder is written beside its final name, flushed, and renamed: readers see all of it or nothing.
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
from shoal.checkpoint.folders import discard, flush, is_step_folder, make_empty_folder, step_of, swap_in
from shoal.checkpoint.frozen_base import BaseTensor, FrozenBaseError, parse_base
from shoal.checkpoint.manifest import (
    DERIVED_FORMAT,
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
from shoal.checkpoint.pieces import StoredTensor, why_not_storable, write_safetensors
from shoal.checkpoint.regions import Held, Region, WrongLayout, coverage_problem, local_region
from shoal.errors import UserError, one_line
from shoal.parallel.compression.rank_state import rank_of
from shoal.tensors import local_part
from shoal.types import TrainState
from shoal.weights.regular_files import read_json_text

TRAINER = "trainer.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest was verified. Tensors are read, and compared with their digests, on demand."""

    folder: Path
    manifest: dict[str, Any]
    trainer: dict[str, Any]
    tensors: dict[str, StoredTensor] = field(repr=False)
    """The tensors in the folder, by section and name."""
    base: dict[str, BaseTensor] = field(default_factory=dict, repr=False)
    """The tensors of the frozen base that it refers to, by their names in the model."""

    @property
    def all_tensors(self) -> dict[str, StoredTensor]:
        """Returns the tensors in the folder and those of the frozen base, by section and name."""
        return {**self.tensors, **{f"model/{name}": tensor for name, tensor in self.base.items()}}

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Returns the shapes of the model's tensors by name, those of the frozen base among them."""
        return {name: [*tensor.shape] for name, tensor in unflatten(self.all_tensors).model.items()}

    def stored_state(self) -> TrainState:
        """Returns the state with a `StoredTensor` in the place of each tensor; nothing is read."""
        return unflatten(self.tensors)

    def read(self) -> TrainState:
        """Reads all tensors to the CPU, those of the frozen base among them. Raises FrozenBaseError if that fails."""
        return unflatten({name: tensor.read() for name, tensor in self.all_tensors.items()})

    def checked_state(self, held: Mapping[str, Held], with_base: bool = False, rank: int | None = None) -> TrainState:
        """Returns `stored_state()` after comparing with their digests all pieces that a rank with `held` will read.

        Damage is so found before any weight is overwritten. An optimizer's tensor is sharded as its parameter is. The
        frozen base is left to the caller unless `with_base` is set; FrozenBaseError if it cannot be read then. What
        belongs to one rank alone is left to the rank `rank`, if that is given.
        """
        for name, stored in self.tensors.items():
            section, _, rest = name.partition("/")
            if section == "strategy" and rank is not None and rank_of(rest) not in (None, rank):
                continue
            tensor = held.get(_tensor_in_model(section, rest))
            stored.check(tensor.region if tensor is not None and tensor.shape == stored.shape else None)
        state = self.stored_state()
        for name, base_tensor in self.base.items() if with_base else ():
            if name in held:
                self.check_base(base_tensor)
                state.model[name] = base_tensor  # type: ignore[assignment]  # a StoredTensor, as all others are
        return state

    def check_base(self, tensor: BaseTensor) -> None:
        """Compares a tensor of the frozen base with its digest. Raises FrozenBaseError."""
        try:
            tensor.check()
        except FrozenBaseError as error:
            raise type(error)(f"{self.folder} refers to frozen weights, but {error}; put the file back") from None


def _tensor_in_model(section: str, name: str) -> str:
    """Returns the tensor of the model as which a stored tensor is sharded; an empty name if it is stored whole."""
    if section == "model":
        return name
    if section == "optimizer":  # <slot>/<parameter>
        return name.partition("/")[2]
    return name.split("/", 2)[2] if section == "callbacks" and name.count("/") > 1 else ""


def flatten(state: TrainState) -> dict[str, Tensor]:
    """Returns the tensors of a state by section and name: model/…, optimizer/<slot>/<parameter>, strategy/…,
    callbacks/<callback>/…"""
    flat = {f"model/{name}": tensor for name, tensor in state.model.items()}
    flat |= {f"optimizer/{slot}/{name}": t for name, slots in state.optimizer.items() for slot, t in slots.items()}
    flat |= {f"strategy/{name}": tensor for name, tensor in state.strategy.items()}
    return flat | {f"callbacks/{name}": tensor for name, tensor in state.callbacks.items()}


def unflatten(tensors: Mapping[str, Any]) -> TrainState:
    """Returns the state with these tensors; the inverse of `flatten`. Values may be `StoredTensor`s as well."""
    state = TrainState({}, {}, {}, {})
    others = {"model": state.model, "strategy": state.strategy, "callbacks": state.callbacks}
    for name, tensor in tensors.items():
        section, _, rest = name.partition("/")
        if section == "optimizer":
            slot, _, parameter = rest.partition("/")
            state.optimizer.setdefault(parameter, {})[slot] = tensor
        else:
            others[section][rest] = tensor
    return state


def write_checkpoint(
    folder: Path, state: TrainState, trainer: dict[str, Any], about: dict[str, Any], peers: Peers = ALL
) -> None:
    """Publishes a complete checkpoint as `folder`, or leaves nothing. Every rank calls it and writes some of the state.

    A plain tensor is the same on every rank that has it; of a DTensor each rank writes its shard. `trainer` becomes
    trainer.json and `about` part of the manifest. Raises the same error on every rank: OSError if any rank cannot
    write, WrongLayout if the shards of all ranks do not cover a tensor.
    """
    publish(folder, assign_shards(state, peers), trainer, about, peers)


class LocalShard(NamedTuple):
    """What one rank holds of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    region: Region
    tensor: Tensor
    """The local shard."""


def assign_shards(state: TrainState, peers: Peers = ALL) -> dict[str, LocalShard]:
    """Returns the shards that this rank has to write, by section and name. Every rank calls it."""
    held = peers.run_together(lambda: local_shards(state))
    sizes = {name: (shard.region, shard.region.numel * shard.dtype.itemsize) for name, shard in held.items()}
    return {name: held[name] for name in peers.scatter(_assign_writers(peers.gather(sizes)))}


def local_shards(state: TrainState) -> dict[str, LocalShard]:
    """Returns the shards that this rank holds, by section and name, without those that have no elements.

    Raises UserError if a checkpoint cannot hold a tensor.
    """
    shards: dict[str, LocalShard] = {}
    for name, tensor in flatten(state).items():
        if problem := why_not_storable(part := local_part(tensor)):
            raise UserError(f"{name} {problem}")
        shards[name] = LocalShard(tensor.dtype, tuple(tensor.shape), local_region(tensor), part)
    return {name: shard for name, shard in shards.items() if shard.region.numel or 0 in shard.shape}


def _assign_writers(sizes_by_rank: list[dict[str, tuple[Region, int]]]) -> list[set[str]]:
    """Returns the names of the tensors of which each rank writes its shard, from the region and bytes of every shard.

    A region that several ranks hold is written by one of them. In each section the regions with a single holder come
    first, then the largest, and each goes to the holder that has the fewest bytes to write so far.
    """
    holders: dict[tuple[str, Region, int], list[int]] = {}
    for rank, sizes in enumerate(sizes_by_rank):
        for name, (region, nbytes) in sizes.items():
            holders.setdefault((name, region, nbytes), []).append(rank)
    names_by_rank: list[set[str]] = [set() for _ in sizes_by_rank]
    bytes_by_rank = {section: [0] * len(sizes_by_rank) for section in SECTIONS}
    for key in sorted(holders, key=lambda key: (len(holders[key]) > 1, -key[2], key)):
        name, _, nbytes = key
        assigned_bytes = bytes_by_rank[name.partition("/")[0]]
        rank = min(holders[key], key=assigned_bytes.__getitem__)
        names_by_rank[rank].add(name)
        assigned_bytes[rank] += nbytes
    return names_by_rank


def publish(
    folder: Path, shards: dict[str, LocalShard], trainer: dict[str, Any], about: dict[str, Any], peers: Peers = ALL
) -> None:
    """Writes the shards that `assign_shards` returned, and publishes them as `folder`. Every rank calls it."""
    beside = folder.with_name(f".{folder.name}.part")
    try:
        peers.run_on_rank_0(lambda: make_empty_folder(beside))
        written = peers.gather(peers.run_together(lambda: _write_shards(beside, shards, peers)))
        peers.run_on_rank_0(lambda: _publish_manifest(beside, folder, written, trainer, about))
    finally:
        if peers.rank == 0:
            discard(beside)


Written = tuple[dict[str, Any], list[dict[str, Any]]]
"""What one rank wrote: the manifest's entries for its files, and its pieces with the name, dtype and shape of the
tensor that each belongs to."""


def _write_shards(beside: Path, shards: dict[str, LocalShard], peers: Peers) -> Written:
    """Writes this rank's files, one for each section that it has shards of."""
    files: dict[str, Any] = {}
    pieces: list[dict[str, Any]] = []
    suffix = f"-{peers.rank + 1:05d}-of-{peers.size:05d}" if peers.size > 1 else ""
    for section in SECTIONS:
        file = f"{section}{suffix}.safetensors"
        names = {name.partition("/")[2]: name for name in shards if name.startswith(f"{section}/")}
        if not names:
            continue
        files[file], digests = write_safetensors(beside / file, {key: shards[n].tensor for key, n in names.items()})
        for key, name in names.items():
            dtype, shape, region, _ = shards[name]
            piece = {"file": file, "offset": [*region.offset], "shape": [*region.shape], "sha256": digests[key]}
            pieces.append({"name": name, "dtype": dtype_name(dtype), "shape": [*shape], "piece": piece})
    return files, pieces


def _publish_manifest(
    beside: Path, folder: Path, written: list[Written], trainer: dict[str, Any], about: dict[str, Any]
) -> None:
    """Writes the two JSON files, flushes everything, and renames the folder to its final name. Runs on rank 0."""
    text = json.dumps(trainer, indent=1)
    (beside / TRAINER).write_text(text)
    files = {TRAINER: {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}}
    files |= {file: facts for rank_files, _ in written for file, facts in rank_files.items()}
    manifest = {
        "format": _format_of(about),
        "versions": {"shoal": shoal.__version__, "torch": torch.__version__, "python": platform.python_version()},
        **({"step": step_of(folder)} if is_step_folder(folder) else {}),
        **about,
        "files": files,
        "tensors": _join_pieces([piece for _, pieces in written for piece in pieces]),
    }
    write_manifest(beside, manifest)
    for path in (beside / TRAINER, beside / MANIFEST, beside):
        flush(path)
    swap_in(beside, folder)


def _format_of(about: dict[str, Any]) -> int:
    """Returns the number of the oldest format that can hold what the manifest says."""
    if "base" not in about:
        return 1
    return DERIVED_FORMAT if any("from" in tensor for tensor in about["base"]["tensors"].values()) else FORMAT


def _join_pieces(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the manifest's entries for the tensors, each with its pieces. Raises WrongLayout if they do not fit."""
    tensors: dict[str, Any] = {}
    for entry in sorted(pieces, key=lambda entry: (entry["name"], entry["piece"]["offset"])):
        name, dtype, shape = entry["name"], entry["dtype"], entry["shape"]
        tensor = tensors.setdefault(name, {"dtype": dtype, "shape": shape, "pieces": []})
        if (dtype, shape) != (tensor["dtype"], tensor["shape"]):
            raise WrongLayout(
                f"{name} is {tensor['dtype']} {tensor['shape']} on one rank and {dtype} {shape} on another"
            )
        tensor["pieces"].append(entry["piece"])
    for name, tensor in tensors.items():
        regions = [Region(tuple(piece["offset"]), tuple(piece["shape"])) for piece in tensor["pieces"]]
        if problem := coverage_problem(tensor["shape"], regions):
            raise WrongLayout(f"{name}: {problem}")
    return tensors


def open_checkpoint(folder: Path) -> Checkpoint:
    """Opens a checkpoint and verifies everything except the tensors. Raises DamagedCheckpoint."""
    try:
        manifest = read_manifest(folder)
        tensors = parse_tensors(folder, manifest)
        base = parse_base(manifest["base"]) if "base" in manifest else {}
        if twice := [name for name in base if f"model/{name}" in tensors]:
            raise ValueError(f"{MANIFEST} has {twice[0]!r} both as a stored and as a frozen tensor")
        text = read_json_text(folder / TRAINER)
        if hashlib.sha256(text).hexdigest() != manifest["files"][TRAINER]["sha256"]:
            raise ValueError(f"{TRAINER} does not match its digest")
        trainer = json.loads(text)
        if not isinstance(trainer, dict):
            raise ValueError(f"{TRAINER} is not an object")
        checkpoint = Checkpoint(folder, manifest, trainer, tensors, base)
        _check_name(checkpoint)
        return checkpoint
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = f"a key is missing: {error}" if isinstance(error, KeyError) else one_line(error)
        raise DamagedCheckpoint(f"{folder}: {reason}") from None


def _check_name(checkpoint: Checkpoint) -> None:
    """Raises ValueError if a step folder has the name of another step: a run would go back to the step inside.

    In a hand-written loop `step` in trainer.json means what its author wants, so there only the manifest counts.
    """
    if not is_step_folder(checkpoint.folder):
        return
    steps = [checkpoint.manifest.get("step")]
    steps += [checkpoint.trainer.get("step")] if "config" in checkpoint.manifest else []
    for step in steps:
        if type(step) is int and step != step_of(checkpoint.folder):
            raise ValueError(f"it is the checkpoint of step {step}, so the folder was copied or renamed")
