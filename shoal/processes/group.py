"""The process group of a run: which backend it takes, joining, leaving, and how the loss of a peer looks."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist

from shoal.errors import UserError
from shoal.processes.board import store_of
from shoal.processes.world import World

LOST_PEERS = 75
"""Exit code of a process that ended only because another died or hung."""

_LOST = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "Connection refused",
    "Timed out waiting",
    "pair closure",
    "remote process exited or there was a network error",  # NCCL
)


def join(world: World, device: torch.device, backend: str, timeout_seconds: float) -> None:
    """Makes the default process group, unless somebody has."""
    if dist.is_initialized():
        return
    if world.on_one_machine:  # which nobody else is to reach
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    alone = world.size == 1  # nobody to talk to, so nowhere to listen
    dist.init_process_group(
        backend,
        store=dist.HashStore() if alone else store_of(world, "process group"),  # type: ignore[attr-defined]
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if "nccl" in backend and not alone else None,
    )


def leave(world: World) -> None:
    """Destroys the process groups that `join` made; those that somebody else made stay."""
    if world.group == "to make" and dist.is_initialized():
        dist.destroy_process_group()


def cpu_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup | None:
    """Returns a process group for CPU tensors with the ranks of `group`; None is the default group, here as in torch.

    That is `group` itself, unless somebody made it over NCCL alone: then all of its ranks, which have to call this
    together, make a gloo group beside it, once.
    """
    return group if "cpu:" in dist.get_backend_config(group) else _gloo_group(group or dist.group.WORLD)


@cache
def _gloo_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


def choose_backend(wanted: str, device: torch.device, world: World) -> str:
    """gloo for CPU tensors and NCCL for CUDA's, unless ranks share a GPU, which NCCL refuses."""
    on_cuda = device.type == "cuda"
    if wanted == "nccl" and not on_cuda:
        raise UserError(f"distributed.backend = nccl needs a CUDA device, but the run is on {device.type}; use auto")
    if wanted == "gloo" or not on_cuda:
        return "gloo"
    if world.local_size > torch.cuda.device_count():
        raise UserError(
            f"{world.local_size} processes on this machine, but {torch.cuda.device_count()} GPUs; NCCL needs one each: "
            "start fewer, or let them share by distributed.backend = gloo"
        )
    return "cpu:gloo,cuda:nccl"


def peers_are_lost(error: BaseException) -> bool:
    """Whether an error says no more than that other processes are gone, which is never the cause."""
    is_torchs = isinstance(error, dist.DistNetworkError | dist.DistStoreError)
    return is_torchs or (isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST))


def say_exit(code: int) -> str:
    """Returns how a process ended, in words, from what `multiprocessing` calls its exit code."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
