"""A loop by hand that calls more than the forward, and has more than one optimizer, computes what one process does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pool import Pool
from strategies.nets import make, whole
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.strategies import DistributedStrategy, Loop
from shoal.types import ParallelPlan

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="the package deepspeed is not installed")
ZERO = [pytest.param(f"zero_{stage}", marks=needs_deepspeed) for stage in (1, 2, 3)]
STEPS, ROWS = 3, 8


class Scored(nn.Module):
    """Its methods use a parameter of its own after they have called the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.full((1,), 1.5))
        self.dtypes: set[torch.dtype] = set()
        """The types that `first` gave, in the forward and in methods."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self._hidden(x).tanh()) * self.scale

    def _hidden(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.dtypes.add(hidden.dtype)
        return hidden

    def score(self, x: Tensor, y: Tensor) -> Tensor:
        penalty = self._hidden(x).float().square().mean()
        return (self(x) - y).square().mean() * self.scale.sum() + 0.01 * penalty

    def score_twice(self, x: Tensor, *, y: Tensor) -> Tensor:
        return self.score(x, y) + 0.5 * self.score(-x, y) + 0.1 * self.scale.sum()

    def step_back(self, x: Tensor, y: Tensor) -> Tensor:
        """Runs the backward itself."""
        loss = self.score(x, y)
        loss.backward()
        return loss.detach()


METHODS = ("score", "score_twice", "step_back")
PLAN = ParallelPlan(blocks=("first", "second"))


def build() -> Scored:
    torch.manual_seed(3)
    return Scored()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def batch(strategy: DistributedStrategy, step: int) -> tuple[Tensor, ...]:
    """Returns this rank's rows: as many as every other's, so that the mean over ranks is the mean over all."""
    generator = torch.Generator().manual_seed(step)
    parts = torch.randn(ROWS, 4, generator=generator), torch.randn(ROWS, 1, generator=generator)
    return tuple(part.tensor_split(strategy.data_size)[strategy.data_rank] for part in parts)


def train(kind: str, method: str, exchange: str | None = None, **options: Any) -> dict[str, Any]:
    with make(kind, **options) as strategy:
        loop, losses, scores = Loop(strategy), [], []
        module, optimizer = loop.wrap(build(), adamw, plan=PLAN, methods=METHODS, exchange=exchange)
        for step in range(STEPS):
            x, y = batch(strategy, step)
            with loop.autocast():
                if method == "step_back":
                    loss = module.step_back(x, y)
                else:
                    loss = module.score(x, y) if method == "score" else module.score_twice(x, y=y)
            if method != "step_back":
                loop.backward(loss)
            loop.step(max_norm=1.0)
            losses.append(loop.reduce(loss.detach()).item())
            with torch.no_grad(), loop.autocast():
                scores.append(loop.reduce(module.score(x, y).float()).item())
                scores.append(loop.reduce(module(x).float().mean()).item())  # as before: the method left nothing behind
        weights = whole(strategy.state(loop.model, optimizer).model)
        return {"losses": losses, "scores": scores, "weights": weights, "dtypes": loop.model.dtypes}


def check(found: dict[str, Any], alone: dict[str, Any], rel: float = 1e-5) -> None:
    assert found["losses"] == pytest.approx(alone["losses"], rel=rel)
    assert found["scores"] == pytest.approx(alone["scores"], rel=rel, abs=rel)
    torch.testing.assert_close(found["weights"], alone["weights"], rtol=rel, atol=10 * rel)


@pytest.mark.parametrize("method", ["score", "score_twice"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp", *ZERO])
def test_a_method_that_calls_the_model_and_goes_on(pool2: Pool, kind: str, method: str) -> None:
    alone = train("single", method)
    for found in pool2.run(train, kind, method, init=False):
        check(found, alone)
    assert len({*alone["losses"]}) == STEPS


@contextmanager
def autocast_off(engine: Any) -> Iterator[None]:
    """Does on the CPU what DeepSpeed does on GPUs around the model."""
    with torch.autocast("cpu", enabled=False):
        yield


def train_in_bf16(kind: str) -> dict[str, Any]:
    with patch("deepspeed.runtime.engine.autocast_if_enabled", autocast_off) if kind == "zero_2" else nullcontext():
        return train(kind, "score", mixed_precision="bf16")


@pytest.mark.parametrize("kind", ["ddp", "fsdp", pytest.param("zero_2", marks=needs_deepspeed)])
def test_methods_compute_in_the_precision_of_the_loop(pool2: Pool, kind: str) -> None:
    alone = train("single", "score", mixed_precision="bf16")
    for found in pool2.run(train_in_bf16, kind, init=False):
        assert found["dtypes"] == {torch.bfloat16}
        check(found, alone, rel=3e-2)


def refused_backward() -> str:
    with make("ddp") as strategy:
        loop = Loop(strategy)
        module, _ = loop.wrap(build(), adamw, methods=METHODS)
        with pytest.raises(UserError) as refusal:
            module.step_back(*batch(strategy, 0))
        return str(refusal.value)


def test_a_backward_inside_a_method(pool2: Pool) -> None:
    """DDP would leave gradients as they are, because its forward has not ended."""
    for said in pool2.run(refused_backward, init=False):
        assert said.endswith("gradients would not be averaged; use loop.wrap(..., exchange='at_step')")
        assert "\n" not in said
    alone = train("single", "step_back")
    check(train("single", "score"), alone)
    for kind, exchange in (("ddp", "at_step"), ("fsdp", None)):
        for found in pool2.run(train, kind, "step_back", exchange, init=False):
            check(found, alone)


# Several optimizers


class Adversaries(nn.Module):
    """One model makes numbers, the other one tells them from real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.critic = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def critic_loss(self, x: Tensor, y: Tensor) -> Tensor:
        made = self.generator(x).detach()
        return nn.functional.softplus(self.critic(made)).mean() + nn.functional.softplus(-self.critic(y)).mean()

    def generator_loss(self, x: Tensor) -> Tensor:
        return nn.functional.softplus(-self.critic(self.generator(x))).mean()


