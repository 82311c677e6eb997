"""What a sharded layout saves is what any other finds, parameters and moments, to the bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ToyRun
from pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from shoal.checkpoint import open_checkpoint, write_checkpoint
from shoal.checkpoint.regions import held_of
from shoal.config import load_run
from shoal.errors import UserError
from shoal.strategies.state import collect_state, restore_state
from shoal.training import train
from shoal.types import TrainState


class Net(nn.Module):
    """Rows that do not divide, fewer rows than ranks, a buffer, a tied weight, and one that is never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 7)
        self.narrow = nn.Linear(7, 2)
        self.again = nn.Linear(7, 2, bias=False)
        self.again.weight = self.narrow.weight
        self.frozen = nn.Parameter(torch.zeros(3, 3), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x).tanh()
        return self.narrow(hidden) + self.again(hidden)


def build(seed: int) -> Net:
    model = Net()
    torch.manual_seed(seed)
    for tensor in (*model.parameters(), *model.buffers()):
        nn.init.normal_(tensor)
    return model


def shard(model: nn.Module, sides: tuple[int, ...]) -> nn.Module:
    mesh = init_device_mesh("cpu", sides, mesh_dim_names=("replicate", "shard")[-len(sides) :])
    fully_shard(model.get_submodule("body"), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def local_parts(model: nn.Module) -> Iterator[nn.Parameter]:
    """As sharded layouts give them to an optimizer: plain tensors in the memory of the DTensors."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            assert isinstance(parameter, DTensor)
            part = nn.Parameter(parameter.detach().to_local())
            part.shard_of = parameter  # type: ignore[attr-defined]
            yield part


def take_steps(model: nn.Module, optimizer: Optimizer, count: int = 2) -> None:
    for step in range(count):
        torch.manual_seed(step)
        model(torch.randn(4, 5)).square().mean().backward()
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if (whole := getattr(parameter, "shard_of", None)) is not None:
                parameter.grad = whole.grad.to_local()
        optimizer.step()
        model.zero_grad()


def whole(state: TrainState) -> dict[str, Any]:
    moments = {f"{slot}/{name}": t for name, slots in state.optimizer.items() for slot, t in slots.items()}
    full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in {**state.model, **moments}.items()}
    return {name: tensor.detach().numpy().copy() for name, tensor in full.items()}


def save_sharded(folder: Path, sides: tuple[int, ...]) -> dict[str, Any]:
    model = shard(build(1), sides)
    optimizer = AdamW([*local_parts(model)], fused=True)
    take_steps(model, optimizer)
    state = collect_state(model, optimizer, {"scale": torch.tensor(8.0)})
    write_checkpoint(folder, state, {"step": 2}, {})
    return whole(state)


def load_sharded(folder: Path, sides: tuple[int, ...], from_memory: bool = False) -> dict[str, Any]:
    """Reads into other weights, and says what came of it and of one step more."""
    model = shard(build(2), sides)
    optimizer = AdamW([*local_parts(model)], fused=True)
    before = [*model.parameters()]
    checkpoint = open_checkpoint(folder)
    tensors = collect_state(model, optimizer, {}).model
    here = held_of(tensors)
    state = checkpoint.read() if from_memory else checkpoint.checked_state(here)
    scale = torch.zeros(())
    restore_state(model, optimizer, {"scale": scale}, state)
    assert scale == 8
    assert all(own is after for own, after in zip(before, model.parameters(), strict=True))
    for part in local_parts(model):  # the optimizer's parts are still the model's memory
        assert any(part.data_ptr() == own.data_ptr() for own in optimizer.param_groups[0]["params"])
    for parameter, slots in optimizer.state.items():
        assert slots["exp_avg"].shape == parameter.shape
        assert slots["exp_avg"].device == parameter.device
    result = whole(collect_state(model, optimizer, {}))
    take_steps(model, optimizer, 1)
    return {"restored": result, "later": whole(collect_state(model, optimizer, {}))}


def load_alone(folder: Path) -> dict[str, Any]:
    model = build(2)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    restore_state(model, optimizer, {}, open_checkpoint(folder).stored_state())
    result = whole(collect_state(model, optimizer, {}))
    take_steps(model, optimizer, 1)
    return {"restored": result, "later": whole(collect_state(model, optimizer, {}))}


def assert_same(first: dict[str, Any], second: dict[str, Any], tolerance: float = 0) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(
            torch.as_tensor(tensor), torch.as_tensor(second[name]), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize(("size", "sides"), [(2, (2,)), pytest.param(4, (4,), marks=pytest.mark.slow), (4, (2, 2))])
def test_fsdp_saves_for_everyone(tmp_path: Path, pool2: Pool, pool4: Pool, size: int, sides: tuple[int, ...]) -> None:
    pool = {2: pool2, 4: pool4}[size]
    saved, *others = pool.run(save_sharded, tmp_path / "saved", sides)
    for other in others:
        assert_same(saved, other)
    assert {"exp_avg/body.weight", "exp_avg_sq/narrow.bias", "step/body.bias", "frozen", "seen"} <= saved.keys()
    assert "again.weight" not in saved
    alone = load_alone(tmp_path / "saved")
    assert_same(alone["restored"], saved)
    others = [
        *pool2.run(load_sharded, tmp_path / "saved", (2,)),
        *pool4.run(load_sharded, tmp_path / "saved", (4,)),
        *pool4.run(load_sharded, tmp_path / "saved", (2, 2), from_memory=True),
    ]
    for result in others:
        assert_same(result["restored"], saved)
        assert_same(result["later"], alone["later"], 1e-5)


def test_fsdp_opens_what_one_device_saved(tmp_path: Path, pool4: Pool) -> None:
    model = build(1)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    take_steps(model, optimizer)
    state = collect_state(model, optimizer, {"scale": torch.tensor(8.0)})
    write_checkpoint(tmp_path / "saved", state, {"step": 2}, {})
    for result in pool4.run(load_sharded, tmp_path / "saved", (4,)):
        assert_same(result["restored"], whole(state))


def test_slots_that_were_not_saved_are_gone(tmp_path: Path) -> None:
    """Also those of a checkpoint that turned out damaged."""
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), momentum=0.9)
    fresh = collect_state(model, optimizer, {})
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert collect_state(model, optimizer, {}).optimizer
    restore_state(model, optimizer, {}, fresh)
    assert collect_state(model, optimizer, {}).optimizer == {}


def test_what_is_restored_is_not_the_file(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    write_checkpoint(tmp_path / "saved", collect_state(model, optimizer, {}), {}, {})
    restore_state(model, optimizer, {}, open_checkpoint(tmp_path / "saved").stored_state())
    file = tmp_path / "saved" / "optimizer.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    assert all(slots["momentum_buffer"].any() for slots in optimizer.state.values())


# Damage, seen through a run

KEYS = ["distributed.strategy=fsdp", "training.global_batch_size=8", "training.batch_size=4", "checkpoint.keep_last=9"]


def train_here(config: Path, overrides: list[str]) -> tuple[int, int]:
    outcome = train(load_run(config, overrides))
    return outcome.first_step, outcome.step


def refused(config: Path, overrides: list[str]) -> str:
    try:
        train(load_run(config, overrides))
    except UserError as error:
        return str(error)
    return "trained"


def flip(folder: Path, file: str) -> None:
    data = bytearray((folder / file).read_bytes())
    data[-1] ^= 1
    (folder / file).write_bytes(data)


def test_a_piece_that_one_rank_cannot_read_is_passed_over_by_all(toy: ToyRun, pool2: Pool) -> None:
    keys = [*KEYS, "training.max_steps=4"]
    assert pool2.run(train_here, toy.config, keys, init=False) == [(0, 4)] * 2
    steps = toy.output / "checkpoints"
    flip(steps / "step_00000004", "optimizer-00002-of-00002.safetensors")
    assert pool2.run(train_here, toy.config, [*KEYS, "training.max_steps=6"], init=False) == [(2, 6)] * 2
    for step in (2, 4, 6):
        flip(steps / f"step_{step:08d}", "model-00001-of-00002.safetensors")
    before = sorted(path.name for path in steps.iterdir())
    first, second = pool2.run(refused, toy.config, keys, init=False)
    for result in (first, second):
        assert "all 3 checkpoints" in result
        assert str(steps) in result
        assert "choose another experiment.output_dir" in result
        assert "\n" not in result
    assert "does not match its digest" in first
    assert "another rank cannot read it" in second
    assert sorted(path.name for path in steps.iterdir()) == before


def test_the_one_checkpoint_asked_for_is_used_or_none(toy: ToyRun) -> None:
    toy.train("checkpoint.keep_last=9", "training.max_steps=4")
    asked = toy.output / "checkpoints" / "step_00000004"
    flip(asked, "model.safetensors")
    with pytest.raises(UserError, match=r"step_00000004 in .* cannot be used .*does not match its digest") as caught:
        toy.train(f"checkpoint.resume={asked}", f"experiment.output_dir={toy.folder}/other")
    assert f"checkpoint.resume = {asked}" in str(caught.value)
    # Of a run's folder the newest good one.
    outcome = toy.train(f"checkpoint.resume={toy.output}", f"experiment.output_dir={toy.folder}/other")
    assert (outcome.first_step, outcome.step) == (2, 10)


def refused_elsewhere(config: Path, overrides: list[str], elsewhere: Path) -> str:
    """Rank 1 runs in another folder, as on a disk that machines do not share."""
    folder = [f"experiment.output_dir={elsewhere}"] if os.environ["RANK"] == "1" else []
    return refused(config, [*overrides, *folder])


def test_ranks_that_see_other_checkpoints_do_not_train(toy: ToyRun, pool2: Pool) -> None:
    keys = [*KEYS, "training.max_steps=2"]
    pool2.run(train_here, toy.config, keys, init=False)
    for result in pool2.run(refused_elsewhere, toy.config, keys, toy.folder / "elsewhere", init=False):
        assert "not all ranks see the same checkpoints" in result
