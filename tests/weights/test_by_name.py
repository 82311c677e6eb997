"""Weights by name: drawn under a seed made from the name, or built where drawing would change the model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shoal.models.bdh import BDH, BDHConfig
from shoal.types import Weights
from shoal.weights import build, materialise

INIT = Weights("init")
CPU = torch.device("cpu")


def start(build_model: type[nn.Module] | object, seed: int = 0) -> tuple[nn.Module, Weights]:
    model, weights = build(build_model, INIT, seed)  # type: ignore[arg-type]
    materialise(model, CPU, seed, weights)
    return model, weights


class Positions(nn.Module):
    """A module whose constructor computes a buffer. On the meta device its values would be lost."""

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


def test_parameters_are_distributed_as_their_constructors_draw_them() -> None:
    model, _ = start(Small)
    torch.manual_seed(0)
    plain = Small()
    for (name, drawn), built in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert not drawn.is_meta
        assert drawn.std().item() == pytest.approx(built.std().item(), rel=0.6, abs=1e-6), name
        assert (drawn.std() == 0) == (built.std() == 0), name
    # A parent's initialisation comes after that of its children: attention sets its projection's bias to 0.
    assert not model.blocks[0].self_attn.out_proj.bias.any()  # type: ignore[union-attr,index]


def test_weights_depend_only_on_seed_and_name() -> None:
    one, again, other = start(Small)[0], start(Small)[0], start(Small, seed=1)[0]
    for (name, a), b, c in zip(one.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        if a.std() > 0:
            assert not torch.equal(a, c), name

    class Wider(Small):
        def __init__(self) -> None:
            super().__init__()
            # This block is drawn before the others, and must not change them.
            self.blocks.insert(0, nn.TransformerEncoderLayer(4, 2, 8))

    wider = start(Wider)[0]
    assert torch.equal(one.head.weight, wider.head.weight)  # type: ignore[union-attr]
    first, second = (block.linear1.weight for block in one.blocks)  # type: ignore[union-attr]
    assert not torch.equal(first, second)


def test_bdh_is_drawn_by_name_and_keeps_its_table() -> None:
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
    """Initialises all modules in a loop at the end of the constructor, as many models do."""

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
    """Its head comes first in module order, but the embedding drew the weight that they share."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 7, bias=False)
        self.embed = nn.Embedding(7, 4)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize(
    ("build_model", "reason"),
    [
        (LoopAtTheEnd, "'layer.weight'"),
        (Bare, "no reset_parameters"),
        (TiedTheOtherWay, "in another way than"),
    ],
)
def test_a_model_with_other_init_code_is_built_whole(build_model: type[nn.Module], reason: str) -> None:
    model, weights = start(build_model)
    assert weights.kind == "built"
    assert reason in weights.reason
    values: Tensor = next(model.parameters())
    if build_model is LoopAtTheEnd:
        assert values.std().item() == pytest.approx(5.0, rel=0.1)
    if build_model is Bare:
        assert values.tolist() == [7.0] * 3
    again, _ = start(build_model)
    assert torch.equal(values, next(again.parameters()))


class Tied(nn.Module):
    """Has its own reset, and a head whose first weight is freed because it is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.between, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.empty(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


def test_tied_weights_are_drawn_by_name_every_time() -> None:
    """Checks that a parameter in the memory of the freed weight does not inherit what was recorded of that one."""
    for _ in range(20):
        model, weights = build(Tied, Weights("init"), seed=0)
        assert weights.kind == "init", weights.reason
        materialise(model, CPU, 0, weights)
        assert model.head.weight is model.embed.weight
        assert torch.equal(model.scale, torch.ones(4))


def test_empty_weights_draw_nothing_and_need_no_memory_under_fake_tensors() -> None:
    class Huge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = Positions()
            self.layer = nn.Linear(1 << 20, 1 << 20, device="meta")  # 4 TiB
            self.tied = nn.Linear(1 << 20, 1 << 20, bias=False, device="meta")
            self.tied.weight = self.layer.weight

    model, weights = build(Huge, Weights("empty"), seed=0)
    assert all(parameter.is_meta for parameter in model.parameters())
    before = torch.get_rng_state()
    with FakeTensorMode(allow_non_fake_inputs=True):
        materialise(model, CPU, 0, weights)
        assert model.layer(torch.empty(2, 1 << 20)).shape == (2, 1 << 20)
    assert {(type(p), p.device) for p in model.parameters()} == {(FakeTensor, CPU)}
    assert model.tied.weight is model.layer.weight
    small, weights = build(Small, Weights("empty"), seed=0)
    materialise(small, CPU, 0, weights)
    assert not any(parameter.is_meta for parameter in small.parameters())
    assert torch.equal(torch.get_rng_state(), before)
