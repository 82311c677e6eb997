"""Layers for models written by hand: cut between two ranks they are what they are whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import Pool
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.errors import UserError
from shoal.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear, TensorParallelAttention
from shoal.strategies import DistributedStrategy, Loop, MeshStrategy, SingleStrategy
from shoal.types import ParallelPlan

WIDTH, HEADS, ROWS, TIME = 16, 4, 3, 5


class Gated(nn.Module):
    """A parameter of its own inside of what ranks compute in parts."""

    tensor_style = "region"

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.up, self.down = ColumnParallelLinear(WIDTH, 8), RowParallelLinear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x) * self.scale))


class Block(nn.Module):
    """Everything there is: attention, a column and a row, biases, and norms that every rank has whole."""

    def __init__(self, kv_heads: int, bias: bool) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = TensorParallelAttention(WIDTH, HEADS, num_kv_heads=kv_heads, bias=bias)
        self.up = ColumnParallelLinear(WIDTH, 6 * WIDTH, bias=bias)
        self.down = RowParallelLinear(6 * WIDTH, WIDTH, bias=bias)
        self.gated = Gated()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return self.gated(x) + self.down(F.gelu(self.up(self.norm_2(x))))


def build(kv_heads: int = HEADS, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(kv_heads, bias), Block(kv_heads, bias), nn.Linear(WIDTH, 1))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def take_a_step(strategy: Any, kv_heads: int, bias: bool) -> dict[str, Any]:
    x = torch.randn(ROWS, TIME, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with strategy:
        loop = Loop(strategy)
        model, _ = loop.wrap(
            build(kv_heads, bias), lambda model: torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        )
        held = {name: [*getattr(p, "to_local", p.detach)().shape] for name, p in model.named_parameters()}
        output = model(x)
        loop.backward(output.square().mean())
        gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
        info = loop.step(max_norm=0.1)
        return {
            "held": held,
            "output": output.detach(),
            "input": x.grad,
            "gradients": gradients,
            "norm": info.grad_norm,
            "weights": {name: whole(p) for name, p in model.named_parameters()},
        }


def on_two(kv_heads: int, bias: bool) -> dict[str, Any]:
    return take_a_step(MeshStrategy(mesh={"tp": 2}, device="cpu"), kv_heads, bias)


@pytest.mark.parametrize(("kv_heads", "bias"), [(HEADS, True), (2, False)])
def test_two_ranks_compute_what_one_does(pool2: Pool, kv_heads: int, bias: bool) -> None:
    alone = take_a_step(SingleStrategy(device="cpu"), kv_heads, bias)
    held = alone.pop("held")
    before = dict(build(kv_heads, bias).named_parameters())
    assert alone["norm"] > 0.1, "nothing was clipped"
    assert not any(
        torch.equal(before[name], weight) for name, weight in alone["weights"].items() if "k_proj.b" not in name
    )
    for result in pool2.run(on_two, kv_heads, bias):
        mine = result.pop("held")
        torch.testing.assert_close(result, alone, rtol=1e-5, atol=1e-6)
        assert mine["0.weight"] == held["0.weight"], "a plain Linear stays whole"
        assert mine["1.up.weight"] == [3 * WIDTH, WIDTH]
        assert mine["1.down.weight"] == [WIDTH, 3 * WIDTH]
        assert mine["1.attention.q_proj.weight"] == mine["1.attention.o_proj.weight"][::-1] == [WIDTH // 2, WIDTH]
        assert mine["1.attention.k_proj.weight"] == [kv_heads * (WIDTH // HEADS) // 2, WIDTH]
        if bias:
            assert (mine["1.up.bias"], mine["1.down.bias"]) == ([3 * WIDTH], [WIDTH])


def test_attention_is_torchs() -> None:
    torch.manual_seed(0)
    attention = TensorParallelAttention(WIDTH, HEADS, bias=True)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    own = dict(attention.named_parameters())
    for kind in ("weight", "bias"):
        joined = torch.cat([own[f"{name}_proj.{kind}"] for name in "qkv"])
        getattr(theirs, f"in_proj_{kind}").data.copy_(joined)
        getattr(theirs.out_proj, kind).data.copy_(own[f"o_proj.{kind}"])
    x = torch.randn(ROWS, TIME, WIDTH)
    mask = nn.Transformer.generate_square_subsequent_mask(TIME)
    torch.testing.assert_close(attention(x), theirs(x, x, x, attn_mask=mask, need_weights=False)[0])
    torch.testing.assert_close(attention(x, is_causal=False), theirs(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 3)])
def test_heads_that_do_not_come_out_even_are_refused(heads: int, kv_heads: int) -> None:
    with pytest.raises(ValueError, match=f"{heads} heads have to divide the width 16 .* {kv_heads} key/value heads"):
        TensorParallelAttention(WIDTH, heads, num_kv_heads=kv_heads)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = ColumnParallelLinear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight


def wrap_odd_heads(strategy: DistributedStrategy) -> None:
    Loop(strategy).wrap(nn.Sequential(TensorParallelAttention(12, 3)))


def wrap_few_kv_heads(strategy: DistributedStrategy) -> None:
    Loop(strategy).wrap(nn.Sequential(TensorParallelAttention(16, 4, num_kv_heads=1)))


def wrap_odd_columns(strategy: DistributedStrategy) -> None:
    Loop(strategy).wrap(nn.Sequential(ColumnParallelLinear(4, 5)))


def wrap_what_has_no_style(strategy: DistributedStrategy) -> None:
    Loop(strategy).wrap(nn.Sequential(nn.Linear(4, 4)))


def wrap_tied(strategy: DistributedStrategy) -> None:
    Loop(strategy).wrap(Tied())


def prepare(strategy: DistributedStrategy, model: nn.Module, styles: dict[str, Any]) -> None:
    strategy.prepare(model, lambda m: torch.optim.SGD(m.parameters()), ParallelPlan(tensor=styles))


def name_what_is_not_there(strategy: DistributedStrategy) -> None:
    prepare(strategy, nn.Sequential(nn.Linear(4, 4)), {"layers.*.up": "column"})


def name_a_parameter_that_is_not_there(strategy: DistributedStrategy) -> None:
    prepare(strategy, nn.Sequential(nn.Linear(4, 4)), {"0.scale": 0})


def cut_a_norm(strategy: DistributedStrategy) -> None:
    prepare(strategy, nn.Sequential(nn.LayerNorm(4)), {"0": "column"})


def cut_a_container(strategy: DistributedStrategy) -> None:
    prepare(strategy, nn.Sequential(nn.Sequential(nn.Linear(4, 4))), {"0": "column"})


def name_what_is_not_there_beside_an_order(strategy: DistributedStrategy) -> None:
    plan = ParallelPlan(order=("0",), entry="input", tensor={"nowhere": "column"})
    strategy.prepare(nn.Sequential(nn.Linear(4, 4)), lambda m: torch.optim.SGD(m.parameters()), plan)


def cut_a_convolution_by_tokens(strategy: DistributedStrategy) -> None:
    prepare(strategy, nn.Sequential(nn.Conv1d(4, 4, 1)), {"0": "vocabulary"})


def cut_a_sparse_embedding(strategy: DistributedStrategy) -> None:
    prepare(strategy, nn.Sequential(nn.Embedding(4, 4, max_norm=1.0)), {"0": "vocabulary"})


MISTAKES: dict[Callable[[DistributedStrategy], None], str] = {
    wrap_odd_heads: "tp = 2 does not divide the 3 heads of 0.q_proj.weight",
    wrap_few_kv_heads: "tp = 2 does not divide the 1 heads of 0.k_proj.weight",
    wrap_odd_columns: "tp = 2 does not divide the 5 of 0.weight [5, 4]",
    wrap_what_has_no_style: "says nothing of tensor parallelism",
    wrap_tied: "parameter second.weight is tied to one that the plan splits",
    name_what_is_not_there: "the recipe's plan splits 'layers.*.up', but the model has no module of that name",
    name_a_parameter_that_is_not_there: "the recipe's plan splits '0.scale', but the model has no parameter of",
    cut_a_norm: "the plan splits 0 as column, which is not for a LayerNorm",
    cut_a_container: "the plan splits 0 as column, which is not for a Sequential",
    name_what_is_not_there_beside_an_order: "the recipe's plan splits 'nowhere', but the model has no module",
    cut_a_convolution_by_tokens: "the plan splits 0 as vocabulary, which is not for a Conv1d",
    cut_a_sparse_embedding: "tensor parallelism cannot split an embedding with max_norm, scale_grad_by_freq or sparse",
}


def make_mistakes() -> dict[str, str]:
    said = {}
    with MeshStrategy(mesh={"tp": 2}, device="cpu") as strategy:
        for mistake in MISTAKES:
            try:
                mistake(strategy)
                said[mistake.__name__] = "nothing"
            except UserError as error:
                said[mistake.__name__] = str(error)
    return said


def test_what_cannot_be_cut_is_refused(pool2: Pool) -> None:
    for said in pool2.run(make_mistakes):
        for mistake, words in MISTAKES.items():
            assert words in said[mistake.__name__], mistake.__name__


def wrap_in_stages() -> str:
    with MeshStrategy(mesh={"pp": 2}, device="cpu") as strategy:
        with pytest.raises(UserError) as raised:
            Loop(strategy).wrap(build())
        return str(raised.value)


def test_a_pipeline_has_no_model_to_call(pool2: Pool) -> None:
    for said in pool2.run(wrap_in_stages):
        assert said == (
            "distributed.mesh.pp = 2: a pipeline runs all micro-batches of a step at once, and a loop of your own "
            "cannot; use a recipe"
        )


def test_sequence_parallelism_is_a_way_of_tensor_parallelism() -> None:
    with pytest.raises(UserError, match=r"sequence_parallel = true .* but distributed.mesh.tp = 1; leave it out"):
        MeshStrategy(mesh={"tp": 1}, sequence_parallel=True, device="cpu")


def test_a_mesh_of_other_processes_is_refused() -> None:
    with pytest.raises(UserError, match="dp_shard 2 × tp 2 = 4, but there are 1 processes"):
        MeshStrategy(mesh={"dp_shard": 2, "tp": 2})
