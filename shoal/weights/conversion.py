"""Describes, as data, how a tensor of a model is made from tensors in files: joined, split, transposed, or renamed.

A rank asks a source for its part of the tensor, a box of it, and the source reads only what lies in that box from the
files. Here are two experts, each with a gate and an up projection, that the model keeps in one tensor (expert, row,
column):

    Concatenate((Stack((FileTensor("experts.0.gate"), FileTensor("experts.1.gate"))),
                 Stack((FileTensor("experts.0.up"), FileTensor("experts.1.up")))), dim=1)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoal.errors import as_user_error
from shoal.weights.regular_files import check_regular

OpenFiles = Mapping[str, Any]
"""Tensors in safetensors files by name, mapped into memory: `get_shape()` returns a shape, indexing reads a part."""


def open_safetensors(path: Path) -> Any:
    """Opens a safetensors file and maps it into memory. Raises UserError if that fails."""
    with as_user_error(f"{path} cannot be read as safetensors", OSError, ValueError, SafetensorError):
        check_regular(path, follow_links=True)
        return safe_open(path, framework="pt")


def open_files(paths: Iterable[Path]) -> dict[str, Any]:
    """Returns the tensors in safetensors files by name. If two files hold the same name, the later one is used."""
    return {name: file.get_slice(name) for file in map(open_safetensors, paths) for name in file.keys()}  # noqa: SIM118  a file is no mapping


class Source:
    """A tensor that is made from other tensors, its parts. Unless a subclass knows better, parts are read whole."""

    parts: tuple[Source, ...]

    def combine(self, *parts: Tensor) -> Tensor:
        """Returns the tensor that the parts make."""
        raise NotImplementedError

    def names(self) -> Iterator[str]:
        """Yields the names of all file tensors that this tensor is made from."""
        for part in self.parts:
            yield from part.names()

    def meta(self, files: OpenFiles) -> Tensor:
        """Returns the tensor on the meta device, for its shape. Raises RuntimeError if the parts do not fit."""
        return self.combine(*(part.meta(files) for part in self.parts))

    def fill(self, out: Tensor, box: Sequence[slice], files: OpenFiles) -> None:
        """Copies a box of the tensor into `out`, which has the shape of the box. All slices have a start and a stop."""
        whole = []
        for part in self.parts:
            shape = part.meta(files).shape
            whole.append(torch.empty(shape, dtype=out.dtype))
            part.fill(whole[-1], [slice(0, length) for length in shape], files)
        out.copy_(self.combine(*whole)[tuple(box)])


@dataclass(frozen=True)
class FileTensor(Source):
    """A tensor exactly as a file holds it, under its name in the file."""

    name: str
    parts = ()

    def names(self) -> Iterator[str]:
        yield self.name

    def meta(self, files: OpenFiles) -> Tensor:
        return torch.empty(files[self.name].get_shape(), device="meta")

    def fill(self, out: Tensor, box: Sequence[slice], files: OpenFiles) -> None:
        out.copy_(files[self.name][tuple(box)])


@dataclass(frozen=True)
class Concatenate(Source):
    """Joins tensors one after another along a dimension, as `torch.cat` does."""

    parts: tuple[Source, ...]
    dim: int = 0

    def combine(self, *parts: Tensor) -> Tensor:
        return torch.cat(parts, self.dim)

    def fill(self, out: Tensor, box: Sequence[slice], files: OpenFiles) -> None:
        rows, begin = box[self.dim], 0
        for part in self.parts:
            end = begin + part.meta(files).shape[self.dim]
            start, stop = max(rows.start, begin), min(rows.stop, end)
            if start < stop:
                inside = _replace(box, self.dim, slice(start - begin, stop - begin))
                part.fill(out.narrow(self.dim, start - rows.start, stop - start), inside, files)
            begin = end


@dataclass(frozen=True)
class Stack(Source):
    """Joins tensors of one shape along a new dimension, as `torch.stack` does."""

    parts: tuple[Source, ...]
    dim: int = 0

    def combine(self, *parts: Tensor) -> Tensor:
        return torch.stack(parts, self.dim)

    def fill(self, out: Tensor, box: Sequence[slice], files: OpenFiles) -> None:
        inside = [*box]
        for index, part in enumerate(self.parts[inside.pop(self.dim)]):
            part.fill(out.select(self.dim, index), inside, files)


@dataclass(frozen=True)
class Narrow(Source):
    """Takes a stretch of one tensor along a dimension, as `torch.narrow` does."""

    parts: tuple[Source]
    dim: int
    start: int
    length: int

    def combine(self, *parts: Tensor) -> Tensor:
        return parts[0].narrow(self.dim, self.start, self.length)

    def fill(self, out: Tensor, box: Sequence[slice], files: OpenFiles) -> None:
        rows = box[self.dim]
        inside = _replace(box, self.dim, slice(rows.start + self.start, rows.stop + self.start))
        self.parts[0].fill(out, inside, files)


@dataclass(frozen=True)
class Transpose(Source):
    """Exchanges two dimensions of one tensor, as `torch.transpose` does."""

    parts: tuple[Source]
    dim0: int
    dim1: int

    def combine(self, *parts: Tensor) -> Tensor:
        return parts[0].transpose(self.dim0, self.dim1)

    def fill(self, out: Tensor, box: Sequence[slice], files: OpenFiles) -> None:
        inside = _replace(_replace(box, self.dim0, box[self.dim1]), self.dim1, box[self.dim0])
        self.parts[0].fill(out.transpose(self.dim0, self.dim1), inside, files)


@dataclass(frozen=True)
class Compute(Source):
    """Calls a function with whole tensors. They are read whole, whatever part of the result is needed."""

    parts: tuple[Source, ...]
    function: Callable[..., Tensor]

    def combine(self, *parts: Tensor) -> Tensor:
        return self.function(*parts)


def _replace(box: Sequence[slice], dim: int, rows: slice) -> list[slice]:
    """Returns the box with other rows along one dimension."""
    changed = [*box]
    changed[dim] = rows
    return changed
