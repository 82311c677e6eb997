"""Processes that SLURM, MPI or a PyTorchJob would start, without them: each finds the others by its variables."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import ToyRun
from launched import Launched
from ports import free_port
from test_launch import SAME, assert_same_weights

pytestmark = pytest.mark.slow


def slurm(rank: int) -> dict[str, str]:
    step = {"JOB_ID": "7", "STEP_ID": "0", "STEP_NUM_TASKS": "2", "STEP_TASKS_PER_NODE": "2", "STEP_NODELIST": "here"}
    return {f"SLURM_{name}": value for name, value in {**step, "PROCID": f"{rank}", "LOCALID": f"{rank}"}.items()} | {
        "SLURM_NODEID": "0"
    }


def mpi(rank: int) -> dict[str, str]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "SIZE": 2, "LOCAL_SIZE": 2}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()}


def pod(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "PET_NNODES": "2"}


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        (slurm, "SLURM, 2 processes on 1 machine"),
        (mpi, "MPI, 2 processes on 1 machine"),
        (pod, "Kubeflow, 2 processes on 2 machines"),
    ],
)
def test_two_tasks_train_one_run(toy: ToyRun, variables: Callable[[int], dict[str, str]], name: str) -> None:
    port = {"MASTER_PORT": str(free_port())}
    with (
        Launched(toy, *SAME, **variables(1), **port) as second,
        Launched(toy, *SAME, **variables(0), **port) as first,
    ):
        assert (first.wait(), second.wait()) == (0, 0), first.err + second.err
    assert (second.out, second.err) == ("", "")
    assert f"started by   {name}\n" in first.out
    assert_same_weights(toy)


def test_tasks_with_different_configs_end_with_one_line(toy: ToyRun) -> None:
    port = {"MASTER_PORT": str(free_port())}
    with (
        Launched(toy, *SAME, **pod(0), **port) as first,
        Launched(toy, *SAME, "training.learning_rate=0.5", **pod(1), **port) as second,
    ):
        assert (first.wait(), second.wait()) == (2, 2)
    assert second.err.startswith("shoal: error: training.learning_rate = 0.5 on this machine")
    assert first.err.startswith("shoal: error: rank 1 (node 1): training.learning_rate = 0.5 on this machine")
    for run in (first, second):
        assert "has 0.01; use the same config on every machine" in run.err
        assert run.err.count("\n") == 1
