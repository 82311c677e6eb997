"""`shoal doctor` as a user runs it: text, JSON, exit codes, several problems at once."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from conftest import ToyRun

from shoal.config import load_run
from shoal.doctor.diagnosis import conclude, try_size_model
from shoal.doctor.findings import Finding
from shoal.doctor.machine import Machine
from shoal.doctor.text import format_text
from shoal.doctor.together import find_world
from shoal.errors import UserError

KEYS = {"format", "shoal", "config", "exit_code", "machines", "findings", "network", "exchange"}
FINDING_KEYS = {"level", "check", "message", "fix", "source", "host"}
CHECKS = {
    *("versions", "known bad", "layout", "GPUs", "backends", "compiler"),
    *("CPU instructions", "shared memory", "open files", "processes", "disk space", "disk speed"),
    *("name of this host", "master port", "model", "network"),
}


def by_check(text: str) -> dict[str, dict[str, str]]:
    return {finding["check"]: finding for finding in json.loads(text)["findings"]}


def test_what_breaks_is_in_the_json_and_is_exit_code_1(toy: ToyRun) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        keys = [f"launch.master_port={port}", "launch.procs_per_node=3", "distributed.strategy=mesh"]
        result = toy.call("doctor", "run.yaml", "--json", *keys, "distributed.mesh={tp: 2}")
    assert result.returncode == 1, result.stdout + result.stderr
    document = json.loads(result.stdout)
    assert {*document} == KEYS
    assert (document["format"], document["config"], document["exit_code"]) == (1, "run.yaml", 1)
    assert all({*finding} == FINDING_KEYS for finding in document["findings"])
    found = by_check(result.stdout)
    assert {name.partition(":")[0] for name in found} - {"use of GPUs", "links of GPUs"} == CHECKS
    assert {name for name, finding in found.items() if finding["level"] == "will break"} == {"master port", "layout"}
    assert f"launch.master_port = {port}" in found["master port"]["message"]
    assert "distributed.mesh" in found["layout"]["message"]
    assert not toy.output.exists()  # nothing is left behind


def test_findings_are_shown_with_the_worst_first() -> None:
    found = [
        Finding("fine", "disk", "fast"),
        Finding("will break", "known bad: x", "y", "unset y", "https://z", host="node-b"),
        Finding("not checked", "GPUs", "none"),
        Finding("slow or surprising", "links", "slow \x1b[2J", "mend them"),
        *(Finding("fine", "backends", "gloo", host=host) for host in ("node-a", "node-b")),
    ]
    assert format_text(conclude(None, [Machine("node-a"), Machine("node-b")], found)).splitlines() == [
        "WILL BREAK",
        "  known bad: x: node-b: y",
        "    → unset y",
        "      (https://z)",
        "",
        "SLOW OR SURPRISING",
        "  links: slow \\x1b[2J",
        "    → mend them",
        "",
        "NOT CHECKED",
        "  GPUs: none",
        "",
        "FINE",
        "  disk: fast",
        "  backends: all machines: gloo",
        "",
        "1 will break, 1 slow or surprising, 1 not checked, 2 fine",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--procs", "1"], "--procs 1"),
        (["missing.yaml"], "no such file"),
        (["run.yaml", "training.max_stepz=3"], "training.max_stepz"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(toy: ToyRun, arguments: list[str], words: str) -> None:
    result = toy.call("doctor", *arguments)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert words in result.stderr


def test_procs_are_not_for_a_process_that_a_launcher_started(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}.items():
        monkeypatch.setenv(name, value)
    result = toy.call("doctor", "run.yaml", "--procs", "2")
    assert result.returncode == 2
    assert "--procs 2: the run has 2 processes or machines already (RANK and LOCAL_RANK)" in result.stderr


def test_a_run_for_a_cluster_is_examined_outside_of_its_job(toy: ToyRun) -> None:
    keys = ["launch.nodes=4", "launch.procs_per_node=8"]
    world = find_world(load_run(toy.folder / "run.yaml", ["launch.target=slurm", *keys]))
    assert (world.size, world.starts) == (1, 8)
    with pytest.raises(UserError, match=r"launch\.nodes = 4"):
        find_world(load_run(toy.folder / "run.yaml", keys))


def test_a_model_that_cannot_be_built_is_not_silent(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe("hidden = self.config.model.hidden", "raise FileNotFoundError('no vocabulary')")
    model, (finding,) = try_size_model(load_run(toy.folder / "run.yaml"))
    assert model is None
    assert (finding.level, "no vocabulary" in finding.message) == ("not checked", True)


def doctor_process(toy: ToyRun, *words: str, before: str = "", **variables: str) -> Any:
    """Runs the command in a process; with `before`, in namespaces in which these shell commands run first."""
    command = [sys.executable, "-m", "shoal", "doctor", *words]
    if before:
        command = ["unshare", "--mount", "--uts", "sh", "-c", f'{before}\nexec "$@"', "sh", *command]
    return subprocess.run(
        command, cwd=toy.folder, capture_output=True, text=True, env={**os.environ, **variables}, timeout=600
    )


@pytest.mark.slow
def test_two_processes_measure_the_network(toy: ToyRun) -> None:
    done = doctor_process(toy, "run.yaml", "--procs", "2", "--json", "model.hidden=2000")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    network, exchange = document["network"], document["exchange"]
    assert (network["backend"], network["ranks"], len(network["links"])) == ("gloo", 2, 1)
    assert network["all_reduce"][0]["tensor_bytes"] == 8
    assert exchange["plain_bytes"] == 4 * 6001
    assert len(exchange["options"]) == 6
    text = doctor_process(toy, "--procs", "2")
    assert text.returncode == 0, text.stderr
    assert "NETWORK: 2 ranks, gloo" in text.stdout
    assert "all-reduce" in text.stdout


@pytest.mark.slow
def test_ten_problems_at_once(toy: ToyRun) -> None:
    """As root: namespaces for the mounts and the host name."""
    if os.getuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("NOT TESTED: namespaces need root and unshare")
    full = toy.folder / "full"
    full.mkdir()
    tools = toy.folder / "tools"
    tools.mkdir()  # a PATH without a compiler
    before = (
        "set -e\nmount -t tmpfs -o size=16m tmpfs /dev/shm\nhostname nowhere.invalid\n"
        f"mount -t tmpfs -o size=8m tmpfs {full}\nulimit -n 100"
    )
    with socket.create_server(("", 0)) as taken:
        keys = [
            f"launch.master_port={taken.getsockname()[1]}",
            f"experiment.output_dir={full}/run",
            "dataset.num_workers=2",
            "training.compile=true",
            "model.hidden=300000",
        ]
        variables = {
            "GLOO_SOCKET_IFNAME": "absent0",
            "OMP_NUM_THREADS": "999",
            "TORCH_COMPILE_DISABLE": "1",
            "NCCL_TIMEOUT": "60",
        }
        words = ["run.yaml", "--procs", "2", "--json", *keys]
        done = doctor_process(toy, *words, before=f"{before}\nexport PATH={tools}", **variables)
    assert done.returncode == 1, done.stderr
    found = by_check(done.stdout)
    breaks = {check for check, finding in found.items() if finding["level"] == "will break"}
    assert breaks == {
        *("shared memory", "open files", "master port", "disk space", "compiler", "network"),
        "known bad: GLOO_SOCKET_IFNAME",
    }
    slow = {check for check, finding in found.items() if finding["level"] == "slow or surprising"}
    assert slow >= {
        *(f"known bad: {name}" for name in ("more threads than cores", "TORCH_COMPILE_DISABLE", "NCCL_TIMEOUT")),
    }
    assert all(found[check]["fix"] for check in breaks | slow)
    assert "absent0" in found["network"]["message"]
