"""The board: a store where the processes of a run, and their launcher, leave word for each other."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache, lru_cache
from typing import Any

import torch.distributed as dist

from shoal.errors import UserError
from shoal.processes.world import World
from shoal.torch_private import default_store

HUNG = "hung in {}"
"""On the board, for an attempt: `who` the others waited for in vain, and the processes that are `silent`, in JSON."""


def board_of(world: World, timeout_seconds: float = 300) -> Any:
    """Returns this process's connection to the board, which rank 0 opens unless the launcher has.

    The others wait for it to come up. Where somebody else made the process group, the board is the store by which its
    ranks have found each other.
    """
    if world.group == "made":
        return default_store()
    if world.rank == 0 and not world.launcher_keeps_board:
        return _kept_board(world.address, world.port, world.on_one_machine)
    return _found_board(world.address, world.port, timeout_seconds)


def store_of(world: World, purpose: str) -> Any:
    """Returns the board with names of its own for `purpose`, in every attempt of a launcher and at every call.

    Ranks would otherwise read what the dead have left there, or what an earlier run in the same processes has. All
    ranks have to call this equally often.
    """
    board, name = board_of(world), f"{world.attempt_name}, {purpose}"
    calls = board.add(f"{name}, calls by rank {world.rank}", 1)
    return dist.PrefixStore(f"{name} {calls}", board)  # type: ignore[attr-defined]


def once_per_node(world: World, task: Callable[[], None]) -> None:
    """Runs `task` in one process of each machine while the others wait, however long it takes."""
    if world.size == 1 or world.group == "imagined":
        task()
        return
    store, done = store_of(world, task.__qualname__), f"done on node {world.node}"
    if world.local_rank == 0:
        task()
        store.set(done, "yes")
    else:
        while not store.check([done]):  # torch's `wait` would not hear a signal
            time.sleep(0.05)


def keep_board(address: str, port: int, loopback_only: bool) -> Any:
    """Opens a board to others; port 0 takes a free one. Left to itself torch would listen on every interface."""
    both_families = not loopback_only and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both_families or ":" in address else socket.AF_INET
    place = (address if loopback_only else "", port)
    try:
        listener = socket.create_server(place, family=family, dualstack_ipv6=both_families)
    except OSError as error:
        raise UserError(
            f"MASTER_PORT={port} cannot be used on this machine: {error.strerror}; choose another"
        ) from None
    # Multi-tenant: torch's own launcher, in the same process, then takes this one instead of making another.
    return dist.TCPStore(  # type: ignore[attr-defined]
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


_kept_board = cache(keep_board)  # stays open until the process ends: others may still look there


@lru_cache(maxsize=1)  # a process has one world, however often it asks
def _found_board(address: str, port: int, timeout_seconds: float) -> Any:
    timeout = timedelta(seconds=timeout_seconds)
    return dist.TCPStore(address, port, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]
