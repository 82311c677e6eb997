"""All native layouts are points on one mesh; a layout says how long each side is."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.errors import UserError

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def build_mesh(device_type: str, **sizes: int) -> DeviceMesh:
    """The mesh of this world, outermost first; what is not named has size 1."""
    return init_device_mesh(device_type, tuple(sizes.get(name, 1) for name in DIMENSIONS), mesh_dim_names=DIMENSIONS)


def fill_mesh(given: Mapping[str, int], world_size: int) -> dict[str, int]:
    """The sides of the data-parallel mesh, -1 replaced by what is left of the world."""
    sizes = {"dp_replicate": 1, "dp_shard": -1, **given}
    open_sides = [name for name, size in sizes.items() if size == -1]
    product = prod(size for size in sizes.values() if size != -1)
    if len(open_sides) > 1:
        raise UserError(f"distributed.mesh: {' and '.join(open_sides)} are both -1; give one of them")
    shown = " × ".join(f"{name} {size}" for name, size in sizes.items() if size != -1)
    if open_sides and world_size % product == 0:
        sizes[open_sides[0]] = world_size // product
    elif open_sides:
        raise UserError(f"distributed.mesh: {shown} does not divide the {world_size} processes there are")
    elif product != world_size:
        raise UserError(f"distributed.mesh: {shown} = {product}, but there are {world_size} processes")
    return sizes


def data_size(sizes: dict[str, int]) -> int:
    """How many different slices of a batch there are."""
    return prod(sizes.get(name, 1) for name in ("dp_replicate", "dp_shard"))
