"""Ranks that another launcher has started: rank 0 names those that do not come, and machines compare their configs."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest
from conftest import ToyRun

from shoal.config import load_run
from shoal.errors import UserError
from shoal.launch import worker
from shoal.launch.cards import card_of
from shoal.launch.worker import call_the_roll
from shoal.processes.board import connect_to_board
from shoal.processes.world import World


def world_of_two() -> World:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return World(0, 2, 0, 1, "127.0.0.1", port, hosts=("gpu01", "gpu02"), run_id=f"at {port}")


def test_missing_ranks_are_named_with_their_machines(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "REMINDER_SECONDS", 0.1)
    lines: list[str] = []
    run = load_run(toy.config, ["distributed.init_timeout=0.35"])
    with pytest.raises(UserError) as refused:
        call_the_roll(run, world_of_two(), lines.append)
    limit = "distributed.init_timeout = 0.35 s"
    assert f"WORLD_SIZE=2: rank 1 (node 1, gpu02) did not come within {limit}" in str(refused.value)
    assert lines
    assert all(line.startswith("waiting for rank 1 (node 1, gpu02) for 0 s") for line in lines)


def test_a_machine_with_another_config_is_refused_before_the_first_step(toy: ToyRun) -> None:
    world = world_of_two()
    board = connect_to_board(world)
    board.set(f"{world.attempt_name}, roll 1/card", card_of(load_run(toy.config, [])).to_json())
    other = replace(world, rank=1, launcher_keeps_board=True)
    call_the_roll(load_run(toy.config, ["launch.node_rank=1"]), other, lambda line: None)
    board.set(f"{world.attempt_name}, roll 2/card", card_of(load_run(toy.config, [])).to_json())
    with pytest.raises(UserError, match=r"experiment.seed = 5 on this machine .* has 0; use the same config"):
        call_the_roll(load_run(toy.config, ["experiment.seed=5"]), other, lambda line: None)
