"""`distributed.strategy: ddp_spawn`: ddp in processes that the training process starts itself."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from conftest import ToyRun
from launched import Launched, tensors

from shoal.config import load_run
from shoal.config.layout import layout_of
from shoal.errors import UserError
from shoal.processes.world import World
from shoal.training.preflight import check_world

SPAWN, TWO = "distributed.strategy=ddp_spawn", "launch.procs_per_node=2"


def test_the_layout_is_that_of_ddp(toy: ToyRun) -> None:
    configs = [load_run(toy.config, [f"distributed.strategy={name}"]).config for name in ("ddp", "ddp_spawn")]
    ddp, spawned = (layout_of(config.training, config.distributed, 2, 2, False) for config in configs)
    assert ddp == spawned


def test_processes_of_another_launcher_are_refused(toy: ToyRun) -> None:
    run = load_run(toy.config, [SPAWN])
    with pytest.raises(UserError, match="ddp_spawn: torchrun has started the processes already; use ddp"):
        check_world(run, World(0, 2, 0, 2, environment="torchrun"))
    check_world(run, World(0, 2, 0, 2, environment="spawned from Python"))
    check_world(run, World())


def test_several_machines_are_refused(toy: ToyRun) -> None:
    place = ("launch.nodes=2", "launch.master_addr=127.0.0.1", "launch.master_port=1", "launch.node_rank=0")
    result = toy.call("train", "run.yaml", SPAWN, TWO, *place, "distributed.init_timeout=1")
    assert result.returncode == 2
    assert "launch.nodes = 2: Python starts processes on this machine only" in result.stderr


@pytest.mark.slow
def test_the_command_trains_in_its_own_processes(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    same = ("model.dropout=0.0", "training.global_batch_size=8")
    with Launched(toy, SPAWN, TWO, *same) as run:
        assert run.wait() == 0, run.err
        assert run.nothing_left()
    assert re.search(r"started by +spawned from Python, 2 processes on 1 machine", run.out)
    assert "finished at step 10" in run.out
    other = toy.folder / "launched"
    with Launched(toy, TWO, *same, f"experiment.output_dir={other}") as run:
        assert run.wait() == 0, run.err
    assert tensors(toy.output, 10) == tensors(other, 10)
    change_recipe('batch["y"]', 'batch["nothing"]')
    with Launched(toy, SPAWN, TWO, *same, f"experiment.output_dir={toy.folder}/third") as run:
        assert run.wait() == 2
    assert "toy_recipe.py" in run.err
    assert "KeyError: 'nothing'" in run.err
    assert run.err.count("\n") == 1
