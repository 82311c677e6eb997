"""Weights to begin with: another run's checkpoint, or files of other programs. Nothing in them is run."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from shoal.checkpoint.frozen_base import Base, Referenced
from shoal.checkpoint.rotation import CheckpointManager, find_latest_checkpoint
from shoal.checkpoint.store import MANIFEST, DamagedCheckpoint, open_checkpoint
from shoal.errors import UserError
from shoal.tensors import logical_shape

KEY = "checkpoint.init_from"
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_NESTED = ("model", "state_dict", "model_state_dict")
"""Where others put the weights in a file that holds more than them."""


def about_names(model: nn.Module) -> dict[str, Any]:
    """What a checkpoint's tensors alone do not tell: other names of what is tied, and which are buffers."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if first.setdefault(id(tensor), name) != name:
            tied[name] = first[id(tensor)]
    parameters = {id(parameter) for parameter in model.parameters()}
    return {"tied": tied, "buffers": [name for key, name in first.items() if key not in parameters]}


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
    (stored, referenced), shapes = open_weights(path), dict[str, list[int]]()
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
        shapes[name] = [*logical_shape(tensor)]
    weights: dict[str, Any] = {}
    everything, lacking = {**stored, **referenced}, []
    strangers = everything.keys() - shapes.keys() - set(elsewhere)
    differences = [f"{name} {_shape(everything[name])} there, absent here" for name in strangers]
    for first, *aliases in names.values():
        there = [name for name in (first, *aliases) if name in everything]
        if not there and base and first in base.references:
            lacking.append(first)
        elif not there:
            differences.append(f"{first} absent there, {shapes[first]} here")
        for name in there:
            if _shape(everything[name]) != shapes[name]:
                differences.append(f"{name} {_shape(everything[name])} there, {shapes[name]} here")
            elif name != there[0] and not torch.equal(_whole(everything[name]), _whole(everything[there[0]])):
                raise UserError(f"{KEY} = {path!r}: {there[0]} and {name} differ, but are one tensor in this model")
        weights |= {first: stored[there[0]]} if there and there[0] in stored else {}
    if differences:
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise UserError(
            f"{KEY} = {path!r} holds the weights of another model: {'; '.join(sorted(differences)[:3])}{more}; "
            "name weights of the model in this config"
        )
    if referenced and not (base and base.has(referenced)):
        warn(
            f"{KEY} = {path!r} is an adapter to frozen weights in {_files(referenced)}, which are not what this run "
            f"has: the adapter alone is taken, and {len(referenced)} tensors stay as they are here"
        )
    elif base and lacking:
        own = _files({name: base.references[name] for name in lacking})
        warn(f"{KEY} = {path!r} is an adapter alone: {len(lacking)} frozen tensors stay as they are in {own}")
    return weights


def open_weights(path: str) -> tuple[Mapping[str, Any], Mapping[str, Referenced]]:
    """Name → a tensor in a mapped file, or a Stored; and what a checkpoint only refers to."""
    place = Path(path).expanduser()
    if not place.exists():
        raise UserError(f"{KEY} = {path!r}: there is no such file or folder")
    if place.is_file():
        return _read_file(place), {}
    if CheckpointManager(place).steps():
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
    for file in _files_in(place):
        weights |= _read_safetensors(file)
    return weights, {}


def _read_file(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
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


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    """Mapped into memory: what is not used of it is not read."""
    try:
        return load_file(path)
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise UserError(f"{KEY}: {path} cannot be read as safetensors: {_one_line(error)}") from None


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
        raise UserError(f"{KEY}: {path} cannot be read as a torch file: {_one_line(error)}") from None
    if isinstance(loaded, dict):
        loaded = next((loaded[key] for key in _NESTED if isinstance(loaded.get(key), dict)), loaded)
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided
        for name, value in loaded.items()
    ):
        raise UserError(f"{KEY}: {path} is not a state dict: tensors by their names, and nothing else")
    return dict(loaded)


def _files(references: Mapping[str, Referenced]) -> str:
    return ", ".join(sorted({str(reference.path) for reference in references.values()}))


def _shape(value: Any) -> list[int]:
    return [*value.shape]


def _whole(value: Any) -> Tensor:
    whole: Tensor = value if isinstance(value, Tensor) else value.read()
    return whole


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
