"""All native layouts are points on one mesh; a layout says how long each side is."""

from __future__ import annotations

from math import prod

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def build_mesh(device_type: str, **sizes: int) -> DeviceMesh:
    """The mesh of this world, outermost first; what is not named has size 1."""
    return init_device_mesh(device_type, tuple(sizes.get(name, 1) for name in DIMENSIONS), mesh_dim_names=DIMENSIONS)


def data_size(sizes: dict[str, int]) -> int:
    """How many different slices of a batch there are."""
    return prod(sizes.get(name, 1) for name in ("dp_replicate", "dp_shard"))
