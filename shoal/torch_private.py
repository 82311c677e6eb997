"""Everything shoal uses of torch that torch does not document, with the reason. Nothing private elsewhere."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

# What a DTensor's constructor takes; see as_shard.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# DTensor tells its placements, but not which rows those make.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

# The bases of all batch norms and of all dropouts, each kind by one name.
from torch.nn.modules.batchnorm import _BatchNorm as BATCH_NORM
from torch.nn.modules.dropout import _DropoutNd as DROPOUT

# The extension point behind FlopCounterMode and CommDebugMode; documented by example, kept under an underscore.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "BATCH_NORM",
    "DROPOUT",
    "TorchDispatchMode",
    "as_shard",
    "compiled_graphs",
    "set_group_timeout",
    "shape_and_offset",
    "storage_key",
    "uncompiled",
]


def as_shard(local: Tensor, parameter: DTensor) -> DTensor:
    """`local` as this rank's part of a tensor that is laid out as `parameter` is.

    Not by DTensor.from_local, which moves it to the mesh's device: what is offloaded to the CPU has to stay there.
    """
    meta = TensorMeta(parameter.shape, parameter.stride(), local.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def set_group_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """The groups of a mesh are made without asking for how long they may wait."""
    distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def storage_key(tensor: Tensor) -> int:
    """The same number for tensors that share memory. On the meta device data_ptr() is 0 for all of them."""
    return tensor.untyped_storage()._cdata


def shape_and_offset(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of the part this rank holds, and where it begins in the whole."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that was given to torch.compile, whose wrapper puts `_orig_mod.` before every name."""
    return getattr(module, "_orig_mod", module)


def compiled_graphs() -> int:
    """How many graphs torch.compile has compiled in this process: proof that it engaged."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]
