"""The store that processes share: opening it, and tasks that one process does for all."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
import torch.distributed as dist

from shoal.errors import UserError
from shoal.processes.board import once_per_node, open_board
from shoal.processes.detect import detect


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