def train_adversaries(kind: str) -> dict[str, Any]:
    def adam_of(part: str) -> Any:
        return lambda model: torch.optim.AdamW(model.get_submodule(part).parameters(), lr=0.05, fused=True)

    torch.manual_seed(3)
    with make(kind) as strategy:
        loop, losses = Loop(strategy), []
        module, critic, generator = loop.wrap(
            Adversaries(),
            adam_of("critic"),
            adam_of("generator"),
            plan=ParallelPlan(blocks=("generator", "critic")),
            methods=("critic_loss", "generator_loss"),
        )
        for step in range(4):
            x, y = batch(strategy, step)
            for optimizer in (critic, generator):
                loop.zero_grad(critic)  # the generator's backward has left gradients in the critic
                loss = module.critic_loss(x, y) if optimizer is critic else module.generator_loss(x)
                loop.backward(loss)
                info = loop.step(optimizer, max_norm=0.5)
                losses.append((loop.reduce(loss.detach()).item(), info.grad_norm.item()))
        with pytest.raises(UserError, match="the loop has 2 optimizers; pass the one that steps"):
            loop.step()
        weights = {**strategy.state(loop.model, critic).model, **strategy.state(loop.model, generator).model}
        return {"losses": losses, "weights": whole(weights), "kind": type(module).__name__}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_several_optimizers_take_turns(pool2: Pool, kind: str) -> None:
    alone = train_adversaries("single")
    for found in pool2.run(train_adversaries, kind, init=False):
        assert found["kind"] == ("Adversaries" if kind == "ddp" else "FSDPAdversaries")
        for (loss, norm), (expected, expected_norm) in zip(found["losses"], alone["losses"], strict=True):
            assert loss == pytest.approx(expected, rel=1e-5)
            assert norm == pytest.approx(expected_norm, rel=1e-4)
        torch.testing.assert_close(found["weights"], alone["weights"], rtol=1e-4, atol=1e-5)


def save_and_load(kind: str, folder: str) -> list[float]:
    """Trains with two optimizers, saves, spoils everything, loads, and takes one step more."""
    with make(kind) as strategy:
        torch.manual_seed(3)
        loop = Loop(strategy)
        module, *optimizers = loop.wrap(
            build(),
            lambda model: torch.optim.AdamW(model.first.parameters(), lr=0.1, fused=True),
            lambda model: torch.optim.SGD([*model.second.parameters(), model.scale], lr=0.1, momentum=0.9),
            plan=PLAN,
        )

        def step(index: int) -> float:
            x, y = batch(strategy, index)
            loss = (module(x) - y).square().mean()
            loop.backward(loss)
            for optimizer in optimizers:
                loop.step(optimizer)
            return loop.reduce(loss.detach()).item()

        losses = [step(index) for index in range(2)]
        loop.save(folder, step=2)
        after = [step(2), step(3)]
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 7.0
        assert loop.load(folder) == {"step": 2}
        assert [step(2), step(3)] == after
        return [*losses, *after]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_state_of_several_optimizers_is_saved(pool2: Pool, tmp_path: Any, kind: str) -> None:
    alone = save_and_load("single", str(tmp_path / "alone"))
    for losses in pool2.run(save_and_load, kind, str(tmp_path / "ranks"), init=False):
        assert losses == pytest.approx(alone, rel=1e-5)


# Clipping by value


def clip_values(kind: str, fused: bool, small: float = 1.0, **options: Any) -> dict[str, Tensor]:
    """Returns the weights after two steps; `small` makes gradients smaller, for fp16, and steps larger."""
    with make(kind, **options) as strategy:
        loop = Loop(strategy)
        module, optimizer = loop.wrap(
            build(), lambda model: torch.optim.SGD(model.parameters(), lr=0.5 / small, fused=fused), plan=PLAN
        )
        for step in range(2):
            x, y = batch(strategy, step)
            with loop.autocast():
                loss = (module(x) - y).square().mean() * small
            loop.backward(loss)
            if step == 0:
                loop.clip(max_value=0.05 * small)
            loop.step()
        return whole(strategy.state(loop.model, optimizer).model)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_elements_are_clipped_by_value(pool2: Pool, kind: str, fused: bool) -> None:
    """In the next step alone, and of the gradient over all ranks."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    strategy = make("single")
    for step in range(2):
        x, y = batch(strategy, step)
        (model(x) - y).square().mean().backward()
        if step == 0:
            assert max(p.grad.abs().max() for p in model.parameters() if p.grad is not None) > 0.05
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    expected = dict(model.named_parameters())
    for weights in [clip_values("single", fused), *pool2.run(clip_values, kind, fused, init=False)]:
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    for weights in pool2.run(clip_values, kind, fused, 1e-3, mixed_precision="fp16", init=False):
        torch.testing.assert_close(weights, expected, rtol=1e-2, atol=1e-2)
