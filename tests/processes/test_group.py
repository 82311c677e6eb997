from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import shoal.distributed
import shoal.strategies
from shoal.errors import UserError
from shoal.processes.group import choose_backend, cpu_group, peers_are_lost
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


def reduce_cpu_tensors(backend: str) -> tuple[bool, bool, int]:
    """Returns whether CPU tensors need another group than the default one, whether it is made once, and a maximum."""
    dist.init_process_group(backend)
    group = cpu_group()
    # Not set up: a mesh of CPUs would itself need a group for CPU tensors.
    strategy = shoal.strategies.DDPStrategy(device="cpu")
    return group is not None, group is cpu_group(), strategy.max_over_ranks(10 + dist.get_rank())


def test_a_group_that_takes_no_cpu_tensors_gets_one_beside_it(pool2: Any) -> None:
    assert pool2.run(reduce_cpu_tensors, "gloo", init=False) == [(False, True, 11)] * 2
    assert pool2.run(reduce_cpu_tensors, "cuda:gloo", init=False) == [(True, True, 11)] * 2  # as of NCCL alone


def test_an_imagined_group_takes_cpu_tensors() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        assert cpu_group() is None
    finally:
        dist.destroy_process_group()


def is_left(preset: str) -> bool:
    with getattr(shoal.strategies, preset)(device="cpu") as strategy:
        strategy.barrier()
    return not dist.is_initialized()


def join_again() -> list[int]:
    """Rank 0 comes back sooner, and must not go by what rank 1 had left for the group before."""
    totals = []
    for delay in (0, 0.5):
        time.sleep(delay * int(os.environ["RANK"]))
        with shoal.strategies.DDPStrategy(device="cpu") as strategy:
            totals.append(int(strategy.sum_over_data(torch.tensor(1 + strategy.rank))))
    return totals


def test_processes_that_left_a_group_join_another(pool2: Any) -> None:
    assert pool2.run(join_again, init=False) == [[3, 3]] * 2


@pytest.mark.parametrize("preset", ["DDPStrategy", "FSDPStrategy"])
def test_strategies_leave_the_group_that_they_made_and_no_other(pool2: Any, preset: str) -> None:
    assert pool2.run(is_left, preset, init=False) == [True, True]
    assert pool2.run(is_left, preset) == [False, False]


def leave_by_functions() -> bool:
    shoal.distributed.setup_distributed(device="cpu")
    shoal.distributed.wrap_model_ddp(torch.nn.Linear(1, 1))
    shoal.distributed.cleanup_distributed()
    return not dist.is_initialized()


def test_plain_functions_leave_the_group_that_they_made_and_no_other(pool2: Any) -> None:
    assert pool2.run(leave_by_functions, init=False) == [True, True]
    assert pool2.run(leave_by_functions) == [False, False]
