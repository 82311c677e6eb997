"""checkpoint.init_from: the weights that a new run starts with, from a checkpoint or from files of other programs.

No code in these files is ever run.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from shoal.checkpoint.folders import step_folders
from shoal.checkpoint.frozen_base import BaseTensor, FrozenBase
from shoal.checkpoint.inspect import as_dict
from shoal.checkpoint.latest import describe_differences, find_latest_checkpoint, named_checkpoint
from shoal.checkpoint.manifest import MANIFEST
from shoal.checkpoint.pieces import READ_ERRORS
from shoal.checkpoint.store import DamagedCheckpoint, open_checkpoint
from shoal.errors import UserError, as_user_error, one_line
from shoal.lora.peft_folder import (
    CONFIG,
    TENSORS,
    check_adapter,
    is_adapter_folder,
    is_named,
    read_about_base,
    read_adapter,
    read_config,
)
from shoal.tensors import logical_shape, tensors_with_names
from shoal.weights.from_files import weight_files

KEY = "checkpoint.init_from"
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_NESTED = ("model", "state_dict", "model_state_dict")
"""The keys under which other programs put the weights in a file that holds more than weights."""


@dataclass(frozen=True)
class StartWeights:
    """The weights in a file or folder, and what it says about the model that they are for."""

    tensors: Mapping[str, Any]
    """By name in the model. Each is mapped, or a StoredTensor."""
    base: Mapping[str, BaseTensor] = field(default_factory=dict)
    """The frozen base of a checkpoint."""
    base_name: str = ""
    """The name of the base in PEFT's folder."""
    base_digests: Mapping[str, str] = field(default_factory=dict)
    """The sha256 of the base's tensors in their files, by name in the model, as far as they are known."""
    added_tokens: Sequence[str] | None = None
    """The new tokens of the model, if they are known."""
    lora: Mapping[str, Any] = field(default_factory=dict)
    """The settings of the adapters, in PEFT's words."""
    lora_source: str = CONFIG
    """Where these settings are, for messages."""


