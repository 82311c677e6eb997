"""Which part of a logical tensor a rank holds, and whether such parts make up the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import add, sub
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from shoal.torch_private import StridedShard, shape_and_offset


class WrongLayout(Exception):
    """What the ranks hold does not make up the tensors they say it is of: a mistake in a layout, never the user's."""


class Region(NamedTuple):
    """A rectangular part: where it begins in the logical tensor and how long its sides are."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def overlap(self, other: Region) -> Region | None:
        starts = tuple(map(max, self.offset, other.offset))
        ends = map(min, map(add, self.offset, self.shape), map(add, other.offset, other.shape))
        sides = tuple(map(sub, ends, starts))
        return Region(starts, sides) if all(side > 0 for side in sides) else None

    def within(self, other: Region) -> tuple[slice, ...]:
        """How to index a tensor that holds `other` to get this part of it."""
        starts = map(sub, self.offset, other.offset)
        return tuple(slice(start, start + side) for start, side in zip(starts, self.shape, strict=True))


@dataclass(frozen=True)
class Held:
    """One tensor of the model, and the part of it that this rank holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    region: Region | None
    """Where this rank's part lies in the tensor; None if the tensor belongs to another stage of a pipeline."""

    @property
    def nbytes(self) -> int:
        """The size of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize


def whole_region(shape: Sequence[int]) -> Region:
    return Region((0,) * len(shape), tuple(shape))


def local_region(tensor: Tensor) -> Region:
    """The part of the logical tensor that this rank holds: all of it, or a DTensor's shard."""
    if not isinstance(tensor, DTensor):
        return whole_region(tensor.shape)
    if tensor.device_mesh.get_coordinate() is None:
        raise WrongLayout(f"this rank holds a tensor {[*tensor.shape]}, but is not in its mesh")
    if any(type(placement) not in (Shard, StridedShard, Replicate) for placement in tensor.placements):
        raise WrongLayout(f"a tensor placed as {tensor.placements} cannot be stored; only Shard and Replicate can")
    shape, offset = shape_and_offset(tensor)
    if (held := tuple(tensor.to_local().shape)) != shape:
        raise WrongLayout(f"{tensor.placements} of {[*tensor.shape]} should be {shape} here, but is {held}")
    return Region(offset, shape)


def held_of(tensors: Mapping[str, Tensor]) -> dict[str, Held]:
    """Returns what this rank holds of each tensor."""
    return {name: Held(tuple(t.shape), t.dtype, local_region(t)) for name, t in tensors.items()}


def why_not_whole(shape: Sequence[int], boxes: Sequence[Region]) -> str | None:
    """None if the boxes make up a tensor of this shape, every element once.

    Layouts cut each dimension by itself, so boxes are the cells of a grid. They are all of its cells, once each, if
    the cuts along every dimension leave neither gap nor overlap, no box comes twice, and there are as many as cells.
    """
    if any(len(box.offset) != len(shape) or len(box.shape) != len(shape) for box in boxes):
        return "a piece has other dimensions"
    cells = 1
    for dimension, length in enumerate(shape):
        cuts = sorted({(box.offset[dimension], box.shape[dimension]) for box in boxes})
        end = 0
        for start, side in cuts:
            if start != end:
                return f"its pieces {'overlap' if start < end else 'leave a gap'} along dimension {dimension}"
            end += side
        if end != length:
            return f"its pieces reach {end} of {length} along dimension {dimension}"
        cells *= len(cuts)
    if len(set(boxes)) != len(boxes):
        return "a piece comes twice"
    return None if len(boxes) == cells else f"it has {len(boxes)} of {cells} pieces"
