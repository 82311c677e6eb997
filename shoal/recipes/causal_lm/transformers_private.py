"""Holds all that recipe causal_lm uses of transformers without transformers documenting it, with the reasons."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.weights.conversion import Compute, Concatenate, FileTensor, Narrow, OpenFiles, Source, Stack, Transpose


def undivided_classes(model: Any) -> set[str]:
    """Returns the names of the layer classes that transformers keeps on one device. They are the model's blocks."""
    return set(getattr(model, "_no_split_modules", None) or ())


@torch.no_grad()
def initialise(model: nn.Module, module: nn.Module) -> None:
    """Initialises the parameters of one module as transformers does, and no others.

    transformers has no function for one module. A parent may draw again what its child drew, such as GPT-2's
    projections into the residual stream, so `_init_weights` runs for the module and then for each module around it. All
    other parameters are marked as initialised, and transformers does not touch those.
    """
    parameters: list[Any] = list(model.parameters())
    module_parameters = set(module.parameters(recurse=False))
    for parameter in parameters:
        parameter._is_hf_initialized = parameter not in module_parameters
    name = next(name for name, member in model.named_modules() if member is module)
    path: list[Any] = [model]
    for part in filter(None, name.split(".")):
        path.append(getattr(path[-1], part))
    try:
        while path:
            owner = next(member for member in reversed(path) if hasattr(member, "_init_weights"))
            owner._init_weights(path.pop())
    finally:
        for parameter in parameters:
            del parameter._is_hf_initialized


def file_sources(model: Any, files: OpenFiles) -> dict[str, Source]:
    """Returns how each tensor of a model is made from tensors in files, by its name in the model.

    transformers has a table for each kind of model, by which it joins, splits and renames file tensors while it loads
    them. Only its own loader uses this table, and it reads every tensor whole. So this function repeats the loader's
    steps with tensors that have no memory and record what transformers does to them.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    table = get_model_conversion_mapping(model)
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in table if not isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    tensors, prefix = model.state_dict(), model.base_model_prefix
    sources: dict[str, Source] = {}
    parts_by_target: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(files, key=dot_natural_key):  # transformers joins experts in this order
        target, pattern = rename_source_key(name, renamings, converters, prefix, tensors)
        if target not in tensors and name in tensors:  # the files hold the model's form, not the stored one
            target, pattern = rename_source_key(name, [], [], prefix, tensors)
        if target in tensors and pattern is not None:
            parts_by_target.setdefault(target, []).append((pattern, name))
        elif target in tensors:
            sources.setdefault(target, FileTensor(name))
    for target, parts in parts_by_target.items():
        converter = by_pattern[parts[0][0]]
        for pattern, name in parts:
            converter.add_tensor(target, name, pattern, _Recorded.from_source(FileTensor(name), files))
        try:
            results = converter.convert(target, model=model, config=model.config)
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"model.name: {target} cannot be made from {parts[0][1]}, …: {error}; download the files again"
            ) from None
        results = results[0] if isinstance(results, tuple) else results  # transformers 5.0 also returns errors
        sources |= {name: (value[0] if isinstance(value, list) else value).source for name, value in results.items()}
    return sources


class _Recorded(Tensor):
    """A tensor without memory that records, as a Source, how it was made from tensors in files."""

    source: Source

    @staticmethod
    def from_source(source: Source, files: OpenFiles) -> _Recorded:
        tensor = source.meta(files).as_subclass(_Recorded)
        tensor.source = source
        return tensor

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        if function in (torch.chunk, torch.split):
            _record_pieces(result, *args, **(kwargs or {}))
        elif isinstance(result, _Recorded):
            result.source = _record(function, *args, **(kwargs or {}))
        return result


def _record_pieces(pieces: tuple[_Recorded, ...], tensor: _Recorded, _: Any, dim: int = 0) -> None:
    """Records the pieces that `torch.chunk` or `torch.split` made of a tensor."""
    start = 0
    for piece in pieces:
        piece.source = Narrow((tensor.source,), dim, start, piece.shape[dim])
        start += piece.shape[dim]


def _record(function: Any, operands: Any, *args: Any, **kwargs: Any) -> Source:
    """Returns the source of a torch function's result. Its first argument is one tensor, or a list of tensors."""
    if function in (torch.cat, torch.stack):
        join = Concatenate if function is torch.cat else Stack
        return join(tuple(tensor.source for tensor in operands), *args, **kwargs)
    if function in (torch.transpose, Tensor.transpose):
        return Transpose((operands.source,), *args, **kwargs)
    if function is Tensor.contiguous:
        return operands.source
    # No box of the result can be traced back to a box of the file tensor, as for a reshape.
    return Compute((operands.source,), lambda tensor: function(tensor, *args, **kwargs))
