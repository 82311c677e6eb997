"""Asynchronous save: the file has the state at the time of the save, to the bit, whatever training does meanwhile."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import ToyRun
from pool import Pool
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shoal.checkpoint import async_save, open_checkpoint
from shoal.checkpoint.async_save import Saver
from shoal.checkpoint.pieces import write_safetensors
from shoal.config import load_run
from shoal.training import train
from shoal.types import TrainState


def sharded_state(scale: float = 1.0) -> TrainState:
    whole = torch.arange(35.0).view(7, 5) * scale
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = {
            "cut": distribute_tensor(whole, mesh, [Shard(0)]),
            "same": distribute_tensor(whole, mesh, [Replicate()]),
        }
    else:
        model = {"cut": whole.clone(), "same": whole.clone()}
    return TrainState(model, {"cut": {"step": torch.tensor(scale)}}, {"scale": torch.tensor(2.0)})


def write_and_change(folder: str) -> int:
    """Saves in the background and changes all tensors at once, as the next step would."""
    saver = Saver(background=True)
    state = sharded_state()
    saver.save(Path(folder), state, {"step": 1}, {})
    for tensor in [*state.model.values(), state.optimizer["cut"]["step"], state.strategy["scale"]]:
        tensor.mul_(-1)
    saver.wait()
    return sum(buffer.nbytes for buffer in saver._buffers.values())


def test_the_state_at_the_time_of_the_save_is_written(pool2: Pool, tmp_path: Path) -> None:
    staged = pool2.run(write_and_change, str(tmp_path / "two"))
    expected = sharded_state()
    read = open_checkpoint(tmp_path / "two").read()
    for name, tensor in expected.model.items():
        assert torch.equal(read.model[name], tensor)
    assert read.optimizer["cut"]["step"] == 1
    assert read.strategy["scale"] == 2
    assert sum(staged) == 2 * 35 * 4 + 8  # each tensor once, over both ranks


def test_buffers_are_allocated_once(tmp_path: Path) -> None:
    saver = Saver(background=True)
    addresses = []
    for step in (1, 2, 3):
        saver.save(tmp_path / f"{step}", sharded_state(step), {"step": step}, {})
        addresses.append({name: buffer.data_ptr() for name, buffer in saver._buffers.items()})
        saver.wait()
    assert addresses[0] == addresses[1] == addresses[2]
    assert torch.equal(open_checkpoint(tmp_path / "3").read().model["cut"], sharded_state(3).model["cut"])


def test_memory_that_was_reserved_is_what_the_first_save_copies_into(tmp_path: Path) -> None:
    saver = Saver(background=True)
    saver.reserve(sharded_state())
    assert saver._allocating is not None
    saver._allocating.join()
    reserved = {name: buffer.data_ptr() for name, buffer in saver._buffers.items()}
    assert sorted(reserved) == ["model/cut", "model/same", "optimizer/step/cut", "strategy/scale"]
    saver.save(tmp_path / "1", sharded_state(2.0), {"step": 1}, {})
    saver.wait()
    assert {name: buffer.data_ptr() for name, buffer in saver._buffers.items()} == reserved
    assert torch.equal(open_checkpoint(tmp_path / "1").read().model["cut"], sharded_state(2).model["cut"])
    wider = TrainState({"cut": torch.ones(9)}, {})  # another state than the one that memory was reserved for
    saver.save(tmp_path / "2", wider, {"step": 2}, {})
    saver.wait()
    assert torch.equal(open_checkpoint(tmp_path / "2").read().model["cut"], torch.ones(9))


@pytest.mark.parametrize("state", [sharded_state(), TrainState({"other": torch.ones(3)}, {})])
def test_memory_that_could_not_be_reserved_is_allocated_by_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: TrainState
) -> None:
    saver = Saver(background=True)

    def no_memory(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("no memory left")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", no_memory)
        saver.reserve(sharded_state())
        assert saver._allocating is not None
        saver._allocating.join()
        with pytest.raises(MemoryError, match="no memory left"):
            saver.save(tmp_path / "1", state, {"step": 1}, {})
    saver.save(tmp_path / "2", state, {"step": 2}, {})
    saver.wait()
    for name, tensor in state.model.items():
        assert torch.equal(open_checkpoint(tmp_path / "2").read().model[name], tensor)


ALLOCATING = """
import torch
from shoal.checkpoint.async_save import Saver
from shoal.types import TrainState

