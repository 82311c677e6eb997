"""Starting the processes of a run with shoal or torchrun, and what is refused."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ToyRun
from launched import Launched, torchrun
from pool import Pool, WorkerFailure
from ports import free_port
from safetensors.torch import load_file

from shoal.cli.main import train
from shoal.config import load_run
from shoal.errors import UserError
from shoal.launch import launcher
from shoal.launch.ends import FINAL_EXIT_CODE, REFUSED, log_path
from shoal.launch.launcher import worker_variables
from shoal.processes.board import open_board
from shoal.processes.detect import detect
from shoal.processes.world import World
from shoal.training import train as train_run
from shoal.training.preflight import check_world

SAME = ("model.dropout=0.0", "training.global_batch_size=8")
TWO = "launch.procs_per_node=2"


def assert_same_weights(toy: ToyRun) -> None:
    """Checks that the run in the folder `out` has the same final weights as a run of one process."""
    toy.train(*SAME, f"experiment.output_dir={toy.folder}/one")

    def weights(name: str) -> dict[str, torch.Tensor]:
        folder = toy.folder / name / "checkpoints" / "step_00000010"
        return {key: tensor for file in folder.glob("model*") for key, tensor in load_file(file).items()}

    one, several = weights("one"), weights("out")
    assert len(one) == 4
    torch.testing.assert_close(several, one)


@pytest.mark.slow  # so does a run whose rank is killed, in test_interrupted.py
def test_two_processes_train_and_print_once(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe("def build_model(self):", "def build_model(self):\n        print('printed by the recipe')")
    with Launched(toy, TWO, *SAME) as run:
        assert run.wait() == 0, run.err
        assert run.nothing_left()
    assert run.out.count("step 10/10  loss") == 1
    assert run.out.count("finished at step 10") == 1
    assert run.err == ""
    assert "step 10/10  loss" in (toy.output / "logs" / "rank_0.log").read_text()
    assert "printed by the recipe" in (toy.output / "logs" / "rank_1.log").read_text()
    assert_same_weights(toy)


@pytest.mark.slow  # tests/processes/test_detect.py reads torchrun's variables
def test_torchrun_starts_the_processes_of_a_run(toy: ToyRun) -> None:
    with Launched(toy, *torchrun(), "--nproc-per-node=2", "-m", "shoal", "train", "run.yaml", *SAME) as run:
        assert run.wait() == 0, run.err
        assert run.nothing_left()
    assert run.out.count("finished at step 10") == 1
    assert_same_weights(toy)


@pytest.mark.slow
def test_two_torchruns_train_one_run(toy: ToyRun) -> None:
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=one run")
    agent = (*torchrun(), "--nnodes=2", "--nproc-per-node=1", *rendezvous, "--local-addr=127.0.0.1", "-m", "shoal")
    with Launched(toy, *agent, "train", "run.yaml", *SAME) as a, Launched(toy, *agent, "train", "run.yaml", *SAME) as b:
        assert (a.wait(), b.wait()) == (0, 0), a.err + b.err
    assert (a.out + b.out).count("finished at step 10") == 1
    assert_same_weights(toy)


@pytest.mark.slow
def test_two_launchers_with_node_ranks_train_one_run(toy: ToyRun) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = ("launch.nodes=2", "launch.procs_per_node=1", *SAME)
    with (
        Launched(toy, *command, **address, NODE_RANK="1") as second,
        Launched(toy, *command, **address, NODE_RANK="0", WORLD_SIZE="2") as first,
    ):
        assert (first.wait(), second.wait()) == (0, 0), first.err + second.err
        assert first.nothing_left()
        assert second.nothing_left()
    assert first.out.count("finished at step 10") == 1
    assert second.out == ""
    joined, ended = second.err.splitlines()
    assert joined.startswith("shoal: joined the run as node 1 of 2, rank 1; its output is on node 0 (127.0.0.1)")
    assert ended == "shoal: the run has ended"
    assert_same_weights(toy)


NODES = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "NODE_RANK": "0"}


@pytest.mark.parametrize("place", [0, 1])
def test_the_variables_of_the_processes_describe_their_world(place: int) -> None:
    """All machines meet at the board that the launcher of the first of them keeps."""
    by_rank = worker_variables(2, place, 2, "head", 29500, attempt=1)
    assert [*by_rank] == [2 * place, 2 * place + 1]
    for local_rank, (rank, variables) in enumerate(by_rank.items()):
        world = detect({**variables, "SHOAL_LAUNCHER": "11"})
        assert (world.rank, world.size, world.local_rank, world.local_size) == (rank, 4, local_rank, 2)
        assert (world.address, world.port, world.launcher_keeps_board, world.launcher_pid) == ("head", 29500, True, 11)
        assert (world.attempt, world.node, world.environment) == ((0, 1, 0), place, "shoal's launcher")


@pytest.mark.parametrize(
    ("overrides", "environment", "words"),
    [
        ([TWO], {"RANK": "0"}, ["RANK=0", "no WORLD_SIZE, LOCAL_RANK"]),
        ([TWO], {"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "no RANK"]),
        (["launch.nodes=2"], {}, ["launch.nodes = 2", "no MASTER_ADDR, MASTER_PORT, NODE_RANK"]),
        (["launch.nodes=2"], NODES | {"MASTER_PORT": "TAKEN"}, ["MASTER_PORT", "in use"]),
        (["launch.nodes=2"], NODES | {"NODE_RANK": "2"}, ["NODE_RANK=2", "below launch.nodes = 2"]),
        (["launch.nodes=2", TWO], NODES | {"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "= 4"]),
        (
            ["launch.nodes=2", "distributed.init_timeout=1"],
            NODES | {"NODE_RANK": "1"},  # nobody has opened the board
            ["MASTER_ADDR = 127.0.0.1, MASTER_PORT = 1: cannot be connected to", "distributed.init_timeout"],
        ),
    ],
)
def test_refused_before_a_process_starts(
    toy: ToyRun,
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    environment: dict[str, str],
    words: list[str],
) -> None:
    monkeypatch.setattr("shoal.launch.launcher.Workers", lambda *_: pytest.fail("processes were started"))
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        for key, value in environment.items():
            monkeypatch.setenv(key, value.replace("TAKEN", str(occupied.getsockname()[1])))
        with pytest.raises(UserError) as caught:
            train(toy.config, overrides)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.slow  # tests/processes/test_board.py has what listens there
def test_a_second_machine_with_a_wrong_address_ends_with_one_line(toy: ToyRun) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "1"}
        with Launched(toy, "launch.nodes=2", "distributed.init_timeout=1", **environment) as run:
            assert run.wait() == 2
    assert run.err.startswith(f"shoal: error: MASTER_ADDR = 127.0.0.1, MASTER_PORT = {port}: what listens there")
    assert run.err.count("\n") == 1
    assert not toy.output.exists()


@pytest.mark.parametrize(
    ("exit_codes", "final", "expected"),
    [
        ({0: 2, 1: 143}, "2", 2),  # the launcher has stopped rank 1 because rank 0 had failed
        ({0: 2, 1: -15}, "2", 2),
        ({0: 143, 1: 143}, None, 143),  # somebody has stopped the run
        ({0: -15, 1: -15}, None, 143),
    ],
)
def test_an_error_that_would_come_again_decides_the_exit_code(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch, exit_codes: dict[int, int], final: str | None, expected: int
) -> None:
    board = open_board("127.0.0.1", 0, loopback_only=True)

    run = load_run(toy.config, [TWO])
    one = launcher._Launcher(run, World(starts=2), board, [], launcher._Signals(), grace_seconds=1)

    def fail(attempt: int, members: list[int]) -> None:
        if final is not None:
            board.set(FINAL_EXIT_CODE, final)
        codes = {str(rank): code for rank, code in exit_codes.items()}
        one.peers.post(phase="ended", attempt=attempt, exit_codes=codes)

    monkeypatch.setattr(one, "_run_workers", fail)
    assert one.lead() == expected


JSON = ["distributed.strategy=deepspeed", "distributed.deepspeed.config_file=zero.json"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["checkpoint.init_from=nowhere"], ["checkpoint.init_from = 'nowhere'", "no such file"]),
        (["checkpoint.init_from=empty"], ["checkpoint.init_from", "is not a checkpoint"]),
        (["checkpoint.resume=nowhere"], ["checkpoint.resume = 'nowhere'", "no such folder"]),
        ([*JSON, 'json={"zero_optimization": {"stage": 2}, "gradient_cliping": 1}'], ["gradient_cliping", "did you"]),
        ([*JSON, 'json={"zero_optimization": {"stage": 2}, "train_batch_size": 5}'], ["train_batch_size", "2 proc"]),
        ([*JSON, "json={"], ["distributed.deepspeed.config_file", "not valid JSON"]),
        (["distributed.strategy=mesh", "distributed.mesh={tp: 3}"], ["tp 3 does not divide the 2 processes"]),
    ],
)
def test_refused_before_a_run_folder_is_made(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch, overrides: list[str], words: list[str]
) -> None:
    monkeypatch.setattr("shoal.launch.launcher.Workers", lambda *_: pytest.fail("processes were started"))
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
def test_refused_under_torchrun_before_a_run_folder_is_made(toy: ToyRun) -> None:
    wrong = "checkpoint.init_from=nowhere"
    with Launched(toy, *torchrun(), "--nproc-per-node=2", "-m", "shoal", "train", "run.yaml", wrong) as run:
        run.wait()
    assert run.err.count("shoal: error: checkpoint.init_from = 'nowhere': no such file or folder") == 1
    assert not toy.output.exists()


@pytest.mark.parametrize("left_by", ["a refusal", "an exception"])
def test_a_launcher_takes_back_what_refused_workers_have_left(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch, left_by: str
) -> None:
    def refuse(self: Any, attempt: int, members: list[int]) -> None:
        for rank in (0, 1):
            log_path(self.run, rank).parent.mkdir(parents=True, exist_ok=True)
            log_path(self.run, rank).touch()
        self.board.set(FINAL_EXIT_CODE, "2")
        if left_by == "a refusal":
            self.board.set(REFUSED, "")
        run_workers(self, attempt, members)

    run_workers = launcher._Launcher._run_workers
    monkeypatch.setattr(launcher._Launcher, "_run_workers", refuse)
    monkeypatch.setattr(launcher, "worker_command", lambda arguments: ["/bin/false"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("SHOAL_LAUNCHER", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):  # it sets them
        monkeypatch.setenv(name, "1")
    world = World(starts=2, address="127.0.0.1", port=free_port())
    assert launcher.start(load_run(toy.config, [TWO]), world, []) == 2
    assert toy.output.exists() == (left_by == "an exception")


@pytest.mark.slow  # tests/faults/test_injection.py has one worker
@pytest.mark.parametrize(
    ("where", "command"),
    [
        ("prepare_data", ()),  # on rank 0 alone: the other one waits for it, and is stopped
        ("build_model", ()),
        ("build_model", ("torchrun",)),
        ("build_model", ("distributed.strategy=ddp_spawn",)),
    ],
)
def test_a_run_that_workers_refuse_leaves_nothing(
    toy: ToyRun, change_recipe: Callable[[str, str], None], where: str, command: tuple[str, ...]
) -> None:
    refusal = f"    def {where}(self):\n        from shoal.errors import UserError\n        raise UserError('no')\n\n"
    change_recipe("    def inputs(", f"{refusal}    def inputs(")
    place = f"experiment.output_dir={toy.folder}/runs/deep/one"
    before = sorted(toy.folder.iterdir())
    command = (
        (*torchrun(), "--nproc-per-node=2", "-m", "shoal", "train", "run.yaml") if "torchrun" in command else command
    )
    with Launched(toy, *command, TWO, place, PYTHONDONTWRITEBYTECODE="1") as run:
        assert run.wait() in (1, 2), run.err  # 1 is that of torchrun
        assert run.nothing_left()
    assert run.err.count("shoal: error: no\n") == 1
    assert sorted(toy.folder.iterdir()) == before


@pytest.mark.slow  # an exception, below, comes the same way
@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (["dataset.size=0"], "train_data"),
        (["distributed.strategy=single"], "distributed.strategy = single"),
        (["experiment.output_dir=run.yaml"], "experiment.output_dir"),
    ],
)
def test_a_mistake_found_by_workers_is_printed_once_in_one_line(toy: ToyRun, overrides: list[str], word: str) -> None:
    with Launched(toy, TWO, *overrides) as run:
        assert run.wait() == 2, run.err
        assert run.nothing_left()
    assert run.err.startswith("shoal: error: ")
    assert run.err.count("\n") == 1
    assert word in run.err


@pytest.mark.slow
def test_torchrun_with_another_number_of_processes_than_the_config(toy: ToyRun) -> None:
    options = ("launch.procs_per_node=3", "checkpoint.every=null")
    command = ("--nproc-per-node=2", "--max-restarts=1", "-m", "shoal", "train", "run.yaml")
    with Launched(toy, *torchrun(), *command, *options) as run:
        assert run.wait() == 1  # the exit code of torchrun
        assert run.nothing_left()
    lines = [line for line in run.err.splitlines() if line.startswith("shoal: ")]
    assert len(lines) == 1, "it must not be printed again after torchrun's restart"
    assert "launch.procs_per_node = 3, but 2 processes were started" in lines[0]


@pytest.mark.parametrize(
    ("world", "override"),
    [
        (World(), TWO),
        (World(0, 2, 0, 2), "launch.procs_per_node=1"),
        (World(0, 2, 0, 2), "launch.nodes=2"),
        (World(0, 2, 0, 1), "launch.nodes=1"),
    ],
)
def test_a_number_of_processes_that_contradicts_the_config_is_refused(toy: ToyRun, world: World, override: str) -> None:
    with pytest.raises(UserError, match=override.replace("=", " = ")):
        check_world(load_run(toy.config, [override]), world)


NETWORK = '''
class Net(nn.Module):
    """Skips a layer from the n-th call on."""

    def __init__(self, calls_with_all):
        super().__init__()
        self.a, self.b, self.calls_left = nn.Linear(1, 1), nn.Linear(1, 1), calls_with_all

    def forward(self, input):
        self.calls_left -= 1
        return self.a(input) + self.b(input) if self.calls_left >= 0 else self.a(input)


class Toy(Recipe):'''


def train_here(config: Path, overrides: list[str]) -> None:
    train_run(load_run(config, overrides))


@pytest.mark.parametrize(
    ("calls_with_all", "override", "key"),
    [
        (0, "static_graph=false", "find_unused_parameters"),
        pytest.param(5, "static_graph=true", "static_graph = true", marks=pytest.mark.slow),
    ],
)
def test_an_error_of_ddp_names_the_key_to_change(
    toy: ToyRun, change_recipe: Callable[[str, str], None], pool2: Pool, calls_with_all: int, override: str, key: str
) -> None:
    change_recipe("class Toy(Recipe):", NETWORK)
    change_recipe("hidden = self.config.model.hidden", f"return Net({calls_with_all})")
    keys = [TWO, f"distributed.ddp.{override}", "checkpoint.every=null"]
    with pytest.raises(WorkerFailure, match=rf"raised UserError: some parameters took .* distributed\.ddp\.{key}"):
        pool2.run(train_here, toy.config, keys, init=False)


@pytest.mark.slow  # tests/faults/test_injection.py has one worker
def test_an_exception_is_printed_once_and_not_retried(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe("def loss(self, output, batch):", "def loss(self, output, batch):\n        self.fail_on_rank_1()")
    change_recipe(
        "    def eval_data(self):",
        "    def fail_on_rank_1(self):\n"
        "        import os\n"
        "        if os.environ['RANK'] == '1':\n"
        "            raise ValueError('a mistake of the user')\n\n"
        "    def eval_data(self):",
    )
    with Launched(toy, TWO) as run:
        assert run.wait() == 2
        assert run.nothing_left()
    log = toy.output / "logs" / "rank_1.log"
    place = r"\S*toy_recipe\.py:\d+ in fail_on_rank_1"
    said = rf"shoal: error: rank 1: {place}: ValueError: a mistake of the user; traceback in {re.escape(str(log))}\n"
    assert re.fullmatch(said, run.err), run.err
    assert log.read_text().count("a mistake of the user") > 1
    assert "Traceback" in log.read_text()
