"""The command `shoal launch`, and the script that calls it on several machines."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ToyRun
from launched import Launched

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "launch_multi_node.sh"


def test_a_run_of_one_process_is_trained(toy: ToyRun) -> None:
    ended = toy.call("launch", "run.yaml", "training.max_steps=2", "--on", "local")
    assert ended.returncode == 0, ended.stderr
    assert "finished at step 2" in ended.stdout


@pytest.mark.slow
def test_several_processes_are_started(toy: ToyRun) -> None:
    command = (sys.executable, "-m", "shoal", "launch", "run.yaml", "--procs-per-node", "2", "launch.env.A_KEY=5")
    with Launched(toy, *command) as run:
        assert run.wait() == 0, run.err
    assert run.err == ""
    assert "environment  A_KEY=5  (command line)" in run.out
    assert "started by   shoal's launcher, 2 processes on 1 machine" in run.out


def test_a_dry_run_prints_the_processes_of_this_machine_and_starts_none(toy: ToyRun) -> None:
    place = ("--node-rank", "1", "--master-addr", "head", "--master-port", "29500")
    ended = toy.call(
        "launch",
        "run.yaml",
        "launch.env={NCCL_DEBUG: INFO}",
        "--nodes",
        "2",
        "--procs-per-node",
        "2",
        *place,
        "--dry-run",
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    commands = [shlex.split(line) for line in ended.stdout.splitlines()]
    assert len(commands) == 2
    for local_rank, words in enumerate(commands):
        assert words[0] == "env"
        variables = dict(word.split("=", 1) for word in words[1 : words.index(sys.executable)])
        assert variables["NCCL_DEBUG"] == "INFO"
        assert (variables["RANK"], variables["WORLD_SIZE"], variables["LOCAL_RANK"]) == (
            f"{2 + local_rank}",
            "4",
            f"{local_rank}",
        )
        assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("head", "29500")
        command = words[words.index(sys.executable) + 1 :]
        assert command[:4] == ["-m", "shoal", "train", "run.yaml"]
        assert {"launch.nodes=2", "launch.procs_per_node=2", "launch.node_rank=1"} <= {*command}
    assert not toy.output.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "moon"], "launch.target (command line) = 'moon'"),
        (["--nodes", "0"], "nodes = 0 should be a number from 1, or MIN:MAX such as 1:4"),
        (["--nodes", "2"], "launch.nodes = 2: the environment has no MASTER_ADDR"),
        (["--nodes", "2", "--node-rank", "0", "--master-addr", "a", "--master-port", "0"], "launch.master_port"),
        (["--procs-per-node", "3", "distributed.strategy=mesh", "distributed.mesh={tp: 2}"], "tp 2 does not divide"),
    ],
)
def test_wrong_options_are_one_line(toy: ToyRun, words: list[str], message: str) -> None:
    ended = toy.call("launch", "run.yaml", *words)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert message in ended.stderr


def call_script(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHON": "echo", **variables}
    return subprocess.run([SCRIPT, *words], env=environment, capture_output=True, text=True, timeout=60)


def test_the_script_calls_the_command() -> None:
    place = {"NUM_NODES": "1:2", "NODE_RANK": "1", "MASTER_ADDR": "head", "PROCS_PER_NODE": "4"}
    printed = call_script("run.yaml", "training.max_steps=5", **place).stdout
    assert printed == (
        "-m shoal launch run.yaml training.max_steps=5 --on local --nodes 1:2 --procs-per-node 4 --node-rank 1 "
        "--master-addr head --master-port 29500\n"
    )


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "NUM_NODES: set it to the number of machines"),
        ({"NUM_NODES": "2"}, "NODE_RANK: set it to the number of this machine"),
        ({"NUM_NODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR: set it to an address of machine 0"),
    ],
)
def test_the_script_names_what_is_missing(variables: dict[str, str], message: str) -> None:
    ended = call_script("run.yaml", **variables)
    assert ended.returncode != 0
    assert message in ended.stderr
    assert "usage: scripts/launch_multi_node.sh CONFIG" in call_script().stderr
