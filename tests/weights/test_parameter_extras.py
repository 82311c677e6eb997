"""Attributes, hooks and references of parameters survive in a run, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.recipes import Recipe
from shoal.strategies import DDPStrategy, FSDPStrategy, SingleStrategy
from shoal.types import MicroBatch, Weights
from shoal.weights.materialise import build, materialise
from shoal.weights.parameter_extras import check_trainable

CPU = torch.device("cpu")
STRATEGIES: dict[str, Any] = {"single": SingleStrategy, "ddp": DDPStrategy, "fsdp": FSDPStrategy}


class Marked(nn.Module):
    """A linear layer whose weight is to have no weight decay, as state-space models mark theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 1)
        self.first.weight._no_weight_decay = True

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


class Sum(Recipe):
    def prepare_batch(self, batch: Tensor, rng: object) -> Tensor:
        return batch

    def inputs(self, batch: Tensor) -> dict[str, Tensor]:
        return {"x": batch}

    def count(self, batch: Tensor) -> int:
        return len(batch)

    def loss(self, output: Tensor, batch: Tensor) -> Tensor:
        return output.sum()


def marks(kind: str, weights: str) -> list[str]:
    """Returns the names of the parameters that are marked when the optimizer is built."""
    found: list[str] = []

    def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        found.extend(name for name, p in model.named_parameters() if hasattr(p, "_no_weight_decay"))
        return torch.optim.SGD(model.parameters(), lr=0.1)

    with STRATEGIES[kind](device="cpu") as strategy:
        model, how = build(Marked, Weights(weights), 0)
        strategy.prepare(model, build_optimizer, weights=how)
    return found


@pytest.mark.parametrize("weights", ["init", "built"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_attributes_of_parameters_are_there_when_groups_are_made(pool2: Pool, kind: str, weights: str) -> None:
    assert pool2.run(marks, kind, weights, init=False) == [["first.weight"]] * 2


def double_gradient(parameter: Tensor) -> None:
    parameter.grad *= 2


def with_hooks() -> nn.Module:
    model = Marked()
    model.first.weight.register_hook(lambda gradient: gradient * 0)
    model.last.weight.register_post_accumulate_grad_hook(double_gradient)
    return model


def test_gradient_hooks_are_kept() -> None:
    model, weights = build(with_hooks, Weights("init"), 0)
    assert weights.kind == "init"
    materialise(model, CPU, 0, weights)
    inputs = torch.ones(1, 2)
    model(inputs).sum().backward()
    assert not model.first.weight.grad.any()
    assert model.first.bias.grad.any()
    torch.testing.assert_close(model.last.weight.grad, 2 * model.first(inputs))


def refusal(kind: str, make: Any) -> str:
    with STRATEGIES[kind](device="cpu") as strategy:
        strategy.barrier()  # or one rank leaves while another is still connecting to it
        try:
            model, weights = build(make, Weights("built"), 0)
            strategy.prepare(model, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), weights=weights)
        except UserError as error:
            return str(error)
    return ""


class Listed(Marked):
    """Keeps a parameter in a list, which no layout looks into."""

    def __init__(self) -> None:
        super().__init__()
        self.penalised = [self.first.weight]


class Limited(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 2, max_norm=1.0)


@pytest.mark.parametrize(
    ("kind", "make", "words"),
    [
        ("fsdp", with_hooks, "parameter first.weight has a hook on its gradient"),
        ("fsdp", Listed, "parameter first.weight is also kept in the attribute penalised"),
        ("ddp", Limited, "embed: an embedding with max_norm changes its weights"),
        ("fsdp", Limited, "embed: an embedding with max_norm changes its weights"),
    ],
)
def test_what_a_layout_would_lose_is_refused_by_name(pool2: Pool, kind: str, make: Any, words: str) -> None:
    assert all(words in refused for refused in pool2.run(refusal, kind, make, init=False))


def test_a_model_that_refers_to_its_parameters_is_built_whole() -> None:
    model, weights = build(Listed, Weights("init"), 0)
    assert weights.kind == "built"
    assert "penalised" in weights.reason
    assert model.penalised[0] is model.first.weight


def orthogonal() -> nn.Module:
    return nn.utils.parametrizations.orthogonal(nn.Linear(3, 3))


def scaled() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.weight.data = torch.eye(3)
    return layer


def spectral() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(3, 3))


@pytest.mark.parametrize("make", [orthogonal, scaled, spectral])
def test_a_constructor_that_needs_values_builds_the_model_whole(make: Any) -> None:
    model, weights = build(make, Weights("init"), 0)
    assert weights.kind == "built"
    assert "constructor" in weights.reason
    assert not any(p.is_meta for p in model.parameters())


def test_lazy_modules_and_sparse_gradients_are_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="parameter weight has no shape yet"):
        check_trainable(build(lambda: nn.LazyLinear(3), Weights("init"), 0)[0])
    with pytest.raises(UserError, match="0: an embedding with sparse=True"):
        check_trainable(nn.Sequential(nn.Embedding(3, 3, sparse=True)))


def train_channels_last(kind: str, steps: int) -> list[Tensor]:
    with STRATEGIES[kind](device="cpu") as strategy:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
        model, optimizer = strategy.prepare(
            model, lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), weights=Weights("built")
        )

        class Images(Sum):
            def inputs(self, batch: Tensor) -> dict[str, Tensor]:
                return {"input": batch}

        for step in range(steps):
            if step == steps - 1:  # as from a checkpoint
                state = strategy.state(model, optimizer)
                strategy.load_state(model, optimizer, state)
            images = torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)
            strategy.forward_backward(model, [MicroBatch(images, [0, 0], [0, 1])], Images(), step)
            strategy.step(optimizer)
        return [getattr(p, "full_tensor", p.detach)().detach() for p in model.parameters()]


def test_optimizer_state_comes_back_in_the_memory_order_of_its_parameter() -> None:
    """Fused kernels go through memory, so that state in another order would belong to other elements."""
    with SingleStrategy(device="cpu") as strategy:
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        model, optimizer = strategy.prepare(
            model, lambda model: torch.optim.AdamW(model.parameters(), fused=True), weights=Weights("built")
        )
        model(torch.ones(1, 3, 4, 4)).square().sum().backward()
        strategy.step(optimizer)
        before = {p: slots["exp_avg"].clone() for p, slots in optimizer.state.items()}
        state = strategy.state(model, optimizer)
        contiguous = {name: {k: t.contiguous() for k, t in slots.items()} for name, slots in state.optimizer.items()}
        strategy.load_state(model, optimizer, type(state)(state.model, contiguous))
        for parameter, moment in before.items():
            restored = optimizer.state[parameter]["exp_avg"]
            assert torch.equal(restored, moment)
            assert restored.stride() == moment.stride() == parameter.stride()


def test_channels_last_under_fsdp(pool2: Pool) -> None:
    alone = train_channels_last("single", 2)
    for weights in pool2.run(train_channels_last, "fsdp", 2, init=False):
        for expected, found in zip(alone, weights, strict=True):
            torch.testing.assert_close(found, expected)
