"""The same start everywhere: weights drawn by name, on meta first, or built where that would change the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.errors import UserError
from shoal.models.bdh import BDH, BDHConfig
from shoal.strategies import DDPStrategy, FSDPStrategy, SingleStrategy
from shoal.types import ParallelPlan, Weights
from shoal.weights import build, materialise

INIT = Weights("init")
CPU = torch.device("cpu")


def start(make: type[nn.Module] | object, seed: int = 0) -> tuple[nn.Module, Weights]:
    model, weights = build(make, INIT, seed)  # type: ignore[arg-type]
    materialise(model, CPU, seed)
    return model, weights


class Positions(nn.Module):
    """A table computed in a constructor: garbage after meta and to_empty."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(5.0).sin(), persistent=False)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.positions = Positions()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8) for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7)


def test_no_parameter_memory_before_materialising() -> None:
    model, weights = build(Small, INIT, 0)
    assert weights.kind == "init"
    assert all(p.is_meta for p in model.parameters())
    assert torch.equal(model.positions.table, torch.arange(5.0).sin())  # type: ignore[union-attr]


def test_every_parameter_is_drawn_as_its_constructor_would() -> None:
    model, _ = start(Small)
    torch.manual_seed(0)
    plain = Small()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert not ours.is_meta
        assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.6, abs=1e-6), name
        assert (ours.std() == 0) == (theirs.std() == 0), name
    # What a parent does to its children comes after their own: attention zeroes its projection's bias.
    assert not model.blocks[0].self_attn.out_proj.bias.any()  # type: ignore[union-attr,index]


def test_weights_depend_on_seed_and_name_alone() -> None:
    one, again, other = start(Small)[0], start(Small)[0], start(Small, seed=1)[0]
    for (name, a), b, c in zip(one.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        if a.std() > 0:
            assert not torch.equal(a, c), name

    class Wider(Small):
        def __init__(self) -> None:
            super().__init__()
            self.blocks.insert(0, nn.TransformerEncoderLayer(4, 2, 8))  # drawn earlier, shifts no one else

    wider = start(Wider)[0]
    assert torch.equal(one.head.weight, wider.head.weight)  # type: ignore[union-attr]
    first, second = (block.linear1.weight for block in one.blocks)  # type: ignore[union-attr]
    assert not torch.equal(first, second)


def test_bdh_starts_by_name_with_its_table() -> None:
    config = BDHConfig(n_layer=2, n_embd=16, mlp_internal_dim_multiplier=4)
    model, weights = start(lambda: BDH(config))
    assert weights.kind == "init"
    assert torch.equal(model.attn.freqs, BDH(config).attn.freqs)  # type: ignore[union-attr]
    for name, parameter in model.named_parameters():
        assert parameter.std().item() == pytest.approx(0.02, rel=0.2), name


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight

    model, weights = start(Tied)
    assert weights.kind == "init"
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.std().item() == pytest.approx(1.0, rel=0.5)  # type: ignore[operator,union-attr]

    class SharedObject(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = nn.Parameter(torch.ones(3))
            self.a, self.b = nn.Identity(), nn.Identity()
            self.a.weight, self.b.weight = weight, weight

    model, weights = start(SharedObject)
    assert weights.kind == "built"
    assert model.a.weight is model.b.weight


class LoopAtTheEnd(nn.Module):
    """The widespread way: default init, then a loop over modules in the root's constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(50, 50)
        self.apply(self._init)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 5.0)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 7.0))


class TiedTheOtherWay(nn.Module):
    """The head comes first in module order, but its weight was drawn by the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 7, bias=False)
        self.embed = nn.Embedding(7, 4)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (LoopAtTheEnd, "'layer.weight'"),
        (Bare, "no reset_parameters"),
        (TiedTheOtherWay, "otherwise than"),
    ],
)
def test_init_code_we_would_lose_means_built_as_it_is(make: type[nn.Module], reason: str) -> None:
    model, weights = start(make)
    assert weights.kind == "built"
    assert reason in weights.reason
    values: Tensor = next(model.parameters())
    if make is LoopAtTheEnd:
        assert values.std().item() == pytest.approx(5.0, rel=0.1)
    if make is Bare:
        assert values.tolist() == [7.0] * 3
    again, _ = start(make)
    assert torch.equal(values, next(again.parameters()))


class Tied(nn.Module):
    """With a reset of its own, and a head whose first weight is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.between, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.empty(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


def test_tied_weights_are_drawn_by_name_every_time() -> None:
    """The memory of the weight that was thrown away goes to another parameter, which is not to inherit its past."""
    for _ in range(20):
        model, weights = build(Tied, Weights("init"), seed=0)
        assert weights.kind == "init", weights.reason
        materialise(model, torch.device("cpu"), seed=0)
        assert model.head.weight is model.embed.weight
        assert torch.equal(model.scale, torch.ones(4))


def test_weights_from_files(tmp_path: Path) -> None:
    torch.manual_seed(3)
    stored = {name: torch.randn_like(tensor) for name, tensor in Tied().state_dict().items() if name != "head.weight"}
    save_file({**stored, "rest": torch.zeros(2)}, tmp_path / "a.safetensors")
    wanted = Weights("files", files=(tmp_path / "a.safetensors",))
    model, weights = build(Tied, wanted, seed=0)
    assert weights.reason == "1 tensors in them are not the model's: rest"
    assert all(parameter.is_meta for parameter in model.parameters())
    materialise(model, torch.device("cpu"), 0, weights)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in stored.items())
    for broken, words in (
        ({**stored, "scale": torch.zeros(5)}, r"scale has shape \[5\], but the model's is \[4\]"),
        ({name: t for name, t in stored.items() if name != "scale"}, "has no tensor 'scale'"),
    ):
        save_file(broken, tmp_path / "a.safetensors")
        with pytest.raises(UserError, match=words):
            build(Tied, wanted, seed=0)
    (tmp_path / "a.safetensors").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        build(Tied, wanted, seed=0)


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 5).requires_grad_(False)
        self.half = nn.Linear(6, 5)  # its bias alone is in the file
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


def test_what_files_lack_is_drawn_the_same_on_every_layout(tmp_path: Path, pool2: Pool) -> None:
    stored = {"base.weight": torch.randn(5, 6), "base.bias": torch.randn(5), "half.bias": torch.randn(5)}
    path = tmp_path / "weights.safetensors"
    save_file(stored, path)
    one = first_weights("single", path)
    assert all(torch.equal(one[name], tensor) for name, tensor in stored.items())
    assert one["down.weight"].any()
    for kind in ("ddp", "fsdp"):
        for got in pool2.run(first_weights, kind, path, init=False):
            assert all(torch.equal(got[name], tensor) for name, tensor in one.items()), kind
    with pytest.raises(UserError, match=r"no tensor 'half\.weight'"):
        build(Adapted, Weights("files", files=(path,)), 3)
    del stored["base.bias"]  # frozen, so that nothing would ever change what was drawn
    save_file(stored, path)
    with pytest.raises(UserError, match=r"no tensor 'base\.bias'"):
        build(Adapted, Weights("files", files=(path,), reset=reset_one), 3)