Saver(background=True).reserve(TrainState({str(i): torch.ones(2000) for i in range(4000)}, {}))
raise SystemExit(2)
"""


def test_a_program_that_fails_while_memory_is_reserved_ends_as_it_would() -> None:
    """Python ends a daemon in the middle of torch's code, which aborts the process."""
    assert subprocess.run([sys.executable, "-c", ALLOCATING], capture_output=True, check=False).returncode == 2


@pytest.mark.parametrize(
    ("keys", "times"),
    [
        (["checkpoint.async_save=true", "checkpoint.every=3"], 1),
        (["checkpoint.async_save=true", "checkpoint.every=null"], 0),  # it saves only at its end
        (["checkpoint.async_save=false", "checkpoint.every=3"], 0),
    ],
)
def test_a_run_reserves_memory_after_its_first_step(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch, keys: list[str], times: int
) -> None:
    reserved: list[set[str]] = []
    reserve = Saver.reserve

    def recorded(saver: Saver, state: TrainState) -> None:
        reserved.append(set(state.optimizer))
        reserve(saver, state)

    monkeypatch.setattr(Saver, "reserve", recorded)
    toy.train("training.max_steps=4", *keys)
    assert len(reserved) == times
    assert all(reserved)  # the optimizer has its state


def test_training_continues_and_the_next_save_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, order = threading.Event(), []
    publish = async_save.publish

    def slow(folder: Path, *args: Any) -> None:
        disk.wait(20)
        publish(folder, *args)
        order.append(folder.name)

    monkeypatch.setattr(async_save, "publish", slow)
    saver = Saver(background=True)
    saver.save(tmp_path / "1", sharded_state(1), {"step": 1}, {})
    assert not (tmp_path / "1").exists()
    threading.Timer(0.3, disk.set).start()
    saver.save(tmp_path / "2", sharded_state(2), {"step": 2}, {})
    assert order[:1] == ["1"]  # one save at a time; the second may be through, too
    saver.wait()
    assert order == ["1", "2"]


def save_into_a_file(folder: str) -> list[str]:
    saver = Saver(background=True)
    blocked = Path(folder) / "file"
    if dist.get_rank() == 0:
        blocked.write_text("not a folder")
    dist.barrier()
    saver.save(blocked / "step", sharded_state(), {"step": 1}, {})
    raised = []
    try:
        saver.wait()
    except OSError as error:
        raised.append(type(error).__name__)
    saver.save(Path(folder) / "good", sharded_state(), {"step": 2}, {})
    saver.wait()
    return raised


def test_an_error_is_raised_on_every_rank_and_the_next_save_works(pool2: Pool, tmp_path: Path) -> None:
    assert pool2.run(save_into_a_file, str(tmp_path)) == [["NotADirectoryError"]] * 2
    open_checkpoint(tmp_path / "good").read()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]
)
def test_safetensors_reads_files_of_our_writer(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = {
        "odd": (torch.randn(3, 5) * 10).to(dtype),
        "ünï": (torch.randn(1) * 10).to(dtype),
        "empty": torch.empty(0, 4, dtype=dtype),
        "scalar": torch.tensor(1).to(dtype),
        "other type": torch.randn(7),
        "transposed": (torch.randn(4, 6) * 10).to(dtype).T,
    }
    about, _ = write_safetensors(tmp_path / "x.safetensors", tensors)
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert read[name].view(-1).view(torch.uint8).tolist() == tensor.contiguous().view(-1).view(torch.uint8).tolist()
    assert about["bytes"] == (tmp_path / "x.safetensors").stat().st_size


def run_training(config: Path, overrides: list[str]) -> int:
    return train(load_run(config, overrides)).step


def test_ranks_of_a_model_with_buffers_save_in_the_background(
    toy: ToyRun, pool2: Pool, change_recipe: Callable[[str, str], None]
) -> None:
    """The report of rank 0 about memory must not start a collective, which collecting a state with buffers does."""
    change_recipe("nn.Tanh()", "nn.BatchNorm1d(hidden), nn.Tanh()")
    keys = ["training.global_batch_size=8", "checkpoint.async_save=true", "training.max_steps=2"]
    assert pool2.run(run_training, toy.config, keys, init=False) == [2, 2]
    assert re.search(r"background from \d\.\d\d GiB", (toy.output / "report.txt").read_text())
