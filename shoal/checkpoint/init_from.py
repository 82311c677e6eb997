"""Weights to begin with: another run's checkpoint, or files of other programs. Nothing in them is run."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from shoal.checkpoint.folders import step_folders
from shoal.checkpoint.frozen_base import Base, Referenced, files_of
from shoal.checkpoint.latest import compare_shapes, find_latest_checkpoint
from shoal.checkpoint.manifest import MANIFEST
from shoal.checkpoint.pieces import READ_ERRORS
from shoal.checkpoint.store import DamagedCheckpoint, open_checkpoint
from shoal.errors import UserError, one_line
from shoal.tensors import logical_shape, tensors_with_names

KEY = "checkpoint.init_from"
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_NESTED = ("model", "state_dict", "model_state_dict")
"""Where others put the weights in a file that holds more than them."""


def weights_for(
    model: nn.Module,
    path: str,
    base: Base | None = None,
    warn: Callable[[str], None] = lambda warning: None,
    elsewhere: Collection[str] = (),
) -> dict[str, Any]:
    """The weights in `path` for a model with the same names and shapes, each where only what is used of it is read.

    What is tied in the model may be there under any of its names, or under all of them with one value. An adapter may
    come alone: what it refers to, or what is frozen in this run's `base`, the model keeps as it is. All ranks call it.
    `elsewhere` are names that other ranks have, as stages of a pipeline do.
    """
    stored, referenced = open_weights(path)
    everything: dict[str, Any] = {**stored, **referenced}
    shapes: dict[str, list[int]] = {}
    found: dict[str, list[str]] = {}
    lacking: dict[str, Referenced] = {}
    for tensor, names in tensors_with_names(model):
        first, present = names[0], [name for name in names if name in everything]
        found[first] = present
        if base and first in base.references and not present:
            lacking[first] = base.references[first]
        else:
            shapes |= {name: [*logical_shape(tensor)] for name in present or [first]}
    there = {name: [*value.shape] for name, value in everything.items() if name in shapes or name not in elsewhere}
    if differences := compare_shapes(there, shapes):
        raise UserError(
            f"{KEY} = {path!r} holds the weights of another model: {differences}; name weights of the model in this "
            "config"
        )
    for first, *others in filter(None, found.values()):
        for name in others:
            if not torch.equal(_read(everything[name]), _read(everything[first])):
                raise UserError(f"{KEY} = {path!r}: {first} and {name} differ, but are one tensor in this model")
    if referenced and not (base and base.has(referenced)):
        warn(
            f"{KEY} = {path!r} is an adapter to frozen weights in {', '.join(files_of(referenced))}, which are not "
            f"what this run has: the adapter alone is taken, and {len(referenced)} tensors stay as they are here"
        )
    elif lacking:
        files = ", ".join(files_of(lacking))
        warn(f"{KEY} = {path!r} is an adapter alone: {len(lacking)} frozen tensors stay as they are in {files}")
    return {name: stored[names[0]] for name, names in found.items() if names and names[0] in stored}


def open_weights(path: str) -> tuple[Mapping[str, Any], Mapping[str, Referenced]]:
    """Name → a tensor in a mapped file, or a StoredTensor; and what a checkpoint only refers to."""
    place = Path(path).expanduser()
    if not place.exists():
        raise UserError(f"{KEY} = {path!r}: there is no such file or folder")
    if step_folders(place):
        newest = find_latest_checkpoint(place)
        if newest is None:
            raise UserError(f"{KEY} = {path!r}: all checkpoints in it are damaged")
        place = newest
    if (place / MANIFEST).exists():
        try:
            checkpoint = open_checkpoint(place)
            return checkpoint.stored().model, checkpoint.base
        except DamagedCheckpoint as error:
            raise UserError(f"{KEY} = {path!r} is a damaged checkpoint: {error}") from None
    weights: dict[str, Tensor] = {}
    for file in [place] if place.is_file() else _files_in(place):
        weights |= _read_file(file)
    return weights, {}


def _read_file(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        try:
            return load_file(path)  # mapped into memory: what is not used of it is not read
        except READ_ERRORS as error:
            raise UserError(f"{KEY}: {path} cannot be read as safetensors: {one_line(error)}") from None
    if path.suffix in _TORCH_SUFFIXES:
        return _read_torch(path)
    raise UserError(
        f"{KEY} = {str(path)!r} is no kind of file it knows: give a checkpoint, a folder that transformers saved, a "
        f".safetensors file, or a state dict in a file that ends in {', '.join(_TORCH_SUFFIXES)}"
    )


def _files_in(folder: Path) -> list[Path]:
    """The files of weights in a folder that transformers saved; never one outside it."""
    if (folder / _INDEX).exists():
        try:
            names = sorted({str(name) for name in json.loads((folder / _INDEX).read_text())["weight_map"].values()})
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise UserError(f"{KEY}: {folder / _INDEX} is damaged") from None
        for name in names:
            if Path(name).name != name or not (folder / name).is_file():
                raise UserError(f"{KEY}: {folder / _INDEX} names {name!r}, which is not in its folder")
        return [folder / name for name in names]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    raise UserError(f"{KEY} = {str(folder)!r} is no checkpoint and has no {_SINGLE}; name the file of weights itself")


def _read_torch(path: Path) -> dict[str, Tensor]:
    """A state dict, by the unpickler that knows tensors alone."""
    load: Callable[..., Any] = torch.load
    try:
        with path.open("rb") as file:
            mapped = file.read(2) == b"PK"  # the format since 1.6; older ones are read whole
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other pickle protocols; that it was refused says enough
            loaded = load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError:
        raise UserError(
            f"{KEY}: {path} holds more than tensors, and what that is could be code, so it is not opened; save the "
            "state dict alone, or as safetensors"
        ) from None
    except Exception as error:  # a hostile or damaged file fails in many ways
        raise UserError(f"{KEY}: {path} cannot be read as a torch file: {one_line(error)}") from None
    if isinstance(loaded, dict):
        loaded = next((loaded[key] for key in _NESTED if isinstance(loaded.get(key), dict)), loaded)
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided
        for name, value in loaded.items()
    ):
        raise UserError(f"{KEY}: {path} is not a state dict: tensors by their names, and nothing else")
    return dict(loaded)


def _read(value: Any) -> Tensor:
    whole: Tensor = value if isinstance(value, Tensor) else value.read()
    return whole
