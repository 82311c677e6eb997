"""The store that processes share: opening it, and tasks that one process does for all."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from shoal.errors import UserError
from shoal.processes.board import _leads_back, connect_to_board, once_per_node, open_board
from shoal.processes.detect import detect
from shoal.processes.world import World


def test_torch_uses_an_open_board_of_the_same_process() -> None:
    board = open_board("127.0.0.1", 0, loopback_only=True)
    board.set("key", "value")
    torch_store = dist.TCPStore("127.0.0.1", board.port, is_master=True, multi_tenant=True, wait_for_workers=False)
    assert torch_store.get("key") == b"value"


@pytest.mark.parametrize("loopback_only", [True, False])
def test_a_port_that_is_in_use_is_refused(loopback_only: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        with pytest.raises(UserError, match=f"MASTER_PORT = {port}: .*in use"):
            open_board("127.0.0.1", port, loopback_only)


def slow_task() -> None:
    time.sleep(0.3)


def wait_twice() -> list[bool]:
    """Returns, for each of two calls, whether this process waited until the task was done."""
    waited: list[bool] = []
    for _ in range(2):
        began = time.monotonic()
        once_per_node(detect(), slow_task)
        waited.append(time.monotonic() - began > 0.2)
        dist.barrier()
    return waited


def test_a_task_of_one_process_is_waited_for_each_time(pool2: Any) -> None:
    assert pool2.run(wait_twice) == [[True, True]] * 2


@contextlib.contextmanager
def listener(kind: str) -> Iterator[int]:
    """Yields a port on which nothing, or something other than a board, listens."""
    if kind == "a store of another program":
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield store.port
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            with contextlib.suppress(OSError):  # the server was closed
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(10)
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        if kind == "nothing":
            server.close()
        if kind == "a web server":
            threading.Thread(target=answer, daemon=True).start()
        yield port
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts connections


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("nothing", "cannot be connected to"),
        ("a web server", "what listens there is not the board of a shoal run"),
        ("a store of another program", "what listens there is not the board of a shoal run"),
    ],
)
def test_a_wrong_address_is_named_within_the_timeout(kind: str, problem: str) -> None:
    """tests/launch has a program that says nothing, for which torch would wait forever."""
    with listener(kind) as port, pytest.raises(UserError) as refused:
        connect_to_board(World(1, 2, address="127.0.0.1", port=port), timeout_seconds=1)
    text = str(refused.value)
    assert text.startswith(f"MASTER_ADDR = 127.0.0.1, MASTER_PORT = {port}: {problem}")
    assert "(distributed.init_timeout = 1 s); run the same command" in text


def test_a_board_that_is_opened_later_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    boards: list[Any] = []
    opener = threading.Timer(0.3, lambda: boards.append(open_board("127.0.0.1", port, loopback_only=True)))
    opener.start()
    found = connect_to_board(World(1, 2, address="127.0.0.1", port=port), timeout_seconds=60)
    opener.join()
    boards[0].set("key", "value")
    assert found.get("key") == b"value"


def test_whom_a_process_waits_for_is_said_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.processes.board.REMINDER_SECONDS", 0.1)
    lines: list[str] = []
    with listener("nothing") as port, pytest.raises(UserError):
        connect_to_board(World(1, 2, address="127.0.0.1", port=port), 0.5, lines.append)
    said = f"waiting for the first machine at MASTER_ADDR = 127.0.0.1, MASTER_PORT = {port} for 0 s (Connection refused"
    assert lines
    assert all(line.startswith(said) for line in lines)


def test_an_address_that_leads_back_is_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    assert _leads_back("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)):
        assert not _leads_back("127.0.0.1", port), "it leads to another program"


@pytest.mark.parametrize(
    ("address", "problem"),
    [("192.0.2.1", "it leads to another machine"), ("no-such-host.invalid", "it cannot be resolved")],
)
def test_rank_0_refuses_an_address_that_is_not_its_own(address: str, problem: str) -> None:
    with pytest.raises(UserError, match=f"MASTER_ADDR = {address}: {problem}"):
        connect_to_board(World(0, 2, address=address, port=1))
