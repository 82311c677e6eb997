"""The board: a key-value store (torch's TCPStore) that the processes of a run share with their launcher."""

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

HANG_REPORT = "hang report of {}"
"""The key of an attempt's hang report, which is JSON: `who` names the ranks that did not arrive, and `silent` lists
(machine, process id) of all processes that no longer answer."""


def connect_to_board(world: World, timeout_seconds: float = 300) -> Any:
    """Returns this process's connection to the board. Rank 0 opens the board, unless the launcher has.

    The other ranks wait up to `timeout_seconds` for it. If somebody else made the process group, the board is the
    store of that group.
    """
    if world.group == "made":
        return default_store()
    if world.rank == 0 and not world.launcher_keeps_board:
        return _opened_board(world.address, world.port, world.on_one_machine)
    return _found_board(world.address, world.port, timeout_seconds)


def board_section(world: World, purpose: str) -> Any:
    """Returns a part of the board that only the ranks of this attempt use, and only for `purpose`.

    Every call returns an empty part, so no rank reads entries of a dead attempt, or of an earlier run in the same
    processes. All ranks must call this equally often.
    """
    board, prefix = connect_to_board(world), f"{world.attempt_name}, {purpose}"
    calls = board.add(f"{prefix}, calls by rank {world.rank}", 1)
    return dist.PrefixStore(f"{prefix} {calls}", board)  # type: ignore[attr-defined]


def once_per_node(world: World, task: Callable[[], None]) -> None:
    """Runs `task` in one process of each machine. The other processes wait until it is done, without a time limit."""
    if world.size == 1 or world.group == "imagined":
        task()
        return
    board, done = board_section(world, task.__qualname__), f"done on node {world.node}"
    if world.local_rank == 0:
        task()
        board.set(done, "yes")
    else:
        while not board.check([done]):  # torch's `wait` would not let Python handle signals
            time.sleep(0.05)


def open_board(address: str, port: int, loopback_only: bool) -> Any:
    """Opens a board for other processes; port 0 takes any free port.

    `loopback_only` hides it from other machines; torch by itself would listen on every interface.
    """
    dual_stack = not loopback_only and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual_stack or ":" in address else socket.AF_INET
    listen_address = (address if loopback_only else "", port)
    try:
        listener = socket.create_server(listen_address, family=family, dualstack_ipv6=dual_stack)
    except OSError as error:
        raise UserError(
            f"MASTER_PORT = {port}: this machine cannot listen on it ({error.strerror}); choose another port"
        ) from None
    # With multi_tenant, torch's launcher in the same process uses this store instead of opening its own.
    return dist.TCPStore(  # type: ignore[attr-defined]
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


_opened_board = cache(open_board)  # stays open until the process ends, because other processes may still read it


@lru_cache(maxsize=1)  # one connection per process, however often it is asked for
def _found_board(address: str, port: int, timeout_seconds: float) -> Any:
    timeout = timedelta(seconds=timeout_seconds)
    return dist.TCPStore(address, port, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]
