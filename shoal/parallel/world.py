"""The processes of a run: who I am, how many there are, and the group they talk in."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from shoal.errors import UserError

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class World:
    """This process among the others, as torchrun and every launcher like it tells by environment variables."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> World:
        """One process if none of the variables that make a rank is set; a mistake if only some are."""
        if "RANK" not in environment and "LOCAL_RANK" not in environment:
            return cls()
        missing = [name for name in _NEEDED if name not in environment]
        if missing:
            given = ", ".join(f"{name}={environment[name]}" for name in _NEEDED if name in environment)
            raise UserError(
                f"the environment says {given}, but not {', '.join(missing)}: "
                "start the processes by `torchrun` or by launch.procs_per_node, or unset all of them"
            )
        numbers = {}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            if not environment[name].isdigit():
                raise UserError(f"the environment says {name}={environment[name]!r}, which is not a number")
            numbers[name] = int(environment[name])
        rank, size, local_rank = numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_RANK"]
        if rank >= size:
            raise UserError(f"the environment says RANK={rank} in a world of WORLD_SIZE={size}; ranks count from 0")
        return cls(rank, size, local_rank, int(environment.get("LOCAL_WORLD_SIZE", size)))

    def join(self, device: torch.device, backend: str, timeout_seconds: float) -> None:
        """Makes the process group, unless somebody has."""
        if dist.is_initialized():
            return
        if os.environ["MASTER_ADDR"] in ("localhost", "127.0.0.1", "::1"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: listen on loopback only
        dist.init_process_group(
            backend,
            store=self.store,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=device if "nccl" in backend else None,
        )

    @cached_property
    def store(self) -> Any:
        """What the processes share before there is a group.

        Every attempt of an elastic launcher gets names of its own in it: the first restart would otherwise read the
        addresses of the dead.
        """
        store, _, _ = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
        return dist.PrefixStore(f"attempt {attempt}", store)  # type: ignore[attr-defined]

    def once_per_node(self, task: Callable[[], None]) -> None:
        """Runs `task` in one process of each machine while the others wait, however long it takes."""
        if self.size == 1:
            task()
            return
        done = f"{task.__qualname__} on node {self.rank // self.local_size}"
        if self.local_rank == 0:
            task()
            self.store.set(done, "yes")
        else:
            self.store.wait([done], timedelta(days=1))

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def choose_backend(wanted: str, device: torch.device, world: World) -> str:
    """gloo for CPU tensors and NCCL for CUDA's, unless ranks share a GPU, which NCCL refuses."""
    if device.type != "cuda":
        if wanted == "nccl":
            raise UserError(
                f"distributed.backend = nccl needs a CUDA device, but the run is on {device.type}; use auto"
            )
        return "gloo"
    if wanted == "gloo":
        return "gloo"
    if world.local_size > torch.cuda.device_count():
        raise UserError(
            f"{world.local_size} processes on this machine, but {torch.cuda.device_count()} GPUs; NCCL needs one each: "
            "start fewer, or let them share by distributed.backend = gloo"
        )
    return "cpu:gloo,cuda:nccl"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False
