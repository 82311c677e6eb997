"""Cutting a model into stages: who computes what, under which names, and what cannot be cut."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.parallel.pipeline.stages import (
    PassThrough,
    count_stages,
    cut,
    follow_mode,
    stages_of,
    take_stages,
)
from shoal.types import ParallelPlan


class Model(nn.Module):
    """Blocks of given widths inside of another module, between an embedding and a head."""

    def __init__(self, widths: list[int], vocabulary: int = 5):
        super().__init__()
        self.body = nn.Module()
        self.body.embed = nn.Embedding(vocabulary, 2)
        self.body.layers = nn.ModuleList(Layer(width) for width in widths)
        self.norm, self.head = nn.LayerNorm(2), nn.Linear(2, vocabulary, bias=False)
        self.rotary = Rotary()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.body.embed(tokens)
        for layer in self.body.layers:
            hidden = layer(hidden, self.rotary(), kind=layer.kind)
        return self.head(self.norm(hidden))

    @property
    def plan(self) -> ParallelPlan:
        layers = tuple(f"body.layers.{i}" for i in range(len(self.body.layers)))
        return ParallelPlan(blocks=layers, order=("body.embed", *layers, "norm", "head"), entry="tokens")


class Layer(nn.Module):
    """Costs twice its width."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.kind = nn.Parameter(torch.randn(2, width)), "full"

    def forward(self, hidden: Tensor, turn: Tensor, kind: str) -> Tensor:
        return hidden + (hidden @ self.weight).sum(-1, keepdim=True) * turn


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.tensor([0.5]))

    def forward(self) -> Tensor:
        return self.turn


def sizes(model: Model, num_stages: int) -> list[int]:
    """How many blocks each stage has."""
    cuts = cut(model, model.plan, num_stages)
    assert [name for names in cuts for name in names] == [*model.plan.order]
    return [sum("layers" in name for name in names) for names in cuts]


def test_ranks_hold_stages_in_loops_or_in_a_v() -> None:
    assert [stages_of(rank, 2, "1f1b") for rank in range(2)] == [(0,), (1,)]
    assert [stages_of(rank, 2, "interleaved") for rank in range(2)] == [(0, 2), (1, 3)]
    assert [stages_of(rank, 2, "zbv") for rank in range(2)] == [(0, 3), (1, 2)]
    for schedule, num in {"gpipe": 4, "1f1b": 4, "interleaved": 8, "zbv": 8}.items():
        held = [stage for rank in range(4) for stage in stages_of(rank, 4, schedule)]
        assert sorted(held) == [*range(count_stages(4, schedule))] == [*range(num)]


