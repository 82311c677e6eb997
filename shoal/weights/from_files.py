"""Weights from files: each rank reads from safetensors what it holds."""

from __future__ import annotations

from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from shoal.errors import UserError
from shoal.tensors import local_part, local_slices, tensors_with_names
from shoal.types import Weights


@torch.no_grad()
def read_files(model: nn.Module, weights: Weights) -> None:
    """Copies from safetensors what this rank holds, and reads no more than that."""
    stored = _open_files(weights)
    for tensor, names in tensors_with_names(model):
        name = next((name for name in names if name in stored), None)
        if name is not None:
            local_part(tensor).copy_(stored[name].get_slice(name)[tuple(local_slices(tensor))])


def check_files(model: nn.Module, weights: Weights) -> str:
    """Refuses files that lack a parameter or have it in another shape; returns what they have and the model has not."""
    where = weights.files[0].parent if weights.files else "no file"
    stored, parameters = _open_files(weights), set(model.parameters())
    unused = set(stored)
    for tensor, names in tensors_with_names(model):
        unused.difference_update(names)
        name = next((name for name in names if name in stored), None)
        drawn = weights.reset is not None and tensor.requires_grad
        if name is None and tensor in parameters and not drawn:
            raise UserError(f"{where} has no tensor {names[0]!r} (it has {', '.join(sorted(stored)[:3])}, …)")
        if name is not None and (shape := stored[name].get_slice(name).get_shape()) != [*tensor.shape]:
            raise UserError(f"{where}: {name} has shape {shape}, but the model's is {[*tensor.shape]}")
    return f"{len(unused)} tensors in them are not the model's: {', '.join(sorted(unused)[:3])}" if unused else ""


def in_no_file(model: nn.Module, weights: Weights) -> set[nn.Parameter]:
    """What has to be drawn: all parameters of modules with one that no file has; a reset may draw them together."""
    stored = _open_files(weights).keys()
    lacking = {tensor for tensor, names in tensors_with_names(model) if stored.isdisjoint(names)}
    by_module = (set(module.parameters(recurse=False)) for module in model.modules())
    return set[nn.Parameter]().union(*(parameters for parameters in by_module if parameters & lacking))


def _open_files(weights: Weights) -> dict[str, Any]:
    """Name → the file that has it, mapped into memory as long as anyone holds it."""
    stored: dict[str, Any] = {}
    for path in weights.files:
        try:
            file = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read as safetensors: {error}") from None
        stored |= dict.fromkeys(file.keys(), file)
    return stored
