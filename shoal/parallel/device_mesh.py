"""All native layouts are points on one mesh; a layout says how long each side is."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.config.mesh import DIMENSIONS


def build_mesh(device_type: str, **sizes: int) -> DeviceMesh:
    """The mesh of this world, outermost first; what is not named has size 1."""
    return init_device_mesh(device_type, tuple(sizes.get(name, 1) for name in DIMENSIONS), mesh_dim_names=DIMENSIONS)
