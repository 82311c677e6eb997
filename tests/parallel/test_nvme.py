"""What DeepSpeed keeps on a disk: whose folder it is, and that training does not notice."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from strategies.test_fsdp import whole
from torch import Tensor, nn
from verify.planted import Ragged, Words

from shoal.config.schema import TrainingConfig
from shoal.data import BatchSchedule, Loader
from shoal.errors import UserError
from shoal.parallel.zero.nvme import SwapFolder
from shoal.strategies import DeepSpeedStrategy, DistributedStrategy, SingleStrategy
from shoal.training.optimizers import build_optimizer
from shoal.types import ParallelPlan
from shoal.weights import build

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="the package deepspeed is not installed")
WIDTH = 1024  # files are for a megabyte and more


def test_a_folder_goes_with_its_process(tmp_path: Path) -> None:
    live = SwapFolder(str(tmp_path), "key")
    code = f"""
import time
from shoal.parallel.zero.nvme import SwapFolder
own = SwapFolder({str(tmp_path)!r}, "key")
print(flush=True)
time.sleep(99)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        (left,) = {*tmp_path.glob("shoal-zero-*")} - {live.path}
        second = SwapFolder(str(tmp_path), "key")
        assert left.exists()
        other.send_signal(signal.SIGKILL)
    second.remove()
    third = SwapFolder(str(tmp_path), "key")
    assert {*tmp_path.glob("shoal-zero-*")} == {live.path, third.path}
    third.remove()
    live.remove()
    assert not [*tmp_path.glob("shoal-zero-*")]


def test_a_place_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"key = .*/nowhere: there is no such folder; make it on a local disk, or use"):
        SwapFolder(f"{tmp_path}/nowhere", "key")


def test_a_place_without_room(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"GiB are free and the ranks of this machine need 1\.05e\+06; make room, or"):
        SwapFolder(str(tmp_path), "key", needed=2**50)
    assert not [*tmp_path.glob("shoal-zero-*")]


@needs_deepspeed
def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with (
        pytest.raises(UserError, match=r"offload_optimizer on a disk needs a C\+\+ compiler"),
        DeepSpeedStrategy(device="cpu", stage=3, offload_optimizer=str(tmp_path)) as strategy,
    ):
        strategy.prepare(nn.Linear(2, 2), lambda m: torch.optim.SGD(m.parameters(), lr=0.1), ParallelPlan())


class Broad(Ragged):
    def build_model(self) -> nn.Module:
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        layers[1].requires_grad_(False)
        return nn.Sequential(nn.Embedding(13, WIDTH), *layers, nn.Linear(WIDTH, 13))


def there_and_back(strategy: DistributedStrategy) -> tuple[list[str], list[dict[str, Any]]]:
    """What is on the disk after two steps, and the weights and moments after two more: at once, from a state that was
    taken between them, and from it in an engine that is new.
    """
    recipe, training = Broad(), TrainingConfig(max_steps=1, learning_rate=1e-2)
    with strategy:

        def start() -> tuple[nn.Module, torch.optim.Optimizer]:
            model, weights = build(recipe.build_model, recipe.weights(), seed=0)
            make = lambda m: build_optimizer(training, recipe.param_groups(m))  # noqa: E731
            return strategy.prepare(model, make, recipe.parallel_plan(model), weights)

        rank, size = strategy.data_rank, strategy.data_size
        loader = Loader(Words(), recipe.collate, BatchSchedule.constant(11, 2), seed=0, data_rank=rank, data_size=size)
        batches = [batch for batch, _ in zip(loader, range(4), strict=False)]

        def go(first: int) -> dict[str, Any]:
            for step in (first, first + 1):
                strategy.forward_backward(model, batches[step], recipe, step)
                strategy.step(optimizer, 0.5)
            state = strategy.state(model, optimizer)
            moments = {f"{n}/{slot}": t for n, slots in state.optimizer.items() for slot, t in slots.items()}
            return {name: whole(tensor) for name, tensor in (state.model | moments).items()}

        model, optimizer = start()
        go(0)
        folders = getattr(strategy, "_folders", {}).values()
        files = [path.name for folder in folders for path in folder.path.rglob("*.swp")]
        between = strategy.state(model, optimizer)
        for slots in (between.model, *between.optimizer.values()):
            slots.update({name: _copy(tensor) for name, tensor in slots.items()})
        ends = [go(2)]
        strategy.load_state(model, optimizer, between)
        ends.append(go(2))
        model, optimizer = start()
        strategy.load_state(model, optimizer, between)
        ends.append(go(2))
    return files, ends


def _copy(tensor: Tensor) -> Tensor:
    return torch.from_numpy(whole(tensor))


def on_disk(options: dict[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    options = {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 2**20, **options}
    return there_and_back(DeepSpeedStrategy(device="cpu", **options))


@pytest.fixture
def async_io() -> None:
    """Skips a test where DeepSpeed's asynchronous I/O, which is compiled at its first use, cannot be."""
    pytest.importorskip("deepspeed")
    from deepspeed.accelerator import get_accelerator

    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("NVMe offload is NOT TESTED: there is no C++ compiler; install g++")
    if not get_accelerator().create_op_builder("AsyncIOBuilder").is_compatible(verbose=False):
        pytest.skip("NVMe offload is NOT TESTED: libaio is missing; install libaio-dev")


@pytest.mark.usefixtures("async_io")
@pytest.mark.slow
@pytest.mark.timeout(1800)  # an operator is compiled first
@pytest.mark.parametrize(
    ("optimizer", "parameters"), [("disk", "none"), ("disk", "disk"), ("cpu", "disk"), ("disk", "cpu")]
)
def test_what_is_on_a_disk_trains_as_in_memory(pool2: Pool, tmp_path: Path, optimizer: str, parameters: str) -> None:
    places = {"disk": str(tmp_path), "cpu": "cpu", "none": "none"}
    _, (alone, *_) = there_and_back(SingleStrategy(device="cpu"))
    ranks = pool2.run(
        on_disk,
        {"offload_optimizer": places[optimizer], "offload_parameters": places[parameters]},
        init=False,
        timeout=1500,
    )
    for files, ends in ranks:
        assert any(name.startswith("exp_avg_sq-") for name in files) == (optimizer == "disk")
        assert any(name.endswith("_param.tensor.swp") for name in files) == (parameters == "disk")
        for end in ends:
            assert {*end} == {*alone}
            assert all((end[name] == ends[0][name]).all() for name in end)  # to the bit
            assert max(abs(end[name] - alone[name]).max() for name in end) < 2e-5
    assert not [*tmp_path.glob("shoal-zero-*")]