def test_cuts_are_balanced_by_what_a_token_costs() -> None:
    assert sizes(Model([4] * 8, vocabulary=4), 4) == [2, 2, 2, 2]  # the head costs a layer, the embedding nothing
    assert sizes(Model([4] * 8, vocabulary=16), 2) == [6, 2]  # and here four
    assert sizes(Model([4] * 8, vocabulary=100), 4) == [2, 2, 3, 1]  # the last is the dearest anyway; others are even
    assert sizes(Model([9, 1, 1, 1], vocabulary=1), 2) == [1, 3]
    assert sizes(Model([4, 4, 4, 4, 3], vocabulary=1), 2) == [2, 3]  # 8 and 12, or 12 and 8: the earlier
    assert sizes(Model([4] * 3), 3) == [1, 1, 1]


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=4, max_size=8), st.integers(1, 9), st.integers(1, 4))
def test_no_other_cut_is_better(widths: list[int], vocabulary: int, num_stages: int) -> None:
    with torch.device("meta"):
        model = Model(widths, vocabulary)

    def price(ends: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        costs = [*widths[:-1], widths[-1] + vocabulary]
        stages = [sum(costs[a:b]) for a, b in zip((0, *ends), (*ends, len(costs)), strict=True)]
        return max(stages), sum(cost**2 for cost in stages), ends

    found = sizes(model, num_stages)
    ends = tuple(sum(found[: i + 1]) for i in range(num_stages - 1))
    assert price(ends) == min(map(price, combinations(range(1, len(widths)), num_stages - 1)))


def test_a_pass_through_gives_back_what_it_is_given() -> None:
    stand_in = PassThrough(Layer(3))
    hidden = torch.ones(2)
    assert stand_in(hidden, 1, kind="full") is hidden
    assert stand_in.kind == "full"
    assert not [*stand_in.parameters()]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_stages_one_after_another_are_the_model(schedule: str) -> None:
    torch.manual_seed(0)
    whole = Model([3, 4, 5, 6])
    tokens = torch.tensor([[1, 2, 3]])
    wanted, names = whole(tokens), dict(whole.named_parameters())
    stages: dict[int, nn.Module] = {}
    owned: list[str] = []
    for rank in range(2):
        model = Model([3, 4, 5, 6])
        model.load_state_dict(whole.state_dict())
        mine = stages_of(rank, 2, schedule)
        modules = take_stages(model, model.plan, cut(model, model.plan, count_stages(2, schedule)), mine)
        stages.update(zip(mine, modules, strict=True))
        assert (len(mine) == 1) == (modules[0] is model)
        parts = [p for module in modules for p in module.parameters()]
        assert {*map(id, parts)} == {id(p) for p in model.parameters()}
        owned += [name for name, _ in model.named_parameters()]
        for module in modules:
            assert all(model.get_parameter(name) is p for name, p in module.named_parameters())
            assert module.get_buffer("rotary.turn") is model.get_buffer("rotary.turn")
    assert sorted(owned) == sorted(names)
    hidden = tokens
    for index in range(len(stages)):
        hidden = stages[index](hidden)
    assert torch.equal(hidden, wanted)


def test_copies_have_hooks_of_their_own_and_the_mode_of_the_model() -> None:
    model = Model([3, 4])
    first, second = take_stages(model, model.plan, cut(model, model.plan, 2), (0, 1))
    seen: list[str] = []
    first.body.register_forward_hook(lambda *_: None)
    first.register_forward_pre_hook(lambda *_: seen.append("first"))
    second(first(torch.tensor([[1, 2]])))
    assert seen == ["first"]
    assert not second.body._forward_hooks
    model.eval()
    assert first.training
    follow_mode(first)
    assert not first.training
    assert not first.body.training


def test_what_cannot_be_cut_is_refused_in_a_line() -> None:
    model = Model([4] * 3)
    layers = model.plan.blocks

    def refusal(plan: ParallelPlan, num_stages: int = 2, model: nn.Module = model) -> str:
        with pytest.raises(UserError) as caught:
            cut(model, plan, num_stages)
        return str(caught.value)

    assert "the recipe's plan states no order" in refusal(ParallelPlan(blocks=layers))
    assert "'nothing'" in refusal(ParallelPlan(blocks=layers, order=("nothing", *layers)))
    assert "'body.layers.0' twice, or inside" in refusal(ParallelPlan(layers, order=("body", "body.layers.0")))
    outside = refusal(ParallelPlan(blocks=layers, order=("body.embed", *layers, "head")))
    assert (
        outside
        == "parameter norm.weight is in no module of the plan's order, so no stage would have it; add its module"
    )
    assert "a pipeline of 4 stages needs 4 blocks, but the plan's order has 3" in refusal(model.plan, 4)
    tied = Model([4] * 3)
    tied.head.weight = tied.body.embed.weight
    assert "body.embed.weight and head.weight are one parameter" in refusal(tied.plan, model=tied)
    cut(tied, tied.plan, 1)
    bare = Model([4] * 2)
    bare.body.layers = nn.ModuleList([nn.Identity(), nn.Identity()])
    assert "all use the same ones" in refusal(bare.plan, model=bare)
