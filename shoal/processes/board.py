"""The board: a key-value store (torch's TCPStore) that the processes of a run share with their launcher."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from shoal.errors import UserError
from shoal.processes.world import LOOPBACK, World

HANG_REPORT = "hang report of {}"
"""The key of an attempt's hang report, which is JSON: `who` names the ranks that did not arrive, and `silent` lists
(machine, process id) of all processes that no longer answer."""


_OPENED_BY_SHOAL = "opened by shoal"
"""The key that every board has which `open_board` has opened. The stores of other programs do not have it."""

_ANSWER_SECONDS = 60.0
"""How long something that listens may take to answer as a board does. A board answers at once."""


REMINDER_SECONDS = 15
"""How often the user is told whom a process waits for."""


def connect_to_board(
    world: World, timeout_seconds: float = 300, remind: Callable[[str], None] = lambda line: None
) -> Any:
    """Returns this process's connection to the board. Rank 0 opens the board, unless the launcher has.

    The other ranks wait up to `timeout_seconds` for it, and raise UserError if there is none; meanwhile `remind` gets a
    line every 15 seconds. If somebody else made the process group, the board is the store of that group.
    """
    if world.group == "made":
        from shoal.torch_private import default_store  # here, because a launcher does not need it and it imports much

        return default_store()
    if world.rank == 0 and not world.launcher_keeps_board:
        if world.environment != "Kubeflow":  # there the address is that of a service
            _check_own_address(world)
        return _opened_board(world.address, world.port, world.on_one_machine)
    place = (world.address, world.port)
    if place not in _found_boards:
        # A launcher other than shoal's, such as torchrun, opens a store without the key.
        board = _find_board(*place, timeout_seconds, not world.launcher_keeps_board, remind)
        _found_boards.clear()
        _found_boards[place] = board
    return _found_boards[place]


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
    # With multi_tenant, code that asks torch for a store at this port, as `env://` does, gets this one.
    board = dist.TCPStore(  # type: ignore[attr-defined]
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
    board.set(_OPENED_BY_SHOAL, "")
    return board


_opened_board = cache(open_board)  # stays open until the process ends, because other processes may still read it


_found_boards: dict[tuple[str, int], Any] = {}
"""The connection to the board that another process keeps, by address and port: one for each process."""


def _check_own_address(world: World) -> None:
    """Raises UserError if the address at which rank 0 should open the board does not lead to this machine."""
    if world.address in LOOPBACK:
        return
    try:
        addresses = {(info[0], info[4][0]) for info in socket.getaddrinfo(world.address, None)}
    except OSError as error:
        raise UserError(
            f"MASTER_ADDR = {world.address}: it cannot be resolved ({error.strerror}); use an address of this machine, "
            "which comes first"
        ) from None
    for family, address in addresses:
        with suppress(OSError), socket.socket(family) as probe:
            probe.bind((address, 0))  # works for addresses of this machine alone
            return
    if _leads_back(world.address, world.port):  # an address of the host of this container, for example
        return
    raise UserError(
        f"MASTER_ADDR = {world.address}: it leads to another machine, but this one ({socket.gethostname()}) is first; "
        "use an address of this machine, or correct NODE_RANK"
    )


def _leads_back(address: str, port: int, timeout_seconds: float = 2.0) -> bool:
    """Returns whether connections to an address arrive at this machine."""
    token, deadline = os.urandom(16), time.monotonic() + timeout_seconds
    with (
        suppress(OSError),
        socket.create_server(("", port)) as listener,
        socket.create_connection((address, port), timeout_seconds) as probe,
    ):
        probe.sendall(token)
        while (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            with listener.accept()[0] as connection:  # of the probe, or of a rank that looks for the board
                connection.settimeout(left)
                if connection.recv(len(token)) == token:
                    return True
    return False


def _find_board(
    address: str, port: int, timeout_seconds: float, opened_by_shoal: bool, remind: Callable[[str], None]
) -> Any:
    """Connects to the board that another process keeps. Raises UserError if there is none within the timeout."""
    began = time.monotonic()
    deadline, reminder = began + timeout_seconds, began + REMINDER_SECONDS
    problem = "cannot be connected to"
    board = None
    # torch prints pages for each failed attempt, so it is asked only once something listens.
    while (reason := _why_unreachable(address, port)) and time.monotonic() < deadline:
        if time.monotonic() >= reminder:
            reminder += REMINDER_SECONDS
            remind(
                f"waiting for the first machine at MASTER_ADDR = {address}, MASTER_PORT = {port} for "
                f"{time.monotonic() - began:.0f} s ({reason}; until distributed.init_timeout = {timeout_seconds:g} s)"
            )
        time.sleep(0.05)
    if not reason:
        problem = "what listens there is not the board of a shoal run"
        deadline = min(deadline, time.monotonic() + _ANSWER_SECONDS)
        board = _connect_store(address, port, deadline)
    while board is not None:
        if not opened_by_shoal or board.check([_OPENED_BY_SHOAL]):
            board.set_timeout(timedelta(seconds=timeout_seconds))
            return board
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    raise UserError(
        f"MASTER_ADDR = {address}, MASTER_PORT = {port}: {problem} (distributed.init_timeout = {timeout_seconds:g} s); "
        "run the same command on every machine, with the address and a free port of the first machine"
    )


def _why_unreachable(address: str, port: int) -> str:
    """Returns why a connection to an address cannot be opened; an empty text if it can."""
    try:
        with socket.create_connection((address, port), timeout=1):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _connect_store(address: str, port: int, deadline: float) -> Any:
    """Returns torch's connection to a store, or None if what listens does not answer like one before the deadline."""
    stores: list[Any] = []

    def connect(timeout_seconds: float) -> None:
        with suppress(dist.DistError, ValueError):
            timeout = timedelta(seconds=timeout_seconds)
            stores.append(dist.TCPStore(address, port, wait_for_workers=False, timeout=timeout))  # type: ignore[attr-defined]

    # torch waits forever for a program that accepts the connection and says nothing, so a thread does the waiting.
    # torch's own timeout is shorter than the wait for the thread: what it prints at its end is hidden too.
    left = max(1.0, deadline - time.monotonic())
    thread = threading.Thread(target=connect, args=(left / 2,), name="connecting to the board", daemon=True)
    with _hidden_stderr():
        thread.start()
        thread.join(left)
    return stores[0] if stores else None


@contextmanager
def _hidden_stderr() -> Iterator[None]:
    """Discards what C++ code prints to standard error: torch prints a stack for each failed attempt to connect."""
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)
