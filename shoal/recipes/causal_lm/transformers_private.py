"""What recipe causal_lm uses of transformers that transformers does not document, with the reasons."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.weights.conversion import Compute, Concatenate, FileTensor, FileTensors, Narrow, Source, Stack, Transpose


def undivided_classes(model: Any) -> set[str]:
    """Returns the names of the classes of layers that transformers never divides between devices: the blocks."""
    return set(getattr(model, "_no_split_modules", None) or ())


@torch.no_grad()
def draw(model: nn.Module, module: nn.Module) -> None:
    """The initialisation of transformers for the parameters of one module, and for nothing else.

    A parent may draw again what its child drew (GPT-2's projections into the residual stream), so all of a module's
    ancestors have their turn; transformers leaves alone what is marked as initialised.
    """
    parameters: list[Any] = list(model.parameters())
    own = set(module.parameters(recurse=False))
    for parameter in parameters:
        parameter._is_hf_initialized = parameter not in own
    name = next(name for name, member in model.named_modules() if member is module)
    line: list[Any] = [model]
    for part in filter(None, name.split(".")):
        line.append(getattr(line[-1], part))
    try:
        while line:
            owner = next(member for member in reversed(line) if hasattr(member, "_init_weights"))
            owner._init_weights(line.pop())
    finally:
        for parameter in parameters:
            del parameter._is_hf_initialized


def file_sources(model: Any, files: FileTensors) -> dict[str, Source]:
    """Returns how each tensor of a model is made from tensors in files, by its name in the model.

    transformers joins, splits and renames file tensors while it loads them, by a table for each kind of model, but only
    its own loader can do so, and that reads every tensor whole. So the loader's steps are taken here with tensors that
    have no memory and record what is done to them: the table and the operations stay those of transformers.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    table = get_model_conversion_mapping(model)
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in table if not isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    tensors, prefix = model.state_dict(), model.base_model_prefix
    sources: dict[str, Source] = {}
    converted: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(files, key=dot_natural_key):  # experts are joined in this order
        target, pattern = rename_source_key(name, renamings, converters, prefix, tensors)
        if target not in tensors and name in tensors:  # the files hold the model's own form
            target, pattern = rename_source_key(name, [], [], prefix, tensors)
        if target in tensors and pattern is not None:
            converted.setdefault(target, []).append((pattern, name))
        elif target in tensors:
            sources.setdefault(target, FileTensor(name))
    for target, parts in converted.items():
        converter = by_pattern[parts[0][0]]
        for pattern, name in parts:
            converter.add_tensor(target, name, pattern, _Recorded.of(FileTensor(name), files))
        try:
            made = converter.convert(target, model=model, config=model.config)
        except (RuntimeError, ValueError) as error:
            raise UserError(f"model.name: {target} cannot be made from {parts[0][1]}, …: {error}") from None
        made = made[0] if isinstance(made, tuple) else made  # transformers 5.0 returns errors beside it
        sources |= {name: (value[0] if isinstance(value, list) else value).source for name, value in made.items()}
    return sources


class _Recorded(Tensor):
    """A tensor without memory that records how it is made from tensors in files."""

    source: Source

    @staticmethod
    def of(source: Source, files: FileTensors) -> _Recorded:
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
    start = 0
    for piece in pieces:
        piece.source = Narrow((tensor.source,), dim, start, piece.shape[dim])
        start += piece.shape[dim]


def _record(function: Any, given: Any, *args: Any, **kwargs: Any) -> Source:
    """Returns the source of what a torch function makes of one tensor, or of a list of them."""
    if function in (torch.cat, torch.stack):
        join = Concatenate if function is torch.cat else Stack
        return join(tuple(tensor.source for tensor in given), *args, **kwargs)
    if function in (torch.transpose, Tensor.transpose):
        return Transpose((given.source,), *args, **kwargs)
    if function is Tensor.contiguous:
        return given.source
    return Compute((given.source,), lambda tensor: function(tensor, *args, **kwargs))
