"""Environments in which a run cannot work: each ends at once, with one line that names the variable or key."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import pytest
from conftest import ToyRun

from shoal.config.schema import LaunchConfig
from shoal.processes.detect import detect

RANKS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
NODE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "0"}
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_STEP_NODELIST": "gpu[01-02]",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
POD = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "head",
    "PET_MASTER_PORT": "29500",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
TWO_NODES, TWO, FOUR = "launch.nodes=2", "launch.procs_per_node=2", "launch.procs_per_node=4"


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


WRONG: dict[str, tuple[dict[str, str], list[str], list[str]]] = {
    "only a rank": ({"RANK": "0"}, [], ["RANK=0: the environment has no WORLD_SIZE"]),
    "only a local rank": ({"LOCAL_RANK": "0"}, [], ["LOCAL_RANK=0: the environment has no RANK"]),
    "only a size": ({"WORLD_SIZE": "2"}, [], ["WORLD_SIZE=2: the environment has no RANK"]),
    "no port": (without(RANKS, "MASTER_PORT"), [], ["the environment has no MASTER_PORT"]),
    "a rank too high": (RANKS | {"RANK": "4"}, [], ["RANK=4: it must be below WORLD_SIZE=4"]),
    "a local rank too high": (RANKS | {"LOCAL_WORLD_SIZE": "1"}, [], ["LOCAL_RANK=1: it must be below LOCAL_WORLD_"]),
    "uneven machines": (RANKS | {"LOCAL_WORLD_SIZE": "3"}, [], ["WORLD_SIZE=4: it is not a multiple of LOCAL_WORLD_"]),
    "a size in words": (RANKS | {"WORLD_SIZE": "four"}, [], ["WORLD_SIZE='four'"]),
    "a port too high": (RANKS | {"MASTER_PORT": "70000"}, [], ["MASTER_PORT=70000", "65535"]),
    "nodes without a master": ({}, [TWO_NODES], ["launch.nodes = 2", "no MASTER_ADDR, MASTER_PORT, NODE_RANK"]),
    "a node too high": (NODE | {"NODE_RANK": "2"}, [TWO_NODES], ["NODE_RANK=2: it must be below launch.nodes = 2"]),
    "a remainder": (NODE | {"WORLD_SIZE": "5"}, [TWO], ["WORLD_SIZE=5", "not a multiple of launch.procs_per_node = 2"]),
    "another size": (NODE | {"WORLD_SIZE": "2"}, [TWO_NODES, TWO], ["WORLD_SIZE=2", "2 × launch.procs_per_node 2 = 4"]),
    "a port that is taken": (NODE | {"MASTER_PORT": "TAKEN"}, [TWO_NODES], ["MASTER_PORT = ", "in use"]),
    "a master elsewhere": (
        NODE | {"MASTER_ADDR": "192.0.2.1"},
        [TWO_NODES],
        ["192.0.2.1: it leads to another machine"],
    ),
    "8 torchruns of 8": (
        STEP | RANKS | {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "7"},
        [],
        ["SLURM has started 8 tasks on this machine, and torchrun 8 processes in each, 64 in all"],
    ),
    "8 tasks of 4": (STEP, [FOUR], ["launch.procs_per_node = 4, but SLURM has started 8 tasks on this machine"]),
    "half of SLURM": (without(STEP, "SLURM_PROCID"), [], ["the environment has no SLURM_PROCID in a job step"]),
    "uneven tasks": (
        STEP | {"SLURM_STEP_NUM_TASKS": "10", "SLURM_STEP_TASKS_PER_NODE": "8,2"},
        [],
        ["SLURM_STEP_TASKS_PER_NODE=8,2: machines have different numbers of tasks"],
    ),
    "cyclic tasks": (STEP | {"SLURM_PROCID": "3"}, [], ["SLURM_PROCID=3, SLURM_NODEID=1", "--distribution=block"]),
    "a size that is not SLURM's": (STEP | {"WORLD_SIZE": "2"}, [], ["WORLD_SIZE=2: SLURM has started 16 tasks"]),
    "other nodes than SLURM's": (
        STEP
        | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1"}
        | {"SLURM_LOCALID": "0"},
        [TWO, "launch.nodes=3"],
        ["launch.nodes = 3, but SLURM_STEP_NUM_NODES=2"],
    ),
    "a number of processes in words": (POD | {"PET_NPROC_PER_NODE": "auto"}, [], ["PET_NPROC_PER_NODE='auto'"]),
    "elastic pods": (POD | {"PET_NNODES": "1:3"}, [], ["PET_NNODES='1:3'", "torchrun"]),
    "other processes than the pod's": (POD, [TWO], ["launch.procs_per_node = 2, but PET_NPROC_PER_NODE=4"]),
    "a pod without a master": (without(POD, "PET_MASTER_ADDR"), [], ["the environment has no MASTER_ADDR"]),
    "MPI on several machines": (
        MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        [],
        ["the environment has no MASTER_ADDR and mpirun has started"],
    ),
    "MPI by node": (MPI | {"MASTER_ADDR": "head"}, [], ["OMPI_COMM_WORLD_RANK=2", "mpirun --map-by slot"]),
    "a rank in launch.env": ({}, ["launch.env.RANK=0"], ["launch.env", "launchers set RANK; remove it"]),
    "a range upside down": ({}, ["launch.nodes=3:2"], ["launch.nodes", "MIN:MAX"]),
    "an unknown target": ({}, ["launch.target=moon"], ["launch.target", "moon"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_environment_ends_at_once_with_one_line(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    environment, overrides, words = WRONG[name]
    monkeypatch.setattr("shoal.launch.launcher.Workers", lambda *_: pytest.fail("processes were started"))
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        for key, value in environment.items():
            monkeypatch.setenv(key, value.replace("TAKEN", str(occupied.getsockname()[1])))
        began = time.process_time()
        ended = toy.call("train", "run.yaml", *overrides)
    assert time.process_time() - began < 5, "of this process alone, because other processes may keep the machine busy"
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("shoal: error: ")
    assert ended.stderr.count("\n") == 1
    for word in words:
        assert word in ended.stderr
    assert not toy.output.exists()


RIGHT: dict[str, tuple[dict[str, str], dict[str, Any], tuple[Any, ...]]] = {
    "SLURM tasks": (STEP, {}, ("SLURM", 9, 16, 1, 8, 0, "gpu01")),
    "SLURM tasks, as the config says": (STEP, {"procs_per_node": 8, "nodes": 2}, ("SLURM", 9, 16, 1, 8, 0, "gpu01")),
    "a launcher in each SLURM task": (
        STEP
        | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1"}
        | {"SLURM_LOCALID": "0"},
        {"procs_per_node": 8},
        ("SLURM", 1, 2, 0, 1, 8, "gpu01"),
    ),
    "an interactive shell of srun": (
        STEP
        | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0"}
        | {"SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
        {},
        ("SLURM", 0, 1, 0, 1, 0, ""),
    ),
    "torchrun in srun": (
        STEP
        | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NUM_TASKS": "2"}
        | RANKS
        | {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "7"},
        {},
        ("torchrun", 1, 4, 1, 2, 0, "127.0.0.1"),
    ),
    "the shell of sbatch": ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16"}, {}, ("no launcher", 0, 1, 0, 1, 0, "")),
    "a PyTorchJob, one process a pod": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "29500", "PET_NNODES": "2"},
        {},
        ("Kubeflow", 1, 2, 0, 1, 0, "head"),
    ),
    "a PyTorchJob without PET variables": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
        | {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        {},
        ("Kubeflow", 1, 2, 0, 1, 0, "head"),
    ),
    "a TrainJob": (POD, {}, ("Kubeflow", 1, 2, 0, 1, 4, "head")),
    "machines by hand": (
        NODE | {"WORLD_SIZE": "4"},
        {"procs_per_node": 2},
        ("MASTER_ADDR and NODE_RANK", 0, 2, 0, 1, 2, "127.0.0.1"),
    ),
    "MPI on one machine": (
        MPI | {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
        {},
        ("MPI", 1, 2, 1, 2, 0, "127.0.0.1"),
    ),
    "detection turned off": (STEP | MPI, {"detect": "none"}, ("no launcher", 0, 1, 0, 1, 0, "")),
    "DeepSpeed's launcher": (RANKS, {}, ("RANK and LOCAL_RANK", 1, 4, 1, 4, 0, "127.0.0.1")),
}


@pytest.mark.parametrize("name", RIGHT)
def test_an_environment_is_recognised(name: str) -> None:
    variables, keys, expected = RIGHT[name]
    world = detect(variables, LaunchConfig(**keys))
    found = (world.environment, world.rank, world.size, world.local_rank, world.local_size, world.starts, world.address)
    assert found == expected


def test_ranks_of_one_job_meet_at_one_port_and_jobs_at_others() -> None:
    ports = {detect(STEP | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0"}).port for rank in "012"}
    assert len(ports) == 1
    assert detect(STEP | {"SLURM_JOB_ID": "8"}).port not in ports
    assert detect(STEP | {"MASTER_PORT": "1234", "MASTER_ADDR": "here"}).port == 1234
    assert detect(STEP).hosts == ("gpu01", "gpu02")


def test_variables_that_do_nothing_and_a_shell_without_srun_are_warned_about(toy: ToyRun, monkeypatch: Any) -> None:
    for name, value in {"NCCL_TIMEOUT": "60", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    ended = toy.call("train", "run.yaml", "training.max_steps=1")
    assert ended.returncode == 0, ended.stderr
    shown = ended.stdout + ended.stderr
    assert "warning: NCCL_TIMEOUT=60 has no effect: PyTorch does not read it; set distributed.timeout" in shown
    assert "warning: SLURM job 7 has 1 machines and 2 tasks, and this process is none of its tasks" in shown
    assert "started by" in shown


def test_variables_of_the_config_are_set_and_shown(toy: ToyRun, monkeypatch: Any) -> None:
    monkeypatch.setenv("A_VARIABLE", "")  # and so put back after the test
    ended = toy.call("train", "run.yaml", "training.max_steps=1", "launch.env={A_VARIABLE: 5}")
    assert os.environ["A_VARIABLE"] == "5"
    assert "environment  A_VARIABLE=5  (command line)" in ended.stdout, ended.stderr
