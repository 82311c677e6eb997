"""Regions of logical tensors: the one that a rank holds, and whether several of them cover a whole tensor."""

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
    """The shards of all ranks do not cover a tensor: a mistake in shoal's layout code, never one of the user."""


class Region(NamedTuple):
    """A rectangular region of a logical tensor: where it starts, and its shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def intersect(self, other: Region) -> Region | None:
        """Returns the region that is in both, or None if there is none."""
        starts = tuple(map(max, self.offset, other.offset))
        ends = map(min, map(add, self.offset, self.shape), map(add, other.offset, other.shape))
        sides = tuple(map(sub, ends, starts))
        return Region(starts, sides) if all(side > 0 for side in sides) else None

    def slices_in(self, other: Region) -> tuple[slice, ...]:
        """Returns the index that selects this region from a tensor that holds the region `other`."""
        starts = map(sub, self.offset, other.offset)
        return tuple(slice(start, start + side) for start, side in zip(starts, self.shape, strict=True))


@dataclass(frozen=True)
class Held:
    """One tensor of the model, and the region of it that this rank holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    region: Region | None
    """The region of this rank's shard; None if the tensor belongs to another stage of a pipeline."""

    @property
    def nbytes(self) -> int:
        """The size of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize


def whole_region(shape: Sequence[int]) -> Region:
    """Returns the region that is a whole tensor of this shape."""
    return Region((0,) * len(shape), tuple(shape))


def local_region(tensor: Tensor) -> Region:
    """Returns the region of the logical tensor that this rank holds: all of it, or the shard of a DTensor."""
    if not isinstance(tensor, DTensor):
        return whole_region(tensor.shape)
    if tensor.device_mesh.get_coordinate() is None:
        raise WrongLayout(f"this rank holds a DTensor of shape {[*tensor.shape]}, but is not in its mesh")
    if any(type(placement) not in (Shard, StridedShard, Replicate) for placement in tensor.placements):
        raise WrongLayout(f"a tensor placed as {tensor.placements} cannot be stored; only Shard and Replicate can")
    shape, offset = shape_and_offset(tensor)
    if (local_shape := tuple(tensor.to_local().shape)) != shape:
        raise WrongLayout(
            f"a shard of {[*tensor.shape]} placed as {tensor.placements} should be {shape}, but is {local_shape}"
        )
    return Region(offset, shape)


def held_of(tensors: Mapping[str, Tensor]) -> dict[str, Held]:
    """Returns what this rank holds of each tensor."""
    return {name: Held(tuple(t.shape), t.dtype, local_region(t)) for name, t in tensors.items()}


def coverage_problem(shape: Sequence[int], regions: Sequence[Region]) -> str | None:
    """Returns None if the regions cover a tensor of this shape, every element once, and else what is wrong.

    Layouts shard each dimension separately, so the regions are the cells of a grid. They cover it if along every
    dimension they leave neither gap nor overlap, no region occurs twice, and there are as many regions as cells.
    """
    if any(len(region.offset) != len(shape) or len(region.shape) != len(shape) for region in regions):
        return "a piece has another number of dimensions"
    cells = 1
    for dimension, length in enumerate(shape):
        intervals = sorted({(region.offset[dimension], region.shape[dimension]) for region in regions})
        end = 0
        for start, side in intervals:
            if start != end:
                return f"its pieces {'overlap' if start < end else 'leave a gap'} along dimension {dimension}"
            end += side
        if end != length:
            return f"its pieces reach {end} of {length} along dimension {dimension}"
        cells *= len(intervals)
    if len(set(regions)) != len(regions):
        return "a piece occurs twice"
    return None if len(regions) == cells else f"it has {len(regions)} of {cells} pieces"
