"""Weights from safetensors: every rank reads its part, and parameters that are in no file are drawn."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.errors import UserError
from shoal.strategies import DDPStrategy, FSDPStrategy, SingleStrategy
from shoal.types import ParallelPlan, Weights
from shoal.weights import build, materialise
from shoal.weights.conversion import Concatenate, FileTensor, Source, Stack, Transpose, open_safetensors
from shoal.weights.from_files import weight_files


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.between, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.empty(4))


def test_weights_from_files(tmp_path: Path) -> None:
    torch.manual_seed(3)
    stored = {name: torch.randn_like(tensor) for name, tensor in Tied().state_dict().items() if name != "head.weight"}
    save_file({**stored, "rest": torch.zeros(2)}, tmp_path / "a.safetensors")
    weights_in_files = Weights("files", files=(tmp_path / "a.safetensors",))
    model, weights = build(Tied, weights_in_files, seed=0)
    assert weights.reason == "1 tensors in them are unused: rest"
    assert all(parameter.is_meta for parameter in model.parameters())
    materialise(model, torch.device("cpu"), 0, weights)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in stored.items())
    for broken, words in (
        ({**stored, "scale": torch.zeros(5)}, r"scale has shape \[5\], but \[4\]"),
        ({name: t for name, t in stored.items() if name != "scale"}, "has no tensor 'scale'"),
    ):
        save_file(broken, tmp_path / "a.safetensors")
        with pytest.raises(UserError, match=words):
            build(Tied, weights_in_files, seed=0)
    (tmp_path / "a.safetensors").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        build(Tied, weights_in_files, seed=0)


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 5).requires_grad_(False)
        self.half = nn.Linear(6, 5)  # only its bias is in the file
        self.down, self.up = nn.Linear(6, 3, bias=False), nn.Linear(3, 5, bias=False)


def reset_one(model: nn.Module, module: Any) -> None:
    module.reset_parameters()


def first_weights(kind: str, path: Path) -> dict[str, Tensor]:
    strategy = {"single": SingleStrategy, "ddp": DDPStrategy, "fsdp": FSDPStrategy}[kind](device="cpu", seed=3)
    with strategy:
        model, weights = build(Adapted, Weights("files", files=(path,), reset=reset_one), 3)
        trained = lambda m: torch.optim.SGD([p for p in m.parameters() if p.requires_grad])  # noqa: E731
        model, optimizer = strategy.prepare(model, trained, ParallelPlan(), weights)
        state = strategy.state(model, optimizer).model
        return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in state.items()}


def test_parameters_in_no_file_are_drawn_the_same_on_every_layout(tmp_path: Path, pool2: Pool) -> None:
    stored = {"base.weight": torch.randn(5, 6), "base.bias": torch.randn(5), "half.bias": torch.randn(5)}
    path = tmp_path / "weights.safetensors"
    save_file(stored, path)
    single = first_weights("single", path)
    assert all(torch.equal(single[name], tensor) for name, tensor in stored.items())
    assert single["down.weight"].any()
    for kind in ("ddp", "fsdp"):
        for read in pool2.run(first_weights, kind, path, init=False):
            assert all(torch.equal(read[name], tensor) for name, tensor in single.items()), kind
    with pytest.raises(UserError, match=r"no tensor 'half\.weight'"):
        build(Adapted, Weights("files", files=(path,)), 3)
    del stored["base.bias"]  # a frozen parameter must not be drawn: training would never change it
    save_file(stored, path)
    with pytest.raises(UserError, match=r"no tensor 'base\.bias'"):
        build(Adapted, Weights("files", files=(path,), reset=reset_one), 3)


class Experts(nn.Module):
    """Has four experts in one tensor (expert, row, column), and a layer whose weight is transposed in the files."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(4, 6, 5))
        self.layer = nn.Linear(3, 2)
        self.register_buffer("table", torch.zeros(2))

    def forward(self) -> Tensor:
        return self.gate_up.sum() + self.layer(torch.ones(3)).sum()


EXPERT_SOURCES: dict[str, Source] = {
    "gate_up": Concatenate(
        tuple(Stack(tuple(FileTensor(f"expert.{i}.{kind}") for i in range(4))) for kind in ("gate", "up")), dim=1
    ),
    "layer.weight": Transpose((FileTensor("layer.weight"),), 0, 1),
    "layer.bias": FileTensor("b"),
    "table": FileTensor("table"),
}


def read_experts(kind: str, path: Path) -> dict[str, Tensor]:
    with {"single": SingleStrategy, "fsdp": FSDPStrategy}[kind](device="cpu") as strategy:
        model, weights = build(Experts, Weights("files", files=(path,), sources=EXPERT_SOURCES), 0)
        model, optimizer = strategy.prepare(model, lambda m: torch.optim.SGD(m.parameters()), ParallelPlan(), weights)
        state = strategy.state(model, optimizer).model
        return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in state.items()}


def test_tensors_are_made_from_several_in_the_files(tmp_path: Path, pool2: Pool) -> None:
    stored = {f"expert.{i}.{kind}": torch.randn(3, 5) for i in range(4) for kind in ("gate", "up")}
    stored |= {"layer.weight": torch.randn(3, 2), "b": torch.randn(2), "table": torch.ones(2), "rest": torch.zeros(1)}
    path = tmp_path / "weights.safetensors"
    save_file(stored, path)
    gates, ups = (torch.stack([stored[f"expert.{i}.{kind}"] for i in range(4)]) for kind in ("gate", "up"))
    expected = {
        "gate_up": torch.cat((gates, ups), 1),
        "layer.weight": stored["layer.weight"].T,
        "layer.bias": stored["b"],
        "table": stored["table"],
    }
    weights_in_files = Weights("files", files=(path,), sources=EXPERT_SOURCES)
    assert build(Experts, weights_in_files, 0)[1].reason == "1 tensors in them are unused: rest"
    for read in (read_experts("single", path), *pool2.run(read_experts, "fsdp", path, init=False)):
        assert read.keys() == expected.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())
    for broken, words in (
        ({"expert.2.up": None}, r"has no tensor 'expert\.2\.up'"),
        ({"expert.2.up": torch.zeros(4, 5)}, r"gate_up cannot be made from expert\.0\.gate, expert\.0\.up"),
        ({"layer.weight": torch.zeros(2, 3)}, r"layer\.weight has shape \[3, 2\], but \[2, 3\]"),
    ):
        save_file({name: t for name, t in {**stored, **broken}.items() if t is not None}, path)
        with pytest.raises(UserError, match=words) as caught:
            build(Experts, weights_in_files, 0)
        assert "\n" not in str(caught.value)
    without_bias = {name: source for name, source in EXPERT_SOURCES.items() if name != "layer.bias"}
    save_file(stored, path)
    with pytest.raises(UserError, match=r"has no tensor 'layer\.bias'"):
        build(Experts, Weights("files", files=(path,), sources=without_bias), 0)


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="is not a regular file but a pipe"):
        open_safetensors(tmp_path / "model.safetensors")
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    with pytest.raises(UserError, match="is damaged"):
        weight_files(tmp_path, "model.name", "save it again")
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b\\u0000"}}')
    with pytest.raises(UserError, match="not in its folder"):
        weight_files(tmp_path, "model.name", "save it again")
