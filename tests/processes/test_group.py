from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shoal.errors import UserError
from shoal.processes.group import choose_backend, peers_are_lost
from shoal.processes.world import World


def test_a_lost_peer_is_told_from_a_cause() -> None:
    assert peers_are_lost(RuntimeError("[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:9"))
    assert peers_are_lost(dist.DistNetworkError("the store is gone"))
    assert not peers_are_lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not peers_are_lost(ConnectionResetError("Connection reset by peer"))  # the user's own connection


def test_backends() -> None:
    cpu = torch.device("cpu")
    assert choose_backend("auto", cpu, World(0, 2)) == "gloo"
    with pytest.raises(UserError, match=r"distributed\.backend = nccl"):
        choose_backend("nccl", cpu, World(0, 2))
