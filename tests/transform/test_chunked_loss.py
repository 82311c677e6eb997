"""The loss in chunks against the plain one: equal, and never all logits at once."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from shoal.errors import UserError
from shoal.models.bdh import BDH, BDHConfig
from shoal.recipes.bdh import BDHRecipe
from shoal.recipes.recipe import IGNORED_LABEL, token_loss
from shoal.torch_private import TorchDispatchMode
from shoal.transform import chunked_loss
from shoal.transform.chunked_loss import ChunkedHead
from shoal.transform.compile import GraphChoice
from shoal.types import ParallelPlan

VOCAB, EMBD = 37, 16
PLAN = ParallelPlan(head="head")


class WithLinear(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, EMBD)
        self.head = nn.Linear(EMBD, VOCAB, bias)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


class WithBDH(BDH):
    def __init__(self) -> None:
        super().__init__(BDHConfig(2, EMBD, 0.0, n_head=2, mlp_internal_dim_multiplier=4, vocab_size=VOCAB))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)[0]


MODELS = [WithLinear, lambda: WithLinear(bias=False), WithBDH]


def batch(ignored: str = "some") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(VOCAB, (2, 3, 7), generator=generator)
    if ignored == "some":
        labels[0, 4:] = labels[2, 0] = IGNORED_LABEL
    if ignored == "all":
        labels[:] = IGNORED_LABEL
    return tokens, labels


def built(build: Any) -> nn.Module:
    torch.manual_seed(0)
    return build()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def plain(model: nn.Module, ignored: str = "some", scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    tokens, labels = batch(ignored)
    loss = token_loss(model(tokens), labels)
    loss.backward(torch.tensor(scale))
    return loss.detach(), gradients(model)


def chunked(
    model: nn.Module, chunks: int, ignored: str = "some", scale: float | None = None, **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    tokens, labels = batch(ignored)
    head = ChunkedHead(model, PLAN, chunks, **options)
    factor = None if scale is None else torch.tensor(scale)
    with head.scoring(labels, factor):
        loss = token_loss(model(tokens), labels)
    assert head.num_scored == 1
    loss.backward(factor)
    return loss.detach(), gradients(model)


def assert_same(one: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]], rtol: float) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=rtol, atol=0)
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        expected = other[1][name]
        assert gradient.dtype == expected.dtype
        assert gradient.stride() == expected.stride(), name
        assert (gradient - expected).norm() <= rtol * expected.norm(), name


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("chunks", [1, 3, 1000])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize("scale", [None, 1 / 13])
def test_equals_the_plain_loss(build: Any, chunks: int, ignored: str, scale: float | None) -> None:
    expected = plain(built(build), ignored, scale or 1.0)
    assert_same(chunked(built(build), chunks, ignored, scale), expected, 1e-6)
    assert expected[1]["embed.weight"].any() == (ignored != "all")


@pytest.mark.parametrize("build", MODELS)
def test_under_autocast_it_computes_in_half(build: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = plain(built(build)), chunked(built(build), 3)
    assert_same(found, expected, 2e-2)
    assert found[0].dtype == torch.float32
    assert found[0] != chunked(built(build), 3)[0]


def test_chunks_are_summed_in_full_precision() -> None:
    """A sum of a thousand like numbers stops growing at 256 of them in bf16."""
    model, tokens = built(WithLinear), torch.zeros(1024, dtype=torch.long)
    token_loss(model(tokens), tokens).backward()
    expected = model.head.weight.grad.clone()
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16), ChunkedHead(model, PLAN, 1024).scoring(tokens):
        loss = model(tokens)
    loss.backward()
    assert (model.head.weight.grad - expected).norm() <= 1e-2 * expected.norm()


def test_a_half_precision_head() -> None:
    model = built(WithLinear).bfloat16()
    assert_same(chunked(model, 3), plain(built(WithLinear).bfloat16()), 2e-2)


@pytest.mark.parametrize("build", MODELS)
def test_fp16_needs_the_scale_inside(build: Any) -> None:
    """As an fp16 step does it: the loss backs through scale / count, and gradients are unscaled in fp32."""
    small = 2.0**-20  # smaller than fp16 can tell from nothing when multiplied with a probability
    exact = plain(built(build), scale=small)
    with torch.autocast("cpu", torch.float16):
        found = chunked(built(build), 3, scale=small * 2.0**16)
        lost = chunked(built(build), 3, scale=small)
    unscaled = {name: gradient / 2.0**16 for name, gradient in found[1].items()}
    assert_same((found[0], unscaled), exact, 2e-2)
    assert lost[1]["embed.weight"].count_nonzero() < found[1]["embed.weight"].count_nonzero()


@pytest.mark.parametrize("build", MODELS)
def test_a_filler_leaves_nothing(build: Any) -> None:
    loss, found = chunked(built(build), 3, scale=0.0)
    assert loss > 0
    assert found["embed.weight"] is not None
    assert not any(gradient.any() or gradient.isnan().any() for gradient in found.values())


@pytest.mark.parametrize(("build", "weight"), [(WithLinear, "head.weight"), (WithBDH, "lm_head")])
def test_frozen_parts(build: Any, weight: str) -> None:
    for frozen in ([weight], ["embed.weight"], ["head.bias", weight]):
        models = [built(build) for _ in range(2)]
        for model in models:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name not in frozen)
        found = chunked(models[0], 3)
        assert_same(found, plain(models[1]), 1e-6)
        assert not {*frozen} & {*found[1]}


@pytest.mark.parametrize("build", MODELS)
def test_evaluation_computes_the_loss_alone(build: Any) -> None:
    model, (tokens, labels) = built(build), batch()
    expected, _ = plain(built(build))
    head = ChunkedHead(model, PLAN, 3)
    with torch.no_grad(), head.scoring(labels), Products() as products:
        loss = token_loss(model(tokens), labels)
    torch.testing.assert_close(loss, expected)
    assert not loss.requires_grad
    assert products.over_vocabulary == 3


@pytest.mark.parametrize("build", MODELS)
def test_three_products_per_chunk_and_none_in_the_backward(build: Any) -> None:
    model, (tokens, labels) = built(build), batch()
    head = ChunkedHead(model, PLAN, 3)
    with Products() as products:
        with head.scoring(labels):
            loss = model(tokens)
        assert products.over_vocabulary == 9
        loss.backward()
        assert products.over_vocabulary == 9


@pytest.mark.parametrize("build", MODELS)
def test_never_all_logits(build: Any) -> None:
    model, (tokens, labels) = built(build), batch()
    with Products() as products:
        token_loss(model(tokens), labels).backward()
    assert products.most_logits == tokens.numel()
    head = ChunkedHead(model, PLAN, 3)
    with Products() as products:
        with head.scoring(labels):
            loss = token_loss(model(tokens), labels)
        loss.backward()
    assert products.most_logits == tokens.numel() // 3


@pytest.mark.parametrize("build", MODELS)
def test_elsewhere_the_head_makes_logits(build: Any) -> None:
    model, (tokens, labels) = built(build), batch()
    names, expected = [*model.state_dict()], model(tokens)
    head = ChunkedHead(model, PLAN, 3)
    assert torch.equal(model(tokens), expected)
    with head.scoring(labels):
        assert model(tokens).ndim == 0
    with pytest.raises(IndexError), head.scoring(labels):
        model(tokens + VOCAB)
    assert torch.equal(model(tokens), expected)
    assert [*model.state_dict()] == names


def test_the_recipe_of_bdh_scores_by_its_head() -> None:
    recipe = BDHRecipe()
    recipe.config.model = BDHConfig(2, EMBD, 0.0, n_head=2, mlp_internal_dim_multiplier=4, vocab_size=VOCAB)
    model, (tokens, labels) = built(recipe.build_model), batch()
    inputs = recipe.inputs({"input_ids": tokens})
    expected = recipe.loss(model(**inputs), {"labels": labels})
    with ChunkedHead(model, recipe.parallel_plan(model), 2).scoring(labels):
        output = model(**inputs)
    assert output[0].ndim == 0
    torch.testing.assert_close(recipe.loss(output, {"labels": labels}), expected)


def test_backing_through_twice_is_an_error_and_not_twice_the_factor() -> None:
    model, (tokens, labels) = built(WithLinear), batch()
    with ChunkedHead(model, PLAN, 3).scoring(labels):
        loss = model(tokens)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="allows one backward"):
        loss.backward()


def test_impossible_heads_are_refused_in_one_line() -> None:
    model, (tokens, labels) = built(WithLinear), batch()
    with pytest.raises(UserError, match=r"training.loss_chunks = 4, but the recipe's plan names no head"):
        ChunkedHead(model, ParallelPlan(), 4)
    with pytest.raises(UserError, match=r"loss_chunks = 4: .* nn.Linear or has no .*, and 'embed' is a Embedding; set"):
        ChunkedHead(model, ParallelPlan(head="embed"), 4)
    with (
        pytest.raises(UserError, match="called on 21 tokens for 14 labels"),
        ChunkedHead(model, PLAN, 4).scoring(labels[:2]),
    ):
        model(tokens)
    cut = Mock(size=2, rank=0, enter=lambda hidden: hidden)
    for chunks in (1, 4):  # tensor parallelism shares the loss with and without
        with pytest.raises(UserError, match=r"^distributed.mesh.tp = 2 splits the head 'embed'.* Embedding; take"):
            ChunkedHead(model, ParallelPlan(head="embed"), chunks, tensor=cut)
        model = built(WithLinear)
        head = ChunkedHead(model, PLAN, chunks, tensor=cut)
        words = r"^distributed.mesh.tp = 2 .* 21 tokens for 14 labels; take its style"
        with pytest.raises(UserError, match=words), head.scoring(labels[:2]):
            model(tokens)


@pytest.mark.slow
@pytest.mark.parametrize("build", MODELS)
def test_compiled(build: Any) -> None:
    expected = plain(built(build))
    assert_same(chunked(built(build), 4, scale=1.0, choice=GraphChoice()), expected, 1e-6)
    whole = built(build)
    whole.compile()  # the way of a model without blocks
    assert_same(chunked(whole, 4, scale=1.0, choice=GraphChoice()), expected, 1e-6)


class Products(TorchDispatchMode):
    """Counts matrix products that involve the vocabulary, and the tokens of the largest tensor over it."""

    def __init__(self) -> None:
        super().__init__()
        self.over_vocabulary = self.most_logits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_", "bmm"):
            shapes = [tuple(arg.shape) for arg in args if isinstance(arg, Tensor)]
            self.over_vocabulary += any(VOCAB in shape for shape in shapes)
        if isinstance(out, Tensor) and out.ndim and out.shape[-1] == VOCAB and out.shape[-2:] != (EMBD, VOCAB):
            self.most_logits = max(self.most_logits, out.numel() // VOCAB)
        return out


def test_the_product_that_adds_on_a_gpu_is_counted() -> None:
    """torch cannot count its own addmm with `out_dtype`, so a proof on a GPU would end; here a CPU stands in."""
    add_product = chunked_loss._add_product_on_gpu

    def on_cpu(total: Tensor, left: Tensor, right: Tensor) -> None:
        total += left.float() @ right.float()

    add_product.register_kernel("cpu")(on_cpu)
    total, left, right = torch.ones(3, 5), torch.randn(3, 4).bfloat16(), torch.randn(4, 5).bfloat16()
    with FlopCounterMode(display=False) as counter:
        add_product(total, left, right)
    assert counter.get_total_flops() == 2 * 3 * 4 * 5
    torch.testing.assert_close(total, 1 + left.float() @ right.float())
