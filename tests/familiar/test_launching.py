"""Functions on several machines, scripts by torchrun, and signatures that say the right call."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import nn

import shoal.distributed as plain
from shoal import CheckpointManager, FSDPStrategy, PipelineParallelModel
from shoal.errors import UserError
from shoal.launch import spawn
from shoal.processes.detect import nodes_by_hand, world_by_number


def ranks() -> tuple[int, list[float]]:
    mine = plain.setup_distributed(device="cpu")
    everyone = torch.zeros(mine.world_size)
    everyone[mine.rank] = 1 + mine.local_rank
    dist.all_reduce(everyone)
    return mine.rank, everyone.tolist()


def launch_as_machine() -> list[Any]:
    """Does what a user does by hand on one of two machines."""
    os.environ["NODE_RANK"] = os.environ.pop("RANK")
    del os.environ["LOCAL_RANK"]
    return plain.launch_distributed(ranks, processes=1, start_method="fork")


def test_a_function_takes_its_machines_from_the_environment(pool2: Pool) -> None:
    """MASTER_ADDR, MASTER_PORT and WORLD_SIZE are there; NODE_RANK says which machine it is."""
    both = [1.0, 1.0]
    assert pool2.run(launch_as_machine, init=False) == [[(0, both)], [(1, both)]]


def test_which_machine_this_is() -> None:
    place = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "8", "NODE_RANK": "1"}
    node = nodes_by_hand(4, place)
    assert (node.rank, node.size, node.address, node.port) == (1, 2, "10.0.0.1", 29500)
    assert nodes_by_hand(4, {}).size == 1
    with pytest.raises(UserError, match="WORLD_SIZE=8: it counts processes, and is not a multiple of"):
        nodes_by_hand(3, place)


def test_processes_that_a_script_numbers_itself() -> None:
    world = world_by_number(1, 2, {})
    assert (world.rank, world.size, world.local_rank, world.address, world.port) == (1, 2, 1, "127.0.0.1", 29500)
    there = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    world = world_by_number(1, 2, there)
    assert (world.local_rank, world.local_size, world.address, world.port) == (0, 1, "10.0.0.1", 1234)
    assert world_by_number(0, 1, {}).size == 1
    started = {**there, "RANK": "0", "WORLD_SIZE": "2"}
    with pytest.raises(UserError, match="rank = 1, world_size = 2: RANK and LOCAL_RANK says 0 of 2"):
        world_by_number(1, 2, started)
    with pytest.raises(UserError, match="rank = 2, world_size = 2: ranks count from 0"):
        world_by_number(2, 2, {})


SCRIPT = """
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("--config")
config = parser.parse_args().config
open(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", "w").write(config)
"""


@pytest.mark.slow
def test_a_script_is_run_by_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(SCRIPT)
    Path("config.yaml").write_text("")
    plain.launch_distributed("script.py", "config.yaml", num_nodes=1, gpus_per_node=2)
    assert sorted(path.name for path in tmp_path.glob("rank *")) == ["rank 0 of 2", "rank 1 of 2"]
    assert Path("rank 1 of 2").read_text() == "config.yaml"
    Path("script.py").write_text("raise SystemExit(3)")
    with pytest.raises(RuntimeError, match=r"script\.py ended with exit code 1"):
        plain.launch_distributed(Path("script.py"), gpus_per_node=1)


def test_the_command_of_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    (tmp_path / "run.yaml").touch()
    commands: list[list[str]] = []

    def run(command: list[str], check: bool) -> Any:
        commands.append(command[3:])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    plain.launch_distributed("script.py", "run.yaml", num_nodes=1, gpus_per_node=8)
    plain.launch_distributed("script.py", gpus_per_node=2, master_addr="localhost", master_port=29501)
    monkeypatch.setenv("NODE_RANK", "1")
    plain.launch_distributed("script.py", "run.yaml", num_nodes=2, master_addr="10.0.0.1", master_port=29500)
    assert commands == [
        ["--standalone", "--nproc_per_node=8", "script.py", "--config", "run.yaml"],
        ["--master_addr=localhost", "--master_port=29501", "--nproc_per_node=2", "script.py"],
        [
            *("--nnodes=2", "--node_rank=1", "--master_addr=10.0.0.1", "--master_port=29500"),
            *("--nproc_per_node=8", "script.py", "--config", "run.yaml"),
        ],
    ]
    with pytest.raises(UserError, match="no such file"):
        plain.launch_distributed("script.py", "nowhere.yaml")


MISTAKES: dict[str, tuple[Any, str]] = {
    "a backend by position": (lambda: plain.setup_distributed("nccl"), r"write backend=… or device=…"),
    "a rank alone": (lambda: plain.setup_distributed(1), r"setup_distributed\(rank, world_size\)"),
    "a path first": (
        lambda: plain.save_checkpoint_distributed("out", nn.Linear(1, 1), None, 1, CheckpointManager("out")),
        r"call it with \(model, optimizer, scaler, step, checkpoint_manager\)",
    ),
    "a path first in load": (
        lambda: plain.load_checkpoint_distributed("out", nn.Linear(1, 1), None, "out"),
        r"call it with \(model, optimizer, scaler, checkpoint_path\)",
    ),
    "a model without optimizer": (lambda: plain.auto_resume("out", nn.Linear(1, 1)), r"auto_resume\(config, trainer\)"),
    "a config without a folder": (lambda: plain.auto_resume({}, object()), "has no output_dir; give the folder itself"),
    "torch's sampler": (
        lambda: plain.DistributedSampler([1, 2], 2, 0, 1),  # type: ignore[arg-type]
        r"write DistributedSampler\(len\(dataset\), batch_size, rank, world_size\), or use torch's",
    ),
    "a bias by position": (lambda: plain.ColumnParallelLinear(4, 8, False), "is the world size; write bias=False"),
    "layers without a factory": (lambda: PipelineParallelModel(num_layers=4), "needs layer=function"),
    "no strategy": (
        lambda: CheckpointManager("out").save({"a": 1}, 1, model=None, optimizer=None),
        r"call save\(strategy, step, model=model, optimizer=optimizer\)",
    ),
    "a policy that is none": (
        lambda: FSDPStrategy(auto_wrap_policy=3),
        "give a set of module classes, 'transformer_based'",
    ),
    "classes that are none": (lambda: FSDPStrategy(activation_checkpointing_policy=3), "give a set of module classes"),
    "a number to launch": (lambda: plain.launch_distributed(3), r"launch_distributed\('train.py', 'run.yaml'\)"),  # type: ignore[arg-type]
    "two configs": (
        lambda: plain.launch_distributed("a.py", "b", "c"),
        r"launch_distributed\(script, config, num_nodes=1",
    ),
    "a config of no kind": (
        lambda: FSDPStrategy(3),
        "config is a int; give a dict of sections, or the path of a config",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_signature_that_is_another_one_says_the_right_call(name: str) -> None:
    call, words = MISTAKES[name]
    with pytest.raises(TypeError, match=words) as error:
        call()
    assert "\n" not in str(error.value)


REFUSED: dict[str, tuple[Any, str]] = {
    "a world size that does not divide": (
        lambda: plain.ColumnParallelLinear(4, 9, 2),
        r"ColumnParallelLinear\(world_size=2\): it does not divide the 9 out_features",
    ),
    "heads that do not divide": (
        lambda: plain.TensorParallelAttention(12, 3, 2),
        "does not divide the 3 key/value heads",
    ),
    "more GPUs than processes": (
        lambda: PipelineParallelModel(num_layers=4, num_gpus=4, layer=lambda: nn.Linear(1, 1)),
        "num_gpus = 4: there are 1 processes, and every stage needs one; start 4 by torchrun",
    ),
    "workers that are not seeded": (
        lambda: plain.seed_everything(1, workers=False),
        "torch seeds the workers of a DataLoader",
    ),
    "more micro-batches than samples": (
        lambda: PipelineParallelModel([nn.Linear(1, 1)])(torch.ones(2, 1), num_microbatches=3),
        "num_microbatches = 3: use 1 to 2, which is the number of samples",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused(name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises(UserError, match=words) as error:
        call()
    assert "\n" not in str(error.value)


def test_one_process_is_a_pipeline_of_one_stage() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 1)]
    model, x, y = PipelineParallelModel(layers, num_gpus=1, device="cpu"), torch.randn(6, 4), torch.zeros(6, 1)
    torch.testing.assert_close(model(x, num_microbatches=4), layers[1](layers[0](x)))
    loss = model.forward_backward(x, y, nn.functional.mse_loss, num_microbatches=4)  # of 2, 2, 1 and 1 samples
    gradient = layers[0].weight.grad.clone()
    model.zero_grad()
    expected = nn.functional.mse_loss(model(x, 1), y)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, layers[0].weight.grad)


def delays_ctrl_c() -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def launch_and_note_events() -> list[str]:
    """Calls a function in two forked processes, and returns what was started in which order."""
    for name in [name for name in os.environ if name.endswith("RANK")]:
        del os.environ[name]
    events: list[str] = []
    start, open_board = ForkProcess.start, spawn.open_board

    def note_start(self: Any) -> None:
        events.append("process, Ctrl-C delayed" if delays_ctrl_c() else "process")
        start(self)

    def note_board(*args: Any, **options: Any) -> Any:
        events.append("board")
        return open_board(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForkProcess, "start", note_start)
        patch.setattr(spawn, "open_board", note_board)
        assert plain.launch_distributed(delays_ctrl_c, processes=2, start_method="fork") == [False, False]
    assert not delays_ctrl_c()
    return events


def test_no_process_is_forked_while_others_connect(pool2: Pool) -> None:
    """It could inherit a lock that the thread of the board holds, and would wait for it forever.

    Ctrl-C does not reach a process before it can handle that.
    """
    process = "process, Ctrl-C delayed"
    assert pool2.run(launch_and_note_events, init=False)[0] == [process, process, "board"]


def leave() -> None:
    sys.exit(0)


def test_a_process_that_exits_without_a_result_is_an_error(pool2: Pool) -> None:
    assert pool2.run(launch_and_leave, init=False)[0] == "rank 0 called sys.exit(0) before it returned"


def launch_and_leave() -> str:
    for name in [name for name in os.environ if name.endswith("RANK")]:
        del os.environ[name]
    with pytest.raises(RuntimeError) as caught:
        plain.launch_distributed(leave, processes=1, start_method="fork")
    return str(caught.value)
