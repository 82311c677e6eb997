"""The process group of a run: its backend, joining and leaving it, and recognising that a peer was lost."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist

from shoal.errors import UserError
from shoal.processes.board import board_section
from shoal.processes.world import World

LOST_PEERS_EXIT_CODE = 75
"""The exit code of a process that ended only because another one died or hung."""

_LOST_PEER_MESSAGES = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "Connection refused",
    "Timed out waiting",
    "pair closure",
    "remote process exited or there was a network error",  # NCCL
)


def join(world: World, device: torch.device, backend: str, timeout_seconds: float) -> None:
    """Makes the default process group, unless there is one already."""
    if dist.is_initialized():
        return
    if world.on_one_machine:  # then other machines must not be able to connect
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # the older name
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # what a hang's message is made of; torch's own default
    alone = world.size == 1  # then no port is opened
    dist.init_process_group(
        backend,
        store=dist.HashStore() if alone else board_section(world, "process group"),  # type: ignore[attr-defined]
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if "nccl" in backend and not alone else None,
    )


def leave(world: World) -> None:
    """Destroys the process groups if `join` made them; those that somebody else made stay."""
    if world.group == "to make" and dist.is_initialized():
        dist.destroy_process_group()


def cpu_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup | None:
    """Returns a process group for CPU tensors that has the ranks of `group`. None means the default group, as in torch.

    It is `group` itself if that has a backend for CPU tensors. Somebody else may have made it with NCCL alone: then a
    gloo group of the same ranks is made once, and all of them must call this together.
    """
    return group if "cpu:" in dist.get_backend_config(group) else _gloo_group(group or dist.group.WORLD)


@cache
def _gloo_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    return dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)


def start_max(number: int) -> Callable[[], int]:
    """Sends a number to all ranks while this one goes on; the function that is returned waits for the highest.

    It is sent as a CPU tensor, so that no device is waited for.
    """
    highest = torch.tensor(number)
    work = dist.all_reduce(highest, dist.ReduceOp.MAX, group=cpu_group(), async_op=True)

    def wait() -> int:
        work.wait()
        return int(highest)

    return wait


def choose_backend(requested: str, device: torch.device, world: World) -> str:
    """Returns torch's name of the backend: gloo for CPU tensors, NCCL for CUDA tensors.

    Raises UserError for NCCL without CUDA, and if ranks would share a GPU, which NCCL does not support.
    """
    on_cuda = device.type == "cuda"
    if requested == "nccl" and not on_cuda:
        raise UserError(
            f"distributed.backend = nccl: it needs a CUDA device, and the run is on {device.type}; use auto"
        )
    if requested == "gloo" or not on_cuda:
        return "gloo"
    if world.local_size > torch.cuda.device_count():
        raise UserError(
            f"distributed.backend = {requested}: NCCL needs one GPU for each process, and this machine has "
            f"{torch.cuda.device_count()} for {world.local_size}; start fewer, or use distributed.backend = gloo"
        )
    return "cpu:gloo,cuda:nccl"


def is_lost_peer_error(error: BaseException) -> bool:
    """Returns True if an error only says that other processes are gone, so that the cause is elsewhere."""
    is_store_error = isinstance(error, dist.DistNetworkError | dist.DistStoreError)
    return is_store_error or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST_PEER_MESSAGES)
    )


def describe_exit(code: int) -> str:
    """Returns in words how a process ended. `code` is negative for a signal, as in `multiprocessing`."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
