"""Starting the processes of a run, by ourselves or by torchrun, and what is refused."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable

import pytest
import torch
from conftest import ToyRun
from launched import TORCHRUN, Launched, free_port, listening_addresses
from safetensors.torch import load_file

from shoal.cli.main import train
from shoal.config import load_run
from shoal.errors import UserError
from shoal.launch.launcher import start
from shoal.processes.world import World
from shoal.training.preflight import check_world

SAME = ("model.dropout=0.0", "training.global_batch_size=8")
TWO = "launch.procs_per_node=2"


def assert_same_weights(toy: ToyRun) -> None:
    """Those of the run in `out` are those of one process."""
    toy.train(*SAME, f"experiment.output_dir={toy.folder}/one")

    def weights(name: str) -> dict[str, torch.Tensor]:
        folder = toy.folder / name / "checkpoints" / "step_00000010"
        return {key: tensor for file in folder.glob("model*") for key, tensor in load_file(file).items()}

    one, several = weights("one"), weights("out")
    assert len(one) == 4
    torch.testing.assert_close(several, one)


def test_two_processes_train_and_say_it_once(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe("def build_model(self):", "def build_model(self):\n        print('a word of the recipe')")
    with Launched(toy, TWO, *SAME) as run:
        assert run.wait() == 0, run.err
        assert run.nothing_left()
    assert run.out.count("step 10/10  loss") == 1
    assert run.out.count("finished at step 10") == 1
    assert run.err == ""
    assert "step 10/10  loss" in (toy.output / "logs" / "rank_0.log").read_text()
    assert "a word of the recipe" in (toy.output / "logs" / "rank_1.log").read_text()
    assert_same_weights(toy)


def test_joins_what_torchrun_started(toy: ToyRun) -> None:
    with Launched(toy, *TORCHRUN, "--nproc-per-node=2", "-m", "shoal", "train", "run.yaml", *SAME) as run:
        assert run.wait() == 0, run.err
        assert run.nothing_left()
    assert run.out.count("finished at step 10") == 1
    assert_same_weights(toy)


@pytest.mark.slow
def test_two_torchruns(toy: ToyRun) -> None:
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=one run")
    agent = (*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", *rendezvous, "--local-addr=127.0.0.1", "-m", "shoal")
    with Launched(toy, *agent, "train", "run.yaml", *SAME) as a, Launched(toy, *agent, "train", "run.yaml", *SAME) as b:
        assert (a.wait(), b.wait()) == (0, 0), a.err + b.err
    assert (a.out + b.out).count("finished at step 10") == 1
    assert_same_weights(toy)


def test_two_machines_by_node_rank(toy: ToyRun) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = ("launch.nodes=2", "launch.procs_per_node=1", *SAME)
    with (
        Launched(toy, *command, **place, NODE_RANK="1") as second,
        Launched(toy, *command, **place, NODE_RANK="0", WORLD_SIZE="2") as first,
    ):
        assert (first.wait(), second.wait()) == (0, 0), first.err + second.err
        assert first.nothing_left()
        assert second.nothing_left()
    assert first.out.count("finished at step 10") == 1
    assert second.out + second.err == ""
    assert_same_weights(toy)


NODES = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "NODE_RANK": "0"}


@pytest.mark.parametrize(
    ("overrides", "environment", "words"),
    [
        ([TWO], {"RANK": "0"}, ["RANK=0", "not WORLD_SIZE, LOCAL_RANK"]),
        ([TWO], {"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "not RANK"]),
        (["launch.nodes=2"], {}, ["launch.nodes = 2", "missing: MASTER_ADDR, MASTER_PORT, NODE_RANK"]),
        (["launch.nodes=2"], NODES | {"MASTER_PORT": "TAKEN"}, ["MASTER_PORT", "in use"]),
        (["launch.nodes=2"], NODES | {"NODE_RANK": "2"}, ["NODE_RANK=2", "below 2"]),
        (["launch.nodes=2", TWO], NODES | {"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "= 4"]),
        (["training.global_batch_size=2", "launch.procs_per_node=4"], {}, ["training.global_batch_size = 2", "4"]),
    ],
)
def test_refused_before_a_process_starts(
    toy: ToyRun,
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    environment: dict[str, str],
    words: list[str],
) -> None:
    monkeypatch.setattr("shoal.launch.launcher.elastic_launch", lambda *_: pytest.fail("processes were started"))
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        for key, value in environment.items():
            monkeypatch.setenv(key, value.replace("TAKEN", str(occupied.getsockname()[1])))
        with pytest.raises(UserError) as caught:
            start(load_run(toy.config, overrides), [])
    for word in words:
        assert word in str(caught.value)


JSON = ["distributed.strategy=deepspeed", "distributed.deepspeed.config_file=zero.json"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["checkpoint.init_from=nowhere"], ["checkpoint.init_from = 'nowhere'", "no such file"]),
        (["checkpoint.init_from=empty"], ["checkpoint.init_from", "is no checkpoint"]),
        (["checkpoint.resume=nowhere"], ["checkpoint.resume = 'nowhere'", "no such folder"]),
        ([*JSON, 'json={"zero_optimization": {"stage": 2}, "gradient_cliping": 1}'], ["gradient_cliping", "did you"]),
        ([*JSON, 'json={"zero_optimization": {"stage": 2}, "train_batch_size": 5}'], ["train_batch_size", "2 proc"]),
        ([*JSON, "json={"], ["distributed.deepspeed.config_file", "no valid JSON"]),
        (["distributed.strategy=mesh", "distributed.mesh={tp: 3}"], ["tp 3 does not divide the 2 processes"]),
    ],
)
def test_refused_before_there_is_a_folder(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch, overrides: list[str], words: list[str]
) -> None:
    monkeypatch.setattr("shoal.launch.launcher.elastic_launch", lambda *_: pytest.fail("processes were started"))
    monkeypatch.chdir(toy.folder)
    (toy.folder / "empty").mkdir()
    for text in [override.removeprefix("json=") for override in overrides if override.startswith("json=")]:
        (toy.folder / "zero.json").write_text(text)
    with pytest.raises(UserError) as caught:
        train(toy.config, [TWO, *(override for override in overrides if not override.startswith("json="))])
    for word in words:
        assert word in str(caught.value)
    assert not toy.output.exists()


@pytest.mark.slow
def test_what_torchrun_started_is_refused_without_a_folder_too(toy: ToyRun) -> None:
    wrong = "checkpoint.init_from=nowhere"
    with Launched(toy, *TORCHRUN, "--nproc-per-node=2", "-m", "shoal", "train", "run.yaml", wrong) as run:
        run.wait()
    assert run.err.count("shoal: error: checkpoint.init_from = 'nowhere': there is no such file or folder") == 1
    assert not toy.output.exists()


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (["dataset.size=0"], "train_data"),
        pytest.param(["distributed.strategy=single"], "distributed.strategy = single", marks=pytest.mark.slow),
        pytest.param(["experiment.output_dir=run.yaml"], "experiment.output_dir", marks=pytest.mark.slow),
    ],
)
def test_a_mistake_that_workers_see_is_one_line_said_once(toy: ToyRun, overrides: list[str], word: str) -> None:
    with Launched(toy, TWO, *overrides) as run:
        assert run.wait(30) == 2, run.err
        assert run.nothing_left()
    assert run.err.startswith("shoal: error: ")
    assert run.err.count("\n") == 1
    assert word in run.err


@pytest.mark.slow
def test_another_torchrun_than_the_config_says(toy: ToyRun) -> None:
    options = ("launch.procs_per_node=3", "checkpoint.every=null")
    command = ("--nproc-per-node=2", "--max-restarts=1", "-m", "shoal", "train", "run.yaml")
    with Launched(toy, *TORCHRUN, *command, *options) as run:
        assert run.wait(30) == 1  # torchrun's own
        assert run.nothing_left()
    lines = [line for line in run.err.splitlines() if line.startswith("shoal: ")]
    assert len(lines) == 1, "not again after torchrun's restart"
    assert "launch.procs_per_node = 3, but this machine runs 2" in lines[0]


@pytest.mark.parametrize(
    ("world", "override"),
    [
        (World(), TWO),
        (World(0, 2, 0, 2), "launch.procs_per_node=1"),
        (World(0, 2, 0, 2), "launch.nodes=2"),
        (World(0, 2, 0, 1), "launch.nodes=1"),
    ],
)
def test_another_world_than_the_config_says(toy: ToyRun, world: World, override: str) -> None:
    with pytest.raises(UserError, match=override.replace("=", " = ")):
        check_world(load_run(toy.config, [override]), world)


NETWORK = '''
class Net(nn.Module):
    """Leaves a layer out from the n-th call on."""

    def __init__(self, calls_with_all):
        super().__init__()
        self.a, self.b, self.calls_left = nn.Linear(1, 1), nn.Linear(1, 1), calls_with_all

    def forward(self, input):
        self.calls_left -= 1
        return self.a(input) + self.b(input) if self.calls_left >= 0 else self.a(input)


class Toy(Recipe):'''


@pytest.mark.parametrize(
    ("calls_with_all", "override", "key"),
    [
        (0, "static_graph=false", "find_unused_parameters"),
        pytest.param(5, "static_graph=true", "static_graph = true", marks=pytest.mark.slow),
    ],
)
def test_ddp_says_which_key_to_change(
    toy: ToyRun, change_recipe: Callable[[str, str], None], calls_with_all: int, override: str, key: str
) -> None:
    change_recipe("class Toy(Recipe):", NETWORK)
    change_recipe("hidden = self.config.model.hidden", f"return Net({calls_with_all})")
    with Launched(toy, TWO, f"distributed.ddp.{override}", "checkpoint.every=null") as run:
        assert run.wait(30) == 2, run.err
        assert run.nothing_left()
    assert run.err.count("\n") == 1
    assert f"distributed.ddp.{key}" in run.err


def test_an_exception_is_told_once_and_not_repeated(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe("def loss(self, output, batch):", "def loss(self, output, batch):\n        self.fail_on_rank_1()")
    change_recipe(
        "    def eval_data(self):",
        "    def fail_on_rank_1(self):\n"
        "        import os\n"
        "        if os.environ['RANK'] == '1':\n"
        "            raise ValueError('what the user got wrong')\n\n"
        "    def eval_data(self):",
    )
    with Launched(toy, TWO) as run:
        assert run.wait(30) == 1
        assert run.nothing_left()
    assert run.err.startswith("shoal: rank 1 failed\nTraceback")
    assert run.err.count("Traceback") == 1
    assert run.err.endswith("ValueError: what the user got wrong\n")
    assert "starting again" not in run.err
    assert "what the user got wrong" in (toy.output / "logs" / "rank_1.log").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_machine_listens_on_loopback_only(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe('return {"x"', 'import time; time.sleep(0.05); return {"x"')
    with Launched(toy, TWO, "training.max_steps=1000") as run:
        run.until((toy.output / "report.txt").exists)
        listening = listening_addresses(run.alive())
    assert listening == {"0100007F"}  # 127.0.0.1
