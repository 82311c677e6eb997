from __future__ import annotations

import socket
import time
from typing import Any

import pytest
import torch.distributed as dist

from shoal.errors import UserError
from shoal.processes.board import keep_board, once_per_node
from shoal.processes.detect import detect


def test_a_board_on_loopback_is_shared_in_its_process() -> None:
    board = keep_board("127.0.0.1", 0, loopback_only=True)
    board.set("word", "left")
    torchs_own = dist.TCPStore("127.0.0.1", board.port, is_master=True, multi_tenant=True, wait_for_workers=False)
    assert torchs_own.get("word") == b"left"


@pytest.mark.parametrize("loopback_only", [True, False])
def test_a_port_that_is_taken(loopback_only: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        with pytest.raises(UserError, match=f"MASTER_PORT={port}.*in use"):
            keep_board("127.0.0.1", port, loopback_only)


def take_a_while() -> None:
    time.sleep(0.3)


def wait_twice() -> list[bool]:
    """Returns, for each of two times, whether this process went on only after the task."""
    done: list[bool] = []
    for _ in range(2):
        began = time.monotonic()
        once_per_node(detect(), take_a_while)
        done.append(time.monotonic() - began > 0.2)
        dist.barrier()
    return done


def test_a_task_of_one_process_is_waited_for_each_time(pool2: Any) -> None:
    assert pool2.run(wait_twice) == [[True, True]] * 2
