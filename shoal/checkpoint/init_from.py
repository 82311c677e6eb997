"""checkpoint.init_from: the weights that a new run starts with, from a checkpoint or from files of other programs.

No code in these files is ever run.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from shoal.checkpoint.folders import step_folders
from shoal.checkpoint.frozen_base import BaseTensor, FrozenBase, base_files
from shoal.checkpoint.latest import describe_differences, find_latest_checkpoint, named_checkpoint
from shoal.checkpoint.manifest import MANIFEST
from shoal.checkpoint.pieces import READ_ERRORS
from shoal.checkpoint.store import DamagedCheckpoint, open_checkpoint
from shoal.errors import UserError, as_user_error, one_line
from shoal.lora.peft_folder import check_adapter, is_adapter_folder, read_adapter
from shoal.tensors import logical_shape, tensors_with_names
from shoal.weights.from_files import weight_files

KEY = "checkpoint.init_from"
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_NESTED = ("model", "state_dict", "model_state_dict")
"""The keys under which other programs put the weights in a file that holds more than weights."""


def weights_for_model(
    model: nn.Module,
    path: str,
    base: FrozenBase | None = None,
    warn: Callable[[str], None] = lambda warning: None,
    names_on_other_ranks: Collection[str] = (),
) -> dict[str, Any]:
    """Returns the weights in `path` by name in the model; each is a mapped tensor, or a StoredTensor.

    Names and shapes must be those of the model. A tied tensor may have any of its names, or all of them with equal
    values. Tensors of a frozen base may be missing: the model then keeps those that this run has read (`base`). All
    ranks call it. `names_on_other_ranks` are tensors of other stages of a pipeline.
    """
    stored, base_tensors = open_weights(path)
    if is_adapter_folder(folder := Path(path).expanduser()):
        frozen = base.tensors if base else {}
        digests = {name: tensor.source.sha256 for name, tensor in frozen.items()}
        check_adapter(f"{KEY} = {path!r}", folder, model, digests, {t.source.path.parent for t in frozen.values()})
    tensors: dict[str, Any] = {**stored, **base_tensors}
    model_shapes: dict[str, list[int]] = {}
    stored_names: dict[str, list[str]] = {}
    missing: dict[str, BaseTensor] = {}
    for tensor, names in tensors_with_names(model):
        first, present = names[0], [name for name in names if name in tensors]
        stored_names[first] = present
        if base and first in base.tensors and not present:
            missing[first] = base.tensors[first]
        else:
            model_shapes |= {name: [*logical_shape(tensor)] for name in present or [first]}
    stored_shapes = {
        name: [*value.shape]
        for name, value in tensors.items()
        if name in model_shapes or name not in names_on_other_ranks
    }
    if differences := describe_differences(stored_shapes, model_shapes):
        raise UserError(
            f"{KEY} = {path!r} has the weights of another model: {differences}; give weights of the model in this "
            "config"
        )
    for first, *others in filter(None, stored_names.values()):
        for name in others:
            if not torch.equal(_read(tensors[name]), _read(tensors[first])):
                raise UserError(
                    f"{KEY} = {path!r}: {first} and {name} are tied in this model, but have different values in the "
                    "file; untie them in the model, or remove one from the file"
                )
    if base_tensors and not (base and base.contains(base_tensors)):
        warn(
            f"{KEY} = {path!r} is an adapter for frozen weights in {', '.join(base_files(base_tensors))}, which this "
            f"run does not have: only the adapter is loaded, and {len(base_tensors)} tensors keep their values"
        )
    elif missing:
        files = ", ".join(base_files(missing))
        warn(f"{KEY} = {path!r} is only an adapter: {len(missing)} frozen tensors keep their values from {files}")
    return {name: stored[names[0]] for name, names in stored_names.items() if names and names[0] in stored}


def open_weights(path: str) -> tuple[Mapping[str, Any], Mapping[str, BaseTensor]]:
    """Returns the tensors in `path` by name, mapped or as StoredTensors, and the frozen base of a checkpoint."""
    place = named_checkpoint(Path(path).expanduser())
    if not place.exists():
        raise UserError(f"{KEY} = {path!r}: no such file or folder")
    if step_folders(place):
        latest = find_latest_checkpoint(place)
        if latest is None:
            raise UserError(f"{KEY} = {path!r}: all its checkpoints are damaged; give another run or file")
        place = latest
    if (place / MANIFEST).exists():
        with as_user_error(f"{KEY} = {path!r} is a damaged checkpoint", DamagedCheckpoint):
            checkpoint = open_checkpoint(place)
            return checkpoint.stored_state().model, checkpoint.base
    if is_adapter_folder(place):
        return read_adapter(place), {}
    files = [place] if place.is_file() else weight_files(place, KEY, "save the model again")
    if not files:
        raise UserError(
            f"{KEY} = {str(place)!r} is not a checkpoint and has no model.safetensors and no adapter; give the "
            "weight file itself"
        )
    return {name: tensor for file in files for name, tensor in _read_file(file).items()}, {}


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
