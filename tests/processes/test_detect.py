"""Detecting which process of a run this one is, from the variables that launchers set or from a process group."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from conftest import ToyRun

from shoal.config import load_run
from shoal.config.schema import LaunchConfig
from shoal.errors import UserError
from shoal.processes.detect import detect
from shoal.processes.slurm_lists import expand_hosts
from shoal.processes.world import World
from shoal.training import train

RANKS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
ELASTIC = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}


def test_without_variables_the_world_is_one_process() -> None:
    assert detect({}) == World()
    assert detect({"MASTER_ADDR": "somewhere", "WORLD_SIZE": "1"}) == World()


def test_torchruns_variables_give_a_rank() -> None:
    world = detect(RANKS)
    assert world == World(1, 4, 1, 4, "127.0.0.1", 1, environment="RANK and LOCAL_RANK")
    assert (world.node, world.on_one_machine, world.was_restarted) == (0, True, False)
    world = detect(RANKS | {"RANK": "3", "LOCAL_WORLD_SIZE": "2"})
    assert (world.rank, world.size, world.local_rank, world.local_size, world.node) == (3, 4, 1, 2, 1)
    assert not world.on_one_machine


def test_torchrun_and_shoals_launcher_give_attempt_and_job() -> None:
    world = detect(RANKS | ELASTIC)
    assert (world.launcher_keeps_board, world.launcher_pid) == (True, None)
    assert (world.attempt, world.attempt_name, world.was_restarted) == ((0, 0, 2), "none, start 2", True)
    assert world.job.startswith(f"torchrun {os.getppid()} on ")
    world = detect(RANKS | {"SHOAL_LAUNCHER": "11", "TORCHELASTIC_RUN_ID": "attempt 3", "SLURM_RESTART_COUNT": "1"})
    assert (world.launcher_pid, world.attempt) == (11, (1, 3, 0))
    assert world.job.startswith("launcher 11 on ")
    assert detect({"SLURM_JOB_ID": "7"}).job == "SLURM job 7"


def test_an_existing_process_group_is_noticed() -> None:
    assert detect({}).group == "to make"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert detect({}).group == "made"
    finally:
        dist.destroy_process_group()


def detect_without_variables(**variables: str) -> World:
    """Detects the world in the process group of the pool, with no launcher variables but these."""
    for name in RANKS:
        os.environ.pop(name)
    os.environ.pop("LOCAL_WORLD_SIZE")
    return detect(variables)


def test_ranks_come_from_the_process_group_if_there_are_no_variables(pool2: Any) -> None:
    for rank, world in enumerate(pool2.run(detect_without_variables)):
        assert (world.rank, world.size, world.local_rank, world.local_size) == (rank, 2, rank, 2)
        assert (world.group, world.on_one_machine) == ("made", True)
    for rank, world in enumerate(
        pool2.run(detect_without_variables, MASTER_ADDR="head", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    ):
        assert (world.rank, world.size, world.local_rank, world.local_size, world.node) == (rank, 2, 0, 1, rank)
        assert not world.on_one_machine


def train_in_group(config: Path) -> tuple[int, int]:
    detect_without_variables()
    step = train(load_run(config, ["training.global_batch_size=8"])).step
    return step, detect().size


def test_training_in_a_process_group_without_variables(toy: ToyRun, pool2: Any) -> None:
    """The ranks use the store of the group as their board: to wait for data, and for their watchdogs."""
    assert pool2.run(train_in_group, toy.config) == [(10, 2)] * 2
    assert {path.name for path in (toy.output / "logs").iterdir()} == {"rank_0.log", "rank_1.log"}


def test_the_launchers_of_several_machines() -> None:
    machine = {"MASTER_ADDR": "head", "MASTER_PORT": "29500", "NODE_RANK": "1"}
    alone = detect(machine, LaunchConfig(procs_per_node=2))
    assert (alone.size, alone.address, alone.starts) == (1, "127.0.0.1", 2)
    for variables, launch in (
        (machine | {"WORLD_SIZE": "4"}, LaunchConfig(nodes=2, procs_per_node=2)),
        (machine | {"WORLD_SIZE": "4"}, LaunchConfig(procs_per_node=2)),  # WORLD_SIZE counts processes
        ({}, LaunchConfig(nodes=2, procs_per_node=2, master_addr="head", master_port=29500, node_rank=1)),
        (machine, LaunchConfig(nodes="1:2", procs_per_node=2)),
    ):
        world = detect(variables, launch)
        assert (world.rank, world.size, world.starts) == (1, 2, 2)
        assert (world.address, world.port, world.environment) == ("head", 29500, "MASTER_ADDR and NODE_RANK")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ("n1",)),
        ("gpu[01-03,7],login", ("gpu01", "gpu02", "gpu03", "gpu7", "login")),
        ("r[1-2]n[08-09]x", ("r1n08x", "r1n09x", "r2n08x", "r2n09x")),
    ],
)
def test_lists_of_hosts_are_read_as_slurm_writes_them(text: str, hosts: tuple[str, ...]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "0"}, ["RANK=0: ", "no WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT;"]),
        ({"LOCAL_RANK": "0"}, ["LOCAL_RANK=0: ", "no RANK"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2: ", "no RANK"]),
        ({key: RANKS[key] for key in RANKS if key != "MASTER_PORT"}, ["no MASTER_PORT;"]),
        (RANKS | {"RANK": "4"}, ["RANK=4", "WORLD_SIZE=4"]),
        (RANKS | {"WORLD_SIZE": "four"}, ["WORLD_SIZE='four'"]),
        (RANKS | {"MASTER_PORT": ""}, ["MASTER_PORT=''"]),
        (RANKS | {"LOCAL_WORLD_SIZE": "two"}, ["LOCAL_WORLD_SIZE='two'"]),
    ],
)
def test_incomplete_or_wrong_variables_are_refused(environment: dict[str, str], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        detect(environment)
    for word in words:
        assert word in str(caught.value)
