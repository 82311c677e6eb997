"""A process of a run among the others: its device, its place on the mesh, and what it can ask all of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shoal.config.mesh import coordinates, data_rank, data_size
from shoal.errors import UserError
from shoal.parallel.device_mesh import build_mesh
from shoal.processes.detect import detect
from shoal.processes.group import choose_backend, join, leave
from shoal.processes.world import World
from shoal.torch_private import set_group_timeout


class Ranks:
    """A layout as the processes see it. A subclass says how long the sides of its mesh are."""

    mesh: DeviceMesh | None = None
    data_groups: Sequence[dist.ProcessGroup | None]
    """A sum over these, one after another, is the sum over all slices of a batch; None is all ranks."""
    draws_as: tuple[int, ...]
    """Ranks for which this is the same draw the same, such as where to drop."""
    needs_mesh = False
    """Whether it takes a process group also on one process."""

    def __init__(
        self,
        device: str,
        backend: str,
        timeout: float,
        tf32: bool,
        deterministic: bool,
        world: World | None = None,
    ):
        self.world = world = world or detect()
        self.rank, self.world_size, self.local_rank = world.rank, world.size, world.local_rank
        self.is_main_process = world.rank == 0
        sizes = self.mesh_sizes()
        self.place_on_mesh = coordinates(world.rank, sizes)
        self.data_rank, self.data_size = data_rank(self.place_on_mesh, sizes), data_size(sizes)
        self.data_groups = (None,) if self.data_size > 1 else ()
        self.draws_as = (self.data_rank,)
        self.device = find_device(device, self.world.local_rank)
        self.backend = choose_backend(backend, self.device, world)
        self._tf32, self._deterministic, self._timeout_seconds = tf32, deterministic, timeout

    def mesh_sizes(self) -> dict[str, int]:
        """The sides of the mesh that are longer than one."""
        return {}

    @property
    def leads(self) -> bool:
        """Whether of the ranks with the same slice of a batch this is the first."""
        return not any(self.place_on_mesh[name] for name in ("pp", "cp", "tp"))

    def setup(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self._tf32:
            torch.set_float32_matmul_precision("high")
        if self._deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is only then repeatable
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
        if self.world.size > 1 or self.needs_mesh:
            join(self.world, self.device, self.backend, self._timeout_seconds)
            self.mesh = self._build_mesh(self.mesh_sizes())

    def _build_mesh(self, sizes: dict[str, int]) -> DeviceMesh:
        mesh = build_mesh(self.device.type, **sizes)
        for group in mesh.get_all_groups():
            set_group_timeout(group, self._timeout_seconds)
        return mesh

    def teardown(self) -> None:
        leave()
        if self._deterministic:
            torch.use_deterministic_algorithms(False)
        if self._tf32:
            torch.set_float32_matmul_precision("highest")

    def __enter__(self) -> Self:
        self.setup()
        return self

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        if error is None or self.world.size == 1:  # after an error the peers may be stuck, and so would taking leave be
            self.teardown()

    # What they tell each other

    def reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """The sum, mean or max over all data-parallel ranks, on every one of them."""
        if op not in ("sum", "mean", "max"):
            raise UserError(f"reduce(op={op!r}): use sum, mean or max")
        if not self.data_groups:
            return tensor
        tensor = tensor.clone()
        for group in self.data_groups:
            dist.all_reduce(tensor, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM, group=group)
        return tensor / prod(map(dist.get_world_size, self.data_groups)) if op == "mean" else tensor

    def highest(self, number: int, among: Sequence[dist.ProcessGroup | None] = (None,)) -> int:
        """The highest that any rank says. Goes over CPU tensors, so that no device is waited for."""
        if self.world.size == 1:
            return number
        told = torch.tensor(number)
        for group in among:
            dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
        return int(told)

    def barrier(self) -> None:
        if self.world.size > 1:
            dist.barrier()

    def sync_buffers(self, model: nn.Module) -> None:
        """Makes buffers what rank 0 has: those that a forward changes, such as BatchNorm's, are each rank's own."""
        for buffer in model.buffers():
            if buffer.is_contiguous():
                self.broadcast(buffer)

    def broadcast(self, tensor: Tensor) -> None:
        """Makes it what the rank with the first slice of a batch has."""
        for group in self.data_groups:
            dist.broadcast(tensor, dist.get_global_rank(group, 0) if group else 0, group)

    def replicas(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same parameters as this one, if there are others."""
        if self.mesh is None or self.mesh["dp_replicate"].size() == 1:
            return None
        return self.mesh.get_group("dp_replicate")

    def to_device(self, batch: Any) -> Any:
        """Moves the tensors in dicts, lists, tuples and named tuples, however nested."""
        if isinstance(batch, Tensor):
            return batch.to(self.device, non_blocking=True)
        if isinstance(batch, dict):
            return type(batch)((key, self.to_device(value)) for key, value in batch.items())
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):
            return type(batch)(*(self.to_device(value) for value in batch))
        if isinstance(batch, list | tuple):
            return type(batch)(self.to_device(value) for value in batch)
        return batch


def find_device(wanted: str, local_rank: int) -> torch.device:
    """The device of this process. Ranks of one machine take its GPUs in turn."""
    available = torch.accelerator.current_accelerator(check_available=True)
    if wanted == "auto":
        wanted = available.type if available else "cpu"
    elif wanted != "cpu" and (available is None or available.type != wanted):
        there = available.type if available else "only the CPU"
        raise UserError(f"training.device = {wanted!r}, but torch sees {there}; use auto or {available or 'cpu'}")
    if wanted == "cpu":
        return torch.device("cpu")
    return torch.device(wanted, local_rank % torch.accelerator.device_count())
