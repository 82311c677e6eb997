"""The head in fp8 (`training.fp8_head`) beside the plain one. tests/gpu has the same on a GPU, and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import ToyRun
from torch import Tensor, nn

from shoal.config import load_run
from shoal.errors import UserError
from shoal.recipes.recipe import IGNORED_LABEL, token_loss
from shoal.transform import float8_head
from shoal.transform.chunked_loss import ChunkedHead, _score
from shoal.transform.float8_head import Float8Weight, to_float8
from shoal.types import ParallelPlan

VOCAB, EMBD, TOKENS = 96, 64, 40
LOGITS = (torch.float8_e4m3fn, torch.float8_e4m3fn)
TO_HIDDEN = (torch.float8_e5m2, torch.float8_e4m3fn)


@pytest.fixture(autouse=True)
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, torch.dtype]]:
    """The dtypes of both sides of each product in fp8."""
    made: list[tuple[torch.dtype, torch.dtype]] = []

    multiply = float8_head.scaled_product

    def watched(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # What cuBLAS wants: rows of the left side in memory, columns of the right one.
        assert left.is_contiguous()
        assert right.mT.is_contiguous()
        made.append((left.dtype, right.dtype))
        return multiply(left, right, *args, **kwargs)

    monkeypatch.setattr(float8_head, "scaled_product", watched)
    return made


def model_of(bias: bool = False, vocab: int = VOCAB) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(vocab, EMBD), nn.Linear(EMBD, vocab, bias))
    nn.init.normal_(model[0].weight, std=3.0)  # so that the loss depends on the tokens
    return model


def batch() -> tuple[Tensor, Tensor]:
    tokens, labels = torch.randint(VOCAB, (2, 2, TOKENS // 2), generator=torch.Generator().manual_seed(1))
    labels[0, 3:7] = IGNORED_LABEL
    return tokens, labels


def trained(
    model: nn.Module, float8: bool | None, scale: float = 1.0, chunks: int = 3
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss and the gradients; without chunks for None."""
    tokens, labels = batch()
    factor = torch.tensor(scale)
    with torch.autocast("cpu", torch.bfloat16):
        if float8 is None:
            loss = token_loss(model(tokens), labels)
        else:
            head = ChunkedHead(model, ParallelPlan(head="1"), chunks, float8=float8)
            assert head.is_float8 == float8
            with head.scoring(labels, factor):
                loss = model(tokens)
    loss.backward(factor)
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1 / 300, 2.0**14])
def test_loss_and_gradients_are_those_of_a_plain_head_but_for_rounding(bias: bool, scale: float) -> None:
    """fp8 has 3 bits after the first, and 2 in the gradients of logits: products differ by a few percent."""
    loss, expected = trained(model_of(bias), None, scale)
    found_loss, found = trained(model_of(bias), True, scale)
    assert 0 < (found_loss - loss).abs() < 0.01 * loss
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        difference = (found[name] - gradient).norm() / gradient.norm()
        assert 0 < difference < 0.06, (name, difference)


@pytest.mark.parametrize("sure", [0.0, 12.0])
def test_the_gradient_at_the_label_is_not_rounded(sure: float) -> None:
    """It is most of the gradient. If the model is sure of the label, what is left is far below a step of fp8 at 1."""
    torch.manual_seed(0)
    weight, logits = torch.randn(EMBD, 4096), torch.randn(50, 4096)
    labels = torch.randint(4096, (50,))
    logits[range(50), labels] += sure
    expected = (logits.softmax(-1) - F.one_hot(labels, 4096)) @ weight.mT / 7
    scale = torch.tensor(1 / 7)
    _, _, gradient = _score(logits, labels, scale, torch.bfloat16, True)
    assert gradient is not None
    found = Float8Weight(weight, to_float8, for_gradients=True).to_hidden(gradient, scale, torch.bfloat16)
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert 0 < errors.max() < 0.02


def test_products_with_the_weight_are_in_fp8_and_the_gradient_of_the_weight_is_not(products: list[Any]) -> None:
    trained(model_of(), False)
    assert not products
    _, gradients = trained(model_of(), True)
    assert products == [LOGITS, TO_HIDDEN] * 3
    assert gradients["1.weight"].unique().numel() > 256  # more than numbers in fp8


def test_frozen_inputs_take_no_gradient(products: list[Any]) -> None:
    model = model_of()
    model[0].requires_grad_(False)
    _, gradients = trained(model, True)
    assert products == [LOGITS] * 3
    assert [*gradients] == ["1.weight"]


def test_an_evaluation_computes_logits_alone(products: list[Any]) -> None:
    model, (tokens, labels) = model_of(), batch()
    head = ChunkedHead(model, ParallelPlan(head="1"), 3, float8=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), head.scoring(labels):
        loss = model(tokens)
    assert products == [LOGITS] * 3
    assert torch.allclose(loss, trained(model_of(), True)[0])


def test_a_micro_batch_without_weight_has_no_gradients() -> None:
    _, gradients = trained(model_of(), True, scale=0.0)
    assert all(not gradient.any() for gradient in gradients.values())


def test_what_is_not_a_number_stays_so() -> None:
    model = model_of()
    with torch.no_grad():
        model[1].weight[5, 5] = float("inf")
    assert not trained(model, True)[0].isfinite()


@pytest.mark.parametrize("x", [torch.zeros(3, 4), torch.full((2, 2), 1e-20), torch.tensor([[5e4, -1e4]])])
def test_rounding_uses_the_whole_range_of_the_type(x: Tensor) -> None:
    rounded, inverse = to_float8(x)
    assert rounded.float().abs().max() == (448 if x.any() else 0)
    torch.testing.assert_close(rounded.float() * inverse, x, rtol=2**-4, atol=0)


def test_a_vocabulary_that_fp8_products_cannot_have_is_one_line() -> None:
    with pytest.raises(UserError, match=r"training\.fp8_head = true: .* multiples of 16, .* 64 inputs and 100 outputs"):
        ChunkedHead(model_of(vocab=100), ParallelPlan(head="1"), 2, float8=True)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"mixed_precision": "bf16", "loss_chunks": 4},
            r"training\.fp8_head \(command line\) = true is for mixed_precision = fp8",
        ),
        (
            {"mixed_precision": "fp8"},
            r"training\.fp8_head .* needs a head that computes the loss in chunks; set loss_chunks",
        ),
    ],
)
def test_keys_that_it_needs(toy: ToyRun, keys: dict[str, Any], said: str) -> None:
    overrides = [f"training.{key}={value}" for key, value in {**keys, "fp8_head": True}.items()]
    with pytest.raises(UserError, match=said):
        load_run(toy.config, overrides)
