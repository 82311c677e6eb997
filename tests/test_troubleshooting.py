"""Every message in docs/troubleshooting.md is produced here, and is the one that the page quotes."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ToyRun
from pool import Pool
from ports import free_port

from shoal.config import load_run
from shoal.errors import UserError
from shoal.processes.desync import Desync, check_replicas
from shoal.processes.flight_recorder import Collective, Flight, find_absent
from shoal.processes.watchdog import RankStatus, describe_hang
from shoal.training import train
from shoal.training.stragglers import OwnTimes, Stragglers

PAGE = Path(__file__).parent.parent / "docs" / "troubleshooting.md"
QUOTES = re.findall(r"^```text\n(.*?)\n```", PAGE.read_text(), re.M | re.S)
Change = Callable[[str, str], None]


def quote(beginning: str) -> str:
    """Returns the only quote of the page that begins like this."""
    (found,) = [one for one in QUOTES if one.startswith(beginning)]
    return found


def assert_quoted(beginning: str, output: str) -> None:
    """Fails unless a line of the output, or several, are as the page quotes them; `…` stands for any text of a line."""
    pattern = r"[^\n]*".join(map(re.escape, quote(beginning).split("…")))
    assert re.search(rf"^{pattern}$", output, re.M), output


def refused(toy: ToyRun, *arguments: str) -> str:
    result = toy.call(*arguments)
    assert result.returncode == 2, result.stdout + result.stderr
    return result.stderr


def test_out_of_memory(toy: ToyRun, change_recipe: Change) -> None:
    change_recipe("def inputs(self, batch):\n", "def inputs(self, batch):\n        torch.empty(1 << 45)\n")
    assert_quoted("shoal: error: DefaultCPUAllocator", refused(toy, "train", "run.yaml"))


def test_a_slow_rank() -> None:
    ranks = [OwnTimes("node3", 0, 0.01, 5, (seconds,) * 5) for seconds in (0.204, 0.308)]
    stragglers = Stragglers(1.3)
    assert stragglers.add(ranks, 2.0) is None
    warning = f"warning: {stragglers.add(ranks, 2.0)}"  # tests/training/test_stragglers.py has runs
    assert_quoted("warning: rank 1 (host", warning)


def test_nccl_without_a_gpu(toy: ToyRun) -> None:
    keys = ("training.device=cpu", "distributed.backend=nccl")
    assert_quoted("shoal: error: distributed.backend = nccl", refused(toy, "train", "run.yaml", *keys))


def test_nccl_timeout(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_TIMEOUT", "10")
    result = toy.call("train", "run.yaml", "training.max_steps=1")
    assert_quoted("warning: NCCL_TIMEOUT=10", result.stdout)


def train_here(config: Path, overrides: list[str]) -> str:
    """Trains, and returns the error of a run that is refused."""
    try:
        train(load_run(config, [*overrides, "logging.console=off", "training.max_steps=1"]))
    except UserError as error:
        return str(error)
    return ""


def test_another_batch(toy: ToyRun, pool2: Pool) -> None:
    pool2.run(train_here, toy.config, [], init=False)
    assert_quoted("batch …", (toy.output / "report.txt").read_text())


def drift() -> str:
    weight = torch.full((2,), float(dist.get_rank()))
    try:
        check_replicas({"weight": weight})
    except Desync as error:
        return str(error)
    return ""


def test_replicas_that_drift_apart(pool2: Pool) -> None:
    assert_quoted("replicas drifted apart", pool2.run(drift)[0])


def test_unused_parameters(toy: ToyRun, change_recipe: Change, pool2: Pool) -> None:
    change_recipe(
        "class Toy",
        "class Net(nn.Sequential):\n    def __init__(self, *layers):\n        super().__init__(*layers)\n"
        "        self.unused = nn.Linear(1, 1)\n\n"
        "    def forward(self, input):\n"
        "        for layer in [*self][:-1]:\n            input = layer(input)\n        return input\n\n\nclass Toy",
    )
    change_recipe("return nn.Sequential(", "return Net(")
    errors = pool2.run(train_here, toy.config, ["training.max_steps=3"], init=False)
    assert_quoted("some parameters took no part", errors[0])


def test_nan(toy: ToyRun, change_recipe: Change) -> None:
    change_recipe("** 2).sum()", "** 2).sum() * float('nan')")
    errors = refused(toy, "train", "run.yaml", "training.max_skipped_steps=3")
    assert_quoted("shoal: error: the last 3 updates", errors)


@pytest.mark.parametrize(
    ("json", "beginning"),
    [
        (
            '{"train_batch_size": 64, "zero_optimization": {"stage": 2}}',
            "shoal: error: distributed.deepspeed.config_file ds.json: train_batch_size",
        ),
        (
            '{"zero_optimization": {"stage": 2, "overlap_com": true}}',
            "shoal: error: distributed.deepspeed.config_file ds.json: zero_optimization",
        ),
    ],
)
def test_a_deepspeed_json(toy: ToyRun, json: str, beginning: str) -> None:
    (toy.folder / "ds.json").write_text(json)
    keys = ("distributed.strategy=deepspeed", "distributed.deepspeed.config_file=ds.json")
    assert_quoted(beginning, refused(toy, "train", "run.yaml", *keys))


def status(rank: int, activity: str) -> RankStatus:
    return RankStatus(rank, "node3 pid:[1]", 100 + rank, 5 - rank, activity, 600.0, "12:00:00")


def test_a_hang() -> None:
    """Runs that really hang are in tests/launch/test_hangs.py and tests/processes/test_watchdog.py."""
    answers = {0: status(0, "step 6, forward, backward and update"), 1: status(1, "step 6, waiting for data")}
    waiting = Flight([Collective("0", 61, "all_reduce", "Float []", "scheduled", "default_pg")], {"0": 61})
    absent, lines = find_absent({0: waiting, 1: Flight((), {"0": 60})})
    text = describe_hang(absent, answers, answers, "distributed.timeout = 600 s", lines)
    assert_quoted("shoal: the run hangs", f"shoal: {text}")


@pytest.fixture
def machine(toy: ToyRun) -> Callable[[str, int], str]:
    """Starts one of two machines, which waits two seconds for the other, and returns its errors."""

    def start(node: str, port: int) -> str:
        place = ("--nodes", "2", "--node-rank", node, "--master-addr", "127.0.0.1", "--master-port", str(port))
        return refused(toy, "launch", "run.yaml", *place, "distributed.init_timeout=2")

    return start


def test_a_machine_that_does_not_come(machine: Callable[[str, int], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.launch.launcher.REMINDER_SECONDS", 1.0)
    errors = machine("0", free_port())
    assert_quoted("shoal: waiting for node 1", errors)
    assert_quoted("shoal: error: launch.nodes = 2", errors)


def test_a_master_that_does_not_answer(machine: Callable[[str, int], str]) -> None:
    assert_quoted("shoal: error: MASTER_ADDR", machine("1", free_port()))


def test_a_port_that_is_taken(machine: Callable[[str, int], str]) -> None:
    with socket.create_server(("", 0)) as server:
        assert_quoted("shoal: error: MASTER_PORT", machine("0", server.getsockname()[1]))


@pytest.mark.slow
def test_a_killed_process(toy: ToyRun, change_recipe: Change) -> None:
    killed = "import os, torch.distributed\n        if torch.distributed.get_rank() and not os.path.exists('k'):\n"
    killed += f"            open('k', 'w'); os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
    change_recipe("def inputs(self, batch):\n", f"def inputs(self, batch):\n        {killed}")
    result = toy.shoal("train", "run.yaml", "launch.procs_per_node=2")
    assert_quoted("shoal: rank 1 was killed", result.stderr)


def test_the_message_of_a_killed_process_is_the_launchers() -> None:
    """`test_a_killed_process` is slow; here the words are compared with the functions that make them."""
    from shoal.processes.group import describe_exit

    assert f"rank 1 {describe_exit(-signal.SIGKILL)}; starting again" in quote("shoal: rank 1 was killed")


def test_a_run_that_has_finished_and_one_that_starts_anew(toy: ToyRun) -> None:
    command = ("train", "run.yaml", "training.max_steps=1")
    toy.call(*command)
    assert_quoted("already finished", toy.call(*command).stdout)
    assert_quoted("the earlier run", toy.call(*command, "--fresh").stdout)


def test_every_quote_is_compared() -> None:
    beginnings = re.findall(
        r'"((?:shoal: |warning: |batch |replicas |some |already |the earlier )[^"]+)"', Path(__file__).read_text()
    )
    for one in QUOTES:
        assert any(one.startswith(beginning) for beginning in beginnings), one


def test_every_key_on_the_page_is_a_key(toy: ToyRun) -> None:
    sections = "training|distributed|logging|launch|checkpoint|experiment"
    keys = {*re.findall(rf"`((?:{sections})(?:\.[a-z0-9_]+)+)", PAGE.read_text())}
    assert len(keys) > 15
    for key in keys:
        errors = toy.call("config", "run.yaml", f"{key}=null").stderr  # the value may be wrong
        assert "is not a key" not in errors
