"""Reads weights from safetensors files: each rank reads the parts that it holds, and no others."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.errors import UserError, as_user_error
from shoal.tensors import local_part, local_slices, tensors_with_names
from shoal.types import Weights
from shoal.weights.conversion import FileTensor, Source, open_files
from shoal.weights.regular_files import read_json_text


def weight_files(folder: Path, key: str, advice: str) -> list[Path]:
    """Returns the weight files in a folder that transformers saved, or none if it has no safetensors.

    An index may name only files in its own folder. `key` and `advice` begin and end the message of a UserError.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.exists():
        return [single] if single.is_file() else []
    try:
        names = sorted(
            {str(name) for name in json.loads(read_json_text(index, follow_links=True))["weight_map"].values()}
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{key}: {index} is damaged; {advice}") from None
    for name in names:
        if Path(name).name != name or not _is_file(folder / name):
            raise UserError(f"{key}: {index} names {name!r:.200}, which is not in its folder; {advice}")
    return [folder / name for name in names]


def _is_file(path: Path) -> bool:
    """Returns whether a path is a file; also for a name that no file can have, where pathlib may raise."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def sources_of(weights: Weights, file_names: Collection[str]) -> Mapping[str, Source]:
    """Returns how each tensor is made from file tensors, by its name in the model. Unless the recipe says so, the files
    hold every tensor under that name."""
    return weights.sources if weights.sources is not None else {name: FileTensor(name) for name in file_names}


@torch.no_grad()
def read_files(model: nn.Module, weights: Weights) -> None:
    """Fills this rank's part of every tensor that the files hold."""
    files = open_files(weights.files)
    for tensor, _, sources in _tensors_with_sources(model, weights, files):
        if sources:
            sources[0].fill(local_part(tensor), local_slices(tensor), files)


def check_files(model: nn.Module, weights: Weights) -> str:
    """Raises UserError if a parameter is missing in the files or has another shape there.

    Returns a remark on file tensors that the model does not use, or an empty string.
    """
    folder = weights.files[0].parent if weights.files else "no file"
    files, parameters = open_files(weights.files), set(model.parameters())
    unused = set(files)
    for tensor, (name, *_), sources in _tensors_with_sources(model, weights, files):
        needed = {key for source in sources for key in source.names()}
        drawn = weights.reset is not None and tensor.requires_grad
        if not sources and tensor in parameters and not drawn:
            needed = {name}
        if missing := needed - files.keys():
            raise UserError(
                f"{folder} has no tensor {min(missing)!r} (it has {', '.join(sorted(files)[:3])}, …); "
                "give files of this model"
            )
        unused -= needed
        with as_user_error(f"{folder}: {name} cannot be made from {', '.join(sorted(needed)[:3])}", RuntimeError):
            shapes = [[*source.meta(files).shape] for source in sources]
        if shapes and shapes[0] != [*tensor.shape]:
            raise UserError(
                f"{folder}: {name} has shape {shapes[0]}, but {[*tensor.shape]} in the model; give files of this model"
            )
    return f"{len(unused)} tensors in them are unused: {', '.join(sorted(unused)[:3])}" if unused else ""


def parameters_to_draw(model: nn.Module, weights: Weights) -> set[nn.Parameter]:
    """Returns all parameters of every module that has a parameter which is in no file. A module's reset initialises its
    parameters together; those that are in a file are read afterwards."""
    with_sources = _tensors_with_sources(model, weights, open_files(weights.files))
    missing = {tensor for tensor, _, sources in with_sources if not sources}
    by_module = (set(module.parameters(recurse=False)) for module in model.modules())
    return {parameter for parameters in by_module if parameters & missing for parameter in parameters}


def _tensors_with_sources(
    model: nn.Module, weights: Weights, files: Collection[str]
) -> Iterator[tuple[Tensor, list[str], list[Source]]]:
    """Yields every tensor of the model with its names, and with the sources of those names that have one."""
    sources = sources_of(weights, files)
    for tensor, names in tensors_with_names(model):
        yield tensor, names, [sources[name] for name in names if name in sources]
