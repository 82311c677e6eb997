"""The process group: backend, joining and leaving, and a group for CPU tensors."""

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
from shoal.processes.group import choose_backend, cpu_group, is_lost_peer_error
from shoal.processes.world import World


def test_errors_of_a_lost_peer_are_recognised() -> None:
    assert is_lost_peer_error(
        RuntimeError("[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:9")
    )
    assert is_lost_peer_error(dist.DistNetworkError("the store is gone"))
    assert not is_lost_peer_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_lost_peer_error(
        ConnectionResetError("Connection reset by peer")
    )  # this may be a connection of the user's code


def test_the_backend_follows_the_device() -> None:
    cpu = torch.device("cpu")
    assert choose_backend("auto", cpu, World(0, 2)) == "gloo"
    with pytest.raises(UserError, match=r"distributed\.backend = nccl"):
        choose_backend("nccl", cpu, World(0, 2))


def use_cpu_group(backend: str) -> tuple[bool, bool, int]:
    """Returns whether CPU tensors need another group than the default, whether it is made once, and a maximum."""
    dist.init_process_group(backend)
    group = cpu_group()
    # Not set up: a mesh of CPUs would itself need a group for CPU tensors.
    strategy = shoal.strategies.DDPStrategy(device="cpu")
    return group is not None, group is cpu_group(), strategy.max_over_ranks(10 + dist.get_rank())


def test_a_group_without_a_cpu_backend_gets_a_gloo_group(pool2: Any) -> None:
    assert pool2.run(use_cpu_group, "gloo", init=False) == [(False, True, 11)] * 2
    assert (
        pool2.run(use_cpu_group, "cuda:gloo", init=False) == [(True, True, 11)] * 2
    )  # no CPU backend, like NCCL alone


def test_torchs_fake_backend_needs_no_other_group() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        assert cpu_group() is None
    finally:
        dist.destroy_process_group()


def leaves_its_group(preset: str) -> bool:
    with getattr(shoal.strategies, preset)(device="cpu") as strategy:
        strategy.barrier()
    return not dist.is_initialized()


def join_again() -> list[int]:
    """Joins twice. Rank 0 joins again sooner, and must not read what rank 1 wrote for the first group."""
    totals = []
    for delay in (0, 0.5):
        time.sleep(delay * int(os.environ["RANK"]))
        with shoal.strategies.DDPStrategy(device="cpu") as strategy:
            totals.append(int(strategy.sum_over_data(torch.tensor(1 + strategy.rank))))
    return totals


def test_processes_can_join_again(pool2: Any) -> None:
    assert pool2.run(join_again, init=False) == [[3, 3]] * 2


@pytest.mark.parametrize("preset", ["DDPStrategy", "FSDPStrategy"])
def test_strategies_destroy_only_groups_that_they_made(pool2: Any, preset: str) -> None:
    assert pool2.run(leaves_its_group, preset, init=False) == [True, True]
    assert pool2.run(leaves_its_group, preset) == [False, False]


def plain_functions_leave_their_group() -> bool:
    shoal.distributed.setup_distributed(device="cpu")
    shoal.distributed.wrap_model_ddp(torch.nn.Linear(1, 1))
    shoal.distributed.cleanup_distributed()
    return not dist.is_initialized()


def test_plain_functions_destroy_only_groups_that_they_made(pool2: Any) -> None:
    assert pool2.run(plain_functions_leave_their_group, init=False) == [True, True]
    assert pool2.run(plain_functions_leave_their_group) == [False, False]
