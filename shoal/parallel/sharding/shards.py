"""How an optimizer works on sharded parameters: it holds and updates the local part of each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from shoal.parallel.sharding.trial import try_out
from shoal.tensors import local_part, map_tensors
from shoal.torch_private import StridedShard, foreach_norm, is_fake

ELEMENTWISE = {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adadelta", "Rprop", "ASGD", "Adagrad"}
"""torch's optimizers that treat every element by itself, so that updating a part of a tensor is updating the tensor."""
HALF = {torch.bfloat16, torch.float16}
"""The types in half precision, in which a norm would be coarse."""


def is_elementwise(optimizer: Optimizer) -> bool:
    """Returns whether updating the parts of a tensor is updating the tensor.

    It is known for torch's optimizers and for shoal's, which have it as an attribute. Others are tried out.
    """
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim"):
        return kind.__name__ in ELEMENTWISE
    known = getattr(kind, "elementwise", None)
    if known is not None:
        return bool(known)
    return _is_planned(optimizer) or try_out(optimizer).elementwise


def _is_planned(optimizer: Optimizer) -> bool:
    """Returns whether parameters have no memory, so that nothing can be tried."""
    return any(is_fake(local_part(p)) for group in optimizer.param_groups for p in group["params"])


def hold_shards(optimizer: Optimizer) -> None:
    """Replaces each DTensor of an optimizer by a plain parameter in the memory of this rank's part.

    Fused kernels take plain tensors alone (fused SGD has no rule for DTensors, and none takes both kinds). The new
    parameter has the DTensor as `shard_of`.
    """
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            if isinstance(parameter, DTensor):
                part = nn.Parameter(local_part(parameter), requires_grad=parameter.requires_grad)
                part.shard_of = parameter  # type: ignore[attr-defined]
                group["params"][index] = part
                if parameter in optimizer.state:
                    optimizer.state[part] = map_tensors(local_part, optimizer.state.pop(parameter))


@torch.no_grad()
def take_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Gives local parts the gradients of their DTensors."""
    for parameter in parameters:
        whole: DTensor | None = getattr(parameter, "shard_of", None)
        if whole is not None:
            gradient: Any = whole.grad
            if gradient is not None and gradient.placements != whole.placements:
                gradient = gradient.redistribute(placements=whole.placements)
            parameter.grad = None if gradient is None else gradient.to_local()


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Frees the gradients of parameters, and of the DTensors that they are local parts of."""
    for parameter in parameters:
        parameter.grad = None
        getattr(parameter, "shard_of", parameter).grad = None


def norm_of(tensors: list[Tensor]) -> Tensor:
    """Returns the norm of all elements of some tensors, in fp32 for those in half precision."""
    if not any(tensor.dtype in HALF for tensor in tensors):
        return get_total_norm(tensors)
    if all(tensor.dtype in HALF for tensor in tensors):
        norms = [*foreach_norm(tensors, 2, torch.float32)]
    else:
        norms = [torch.linalg.vector_norm(t, dtype=torch.float32 if t.dtype in HALF else None) for t in tensors]
    return torch.linalg.vector_norm(torch.stack([norm.to(tensors[0].device) for norm in norms])).detach()


@torch.no_grad()
def total_norm(gradients: Iterable[tuple[Tensor, tuple[dist.ProcessGroup, ...]]]) -> Tensor:
    """Returns the norm of the whole gradient; each local part comes with the process groups that it is split over."""
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for part, groups in gradients:
        by_groups.setdefault(groups, []).append(part)
    squares = []
    for groups, parts in by_groups.items():
        square = norm_of(parts).square()
        for group in groups:
            dist.all_reduce(square, group=group)
        squares.append(square)
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


def split_over(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Returns the process groups whose ranks hold different parts of a tensor."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    split = [side for side, placement in enumerate(tensor.placements) if isinstance(placement, Shard | StridedShard)]
    return tuple(mesh.get_group(side) for side in split if mesh.size(side) > 1)