def weights_for_model(
    model: nn.Module,
    path: str,
    base: FrozenBase | None = None,
    warn: Callable[[str], None] = lambda warning: None,
    names_on_other_ranks: Collection[str] = (),
    allows_other_base: bool = False,
    new_tokens: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns the weights in `path` by name in the model; each is a mapped tensor, or a StoredTensor.

    Names and shapes must be those of the model. A tied tensor may have any of its names, or all of them with equal
    values. Tensors of a frozen base may be missing: the model then keeps those that this run has read (`base`), which
    must be those that the adapter was trained on, unless `allows_other_base`. All ranks call it. `names_on_other_ranks`
    are tensors of other stages of a pipeline, and `new_tokens` those of this model, whose rows are in this order.
    """
    where, start = f"{KEY} = {path!r}", open_weights(path)
    if other := _describe_other_base(start, base):
        if not allows_other_base:
            raise UserError(
                f"{where}: {other}; set model.name to the adapter's base, or list model.name in "
                "checkpoint.allow_changed to load the adapter all the same"
            )
        warn(f"{where}: {other}; it is loaded all the same, because checkpoint.allow_changed lists model.name")
    if start.added_tokens is not None and [*start.added_tokens] != [*new_tokens]:
        raise UserError(
            f"{where}: its new tokens are {_say(start.added_tokens)}, and model.added_tokens has {_say(new_tokens)}; "
            "give the same tokens in the same order"
        )
    if start.lora:
        check_adapter(where, start.lora, start.lora_source, model)
    model_shapes: dict[str, list[int]] = {}
    stored_names: dict[str, list[str]] = {}
    for tensor, names in tensors_with_names(model):
        present = [name for name in names if name in start.tensors]
        stored_names[names[0]] = present
        is_in_base = (base and names[0] in base.tensors) or any(name in start.base for name in names)
        if present or not is_in_base:
            model_shapes |= {name: [*logical_shape(tensor)] for name in present or names[:1]}
    stored_shapes = {
        name: [*value.shape]
        for name, value in start.tensors.items()
        if name in model_shapes or name not in names_on_other_ranks
    }
    if differences := describe_differences(stored_shapes, model_shapes):
        raise UserError(
            f"{where} has the weights of another model: {differences}; give weights of the model in this config"
        )
    for first, *others in filter(None, stored_names.values()):
        for name in others:
            if not torch.equal(_read(start.tensors[name]), _read(start.tensors[first])):
                raise UserError(
                    f"{where}: {first} and {name} are tied in this model, but have different values in the file; untie "
                    "them in the model, or remove one from the file"
                )
    return {name: start.tensors[names[0]] for name, names in stored_names.items() if names}


def added_tokens(config: Mapping[str, Any]) -> list[str] | None:
    """Returns the new tokens that the config of a checkpoint gives its model; None if it has no such key."""
    tokens = as_dict(config.get("model")).get("added_tokens")
    return [str(token) for token in tokens] if isinstance(tokens, list) else None


def _say(tokens: Sequence[str]) -> str:
    return f"{', '.join(tokens):.100}" if tokens else "none"


def _describe_other_base(start: StartWeights, base: FrozenBase | None) -> str:
    """Returns how the base that an adapter was trained on differs from this run's; an empty string if it does not, as
    far as is known. Tensors are compared by their digests, wherever their files are. All ranks call it."""
    run_tensors = base.tensors if base else {}
    folders = sorted({tensor.source.path.parent for tensor in run_tensors.values()})
    differing: Mapping[str, BaseTensor | None]
    if start.base:
        differing = base.differing(start.base) if base else dict.fromkeys(start.base)
    else:
        known = {name: run_tensors[name] for name in start.base_digests if name in run_tensors}
        differing = {name: one for name, one in known.items() if one.source.sha256 != start.base_digests[name]}
    trained_on, run_base, why = start.base_name, ", ".join(map(str, folders)) or "not read from files", ""
    if differing:
        name, tensor = min(differing.items())
        trained_on = str(start.base[name].source.path) if start.base else trained_on
        if tensor is not None:
            run_base = str(tensor.source.path)
            why = f": {name} differs (sha256 {start.base_digests[name]:.12} and {tensor.source.sha256:.12})"
        elif run_tensors:
            why = f", without {name}"
    elif start.base_digests or not start.base_name or not folders or any(is_named(start.base_name, f) for f in folders):
        return ""
    named = f"the base {trained_on!r}" if trained_on else "another base"
    return f"the adapter was trained on {named}, and this run's base is {run_base}{why}"


def open_weights(path: str) -> StartWeights:
    """Opens the weights in `path`. Raises UserError if there are none, or if they are damaged."""
    where, place = f"{KEY} = {path!r}", named_checkpoint(Path(path).expanduser())
    if not place.exists():
        raise UserError(f"{where}: no such file or folder")
    if step_folders(place):
        latest = find_latest_checkpoint(place)
        if latest is None:
            raise UserError(f"{where}: all its checkpoints are damaged; give another run or file")
        place = latest
    if (place / MANIFEST).exists():
        with as_user_error(f"{where} is a damaged checkpoint", DamagedCheckpoint):
            checkpoint = open_checkpoint(place)
            digests = {name: tensor.source.sha256 for name, tensor in checkpoint.base.items()}
            config = as_dict(checkpoint.manifest.get("config"))
            state, lora = checkpoint.stored_state(), as_dict(config.get("lora"))
            return StartWeights(state.model, checkpoint.base, "", digests, added_tokens(config), lora, "config")
    if is_adapter_folder(place):
        config = read_config(where, place)
        name, (digests, added) = (
            str(config.get("base_model_name_or_path") or ""),
            read_about_base(where, place / TENSORS),
        )
        return StartWeights(read_adapter(place), {}, name, digests, added, config)
    files = [place] if place.is_file() else weight_files(place, KEY, "save the model again")
    if not files:
        raise UserError(
            f"{KEY} = {str(place)!r} is not a checkpoint and has no model.safetensors and no adapter; give the "
            "weight file itself"
        )
    tensors = {name: tensor for file in files for name, tensor in _read_file(file).items()}
    is_export = len(files) == 1 and files[0].suffix == ".safetensors"
    digests, added = read_about_base(where, files[0]) if is_export else ({}, None)
    return StartWeights(tensors, base_digests=digests, added_tokens=added)


def _read_file(path: Path) -> dict[str, Tensor]:
    """Returns the tensors in a file by name."""
    if path.suffix == ".safetensors":
        with as_user_error(f"{KEY}: {path} cannot be read as safetensors", *READ_ERRORS):
            return load_file(path)  # mapped into memory: tensors that are not used are not read
    if path.suffix in _TORCH_SUFFIXES:
        return _read_torch(path)
    raise UserError(
        f"{KEY} = {str(path)!r} is a file of an unknown kind; give a checkpoint, a folder that transformers saved, a "
        f".safetensors file, or a state dict in a file that ends in {', '.join(_TORCH_SUFFIXES)}"
    )


def _read_torch(path: Path) -> dict[str, Tensor]:
    """Returns the state dict in a torch file, read by the restricted unpickler (`weights_only`)."""
    try:
        with path.open("rb") as file:
            mapped = file.read(2) == b"PK"  # the zip format since torch 1.6; older files cannot be mapped
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about other pickle protocols; the refusal below says enough
            loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError:
        raise UserError(
            f"{KEY}: {path} holds more than tensors, which could be code, so it is not opened; save only the state "
            "dict, or save it as safetensors"
        ) from None
    except Exception as error:  # a hostile or damaged file fails in many ways
        raise UserError(f"{KEY}: {path} cannot be read as a torch file: {one_line(error)}") from None
    if isinstance(loaded, dict):
        loaded = next((loaded[key] for key in _NESTED if isinstance(loaded.get(key), dict)), loaded)
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided
        for name, value in loaded.items()
    ):
        raise UserError(f"{KEY}: {path} is not a state dict; save a dict of tensors by name, and nothing else")
    return dict(loaded)


def _read(value: Any) -> Tensor:
    """Returns the values of a tensor that may be a StoredTensor."""
    return value if isinstance(value, Tensor) else value.read()
