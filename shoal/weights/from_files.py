"""Weights from files: each rank reads from safetensors what it holds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.tensors import local_part, local_slices, tensors_with_names
from shoal.types import Weights
from shoal.weights.conversion import FileTensor, Source, open_files


def sources_of(weights: Weights, file_names: Collection[str]) -> Mapping[str, Source]:
    """Returns how each tensor is made from files, by its name in the model: as the recipe says, or under that name."""
    return weights.sources if weights.sources is not None else {name: FileTensor(name) for name in file_names}


@torch.no_grad()
def read_files(model: nn.Module, weights: Weights) -> None:
    """Copies from safetensors what this rank holds, and reads no more than that."""
    files = open_files(weights.files)
    for tensor, _, sources in _tensors_with_sources(model, weights, files):
        if sources:
            sources[0].fill(local_part(tensor), local_slices(tensor), files)


def check_files(model: nn.Module, weights: Weights) -> str:
    """Refuses files that lack a parameter or have it in another shape; returns what they have and the model has not."""
    where = weights.files[0].parent if weights.files else "no file"
    files, parameters = open_files(weights.files), set(model.parameters())
    unused = set(files)
    for tensor, (name, *_), sources in _tensors_with_sources(model, weights, files):
        needed = {key for source in sources for key in source.names()}
        drawn = weights.reset is not None and tensor.requires_grad
        if not sources and tensor in parameters and not drawn:
            needed = {name}
        if missing := needed - files.keys():
            raise UserError(f"{where} has no tensor {min(missing)!r} (it has {', '.join(sorted(files)[:3])}, …)")
        unused -= needed
        try:
            shapes = [[*source.meta(files).shape] for source in sources]
        except RuntimeError as error:
            raise UserError(f"{where}: {name} cannot be made from {', '.join(sorted(needed)[:3])}: {error}") from None
        if shapes and shapes[0] != [*tensor.shape]:
            raise UserError(f"{where}: {name} has shape {shapes[0]}, but the model's is {[*tensor.shape]}")
    return f"{len(unused)} tensors in them are not the model's: {', '.join(sorted(unused)[:3])}" if unused else ""


def in_no_file(model: nn.Module, weights: Weights) -> set[nn.Parameter]:
    """What has to be drawn: all parameters of modules with one that no file has; a reset may draw them together."""
    files = open_files(weights.files)
    lacking = {tensor for tensor, _, sources in _tensors_with_sources(model, weights, files) if not sources}
    by_module = (set(module.parameters(recurse=False)) for module in model.modules())
    return set[nn.Parameter]().union(*(parameters for parameters in by_module if parameters & lacking))


def _tensors_with_sources(
    model: nn.Module, weights: Weights, files: Collection[str]
) -> Iterator[tuple[Tensor, list[str], list[Source]]]:
    """Yields every tensor of the model with its names and its sources: none, or one for each name that has one."""
    sources = sources_of(weights, files)
    for tensor, names in tensors_with_names(model):
        yield tensor, names, [sources[name] for name in names if name in sources]
