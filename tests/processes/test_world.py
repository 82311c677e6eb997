from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist

from shoal.errors import UserError
from shoal.processes.world import World, choose_backend, keep_board, peers_are_lost

RANKS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}


def test_no_variables_are_one_process() -> None:
    assert World.from_environment({}) == World(0, 1, 0, 1)
    assert World.from_environment({"MASTER_ADDR": "somewhere", "WORLD_SIZE": "1"}) == World(0, 1, 0, 1)


def test_all_variables_are_a_rank() -> None:
    assert World.from_environment(RANKS) == World(1, 4, 1, 4)
    assert World.from_environment(RANKS | {"RANK": "3", "LOCAL_WORLD_SIZE": "2"}) == World(3, 4, 1, 2)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "0"}, ["RANK=0", "not WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"]),
        ({"LOCAL_RANK": "0"}, ["LOCAL_RANK=0", "not RANK"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "not RANK"]),
        ({key: RANKS[key] for key in RANKS if key != "MASTER_PORT"}, ["but not MASTER_PORT"]),
        (RANKS | {"RANK": "4"}, ["RANK=4", "WORLD_SIZE=4"]),
        (RANKS | {"WORLD_SIZE": "four"}, ["WORLD_SIZE='four'"]),
        (RANKS | {"MASTER_PORT": ""}, ["MASTER_PORT=''"]),
    ],
)
def test_some_variables_are_a_mistake(environment: dict[str, str], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        World.from_environment(environment)
    for word in words:
        assert word in str(caught.value)


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


def test_a_lost_peer_is_told_from_a_cause() -> None:
    assert peers_are_lost(RuntimeError("[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:9"))
    assert peers_are_lost(dist.DistNetworkError("the store is gone"))
    assert not peers_are_lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not peers_are_lost(ConnectionResetError("Connection reset by peer"))  # the user's own connection


def test_backends() -> None:
    cpu = torch.device("cpu")
    assert choose_backend("auto", cpu, World(0, 2, 0, 2)) == "gloo"
    with pytest.raises(UserError, match=r"distributed\.backend = nccl"):
        choose_backend("nccl", cpu, World(0, 2, 0, 2))
