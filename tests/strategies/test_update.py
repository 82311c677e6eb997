"""Optimizers that are stepped by hand after `prepare` or `Loop.wrap`, and which optimizers a layout takes."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from pool import Pool
from strategies.nets import PLAN, adamw, build, make, rows, sgd, squares, whole
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import UserError
from shoal.strategies import DistributedStrategy, Loop
from shoal.strategies.contract import _inverse_on_device, _per_count
from shoal.strategies.update import Update, _judge, _judge_on_device
from shoal.tensors import local_part
from shoal.types import Weights

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="the package deepspeed is not installed")


def place(strategy: DistributedStrategy, verb: str, builder: Any = adamw) -> tuple[nn.Module, Optimizer]:
    """Returns the plain model in its place, and its optimizer."""
    if verb == "prepare":
        return strategy.prepare(build(), builder, PLAN, Weights("built"))
    loop = Loop(strategy)
    _, optimizer = loop.wrap(build(), builder, plan=PLAN)
    return loop.model, optimizer


def backward(strategy: DistributedStrategy, step: int = 0) -> None:
    x, y = rows(4, 10 * step + strategy.rank)
    squares(strategy.engine(x), y).mean().backward()


def with_gradient(model: nn.Module) -> int:
    return sum(p.grad is not None for p in model.parameters())


def clear(verb: str, set_to_none: bool) -> list[int]:
    """Returns how many parameters have a gradient after a backward, zero_grad, a step, a backward, and zero_grad."""
    with make("fsdp") as strategy:
        model, optimizer = place(strategy, verb)
        counts = []
        for _ in range(2):
            backward(strategy)
            counts.append(with_gradient(model))
            optimizer.zero_grad(set_to_none=set_to_none)
            counts.append(with_gradient(model))
            backward(strategy)
            strategy.step(optimizer)
        return counts


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("verb", ["prepare", "wrap"])
def test_zero_grad_clears_the_gradients_of_shards(pool2: Pool, verb: str, set_to_none: bool) -> None:
    """The optimizer holds local parts, but gradients arrive at the DTensors."""
    assert pool2.run(clear, verb, set_to_none, init=False) == [[5, 0, 5, 0]] * 2


def step_by_hand(kind: str, verb: str, by_hand: bool) -> dict[str, Tensor]:
    with make(kind) as strategy:
        model, optimizer = place(strategy, verb)
        for step in range(3):
            backward(strategy, step)
            if by_hand:
                optimizer.step()
                optimizer.zero_grad()
            else:
                strategy.step(optimizer)
        return whole(strategy.state(model, optimizer).model)


@pytest.mark.parametrize("verb", ["prepare", "wrap"])
@pytest.mark.parametrize("kind", ["fsdp", "ddp", "tp"])
def test_a_plain_step_moves_the_weights(pool2: Pool, kind: str, verb: str) -> None:
    """As far as the strategy's own step does."""
    expected = pool2.run(step_by_hand, kind, verb, False, init=False)
    for ours, plain in zip(expected, pool2.run(step_by_hand, kind, verb, True, init=False), strict=True):
        torch.testing.assert_close(plain, ours, rtol=0, atol=0)
        assert all(not torch.equal(plain[name], start) for name, start in build().named_parameters())


def average_by_hand(how: str) -> dict[str, Tensor]:
    with make("ddp") as strategy:
        loop = Loop(strategy)
        if how == "joins later":
            (model,) = loop.wrap(build(), exchange="at_step")
            optimizer = sgd(model)
        else:
            _, optimizer = loop.wrap(build(), sgd, exchange="at_step")
        backward(strategy)
        optimizer.step() if how == "by hand" else loop.step(optimizer)
        return {name: p.detach().clone() for name, p in loop.model.named_parameters()}


def test_gradients_are_averaged_at_every_step(pool2: Pool) -> None:
    """With exchange="at_step", also at that of an optimizer that joined later, and at a plain one."""
    model = build()
    losses = [squares(model(x), y).mean() for x, y in (rows(4, 0), rows(4, 1))]
    torch.stack(losses).mean().backward()
    sgd(model).step()
    for how in ("by wrap", "joins later", "by hand"):
        for weights in pool2.run(average_by_hand, how, init=False):
            torch.testing.assert_close(weights, dict(model.named_parameters()), rtol=1e-6, atol=1e-6)


def refused(kind: str, options: dict[str, Any], verb: str) -> str:
    with make(kind, **options) as strategy:
        model, optimizer = place(strategy, verb, sgd)
        before = whole(strategy.state(model, optimizer).model)
        with pytest.raises(UserError) as refusal:
            optimizer.step()
        after = whole(strategy.state(model, optimizer).model)
        assert all(torch.equal(before[name], after[name]) for name in before)
        return str(refusal.value)


@pytest.mark.parametrize("verb", ["prepare", "wrap"])
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_under_fp16_a_plain_step_is_refused(pool2: Pool, kind: str, verb: str) -> None:
    for said in pool2.run(refused, kind, {"mixed_precision": "fp16"}, verb, init=False):
        assert said.startswith("optimizer.step() does not know the loss scale of fp16; use step(")
        assert "\n" not in said


def test_under_fp16_a_plain_step_is_refused_on_one_process() -> None:
    assert "the loss scale of fp16" in refused("single", {"mixed_precision": "fp16"}, "wrap")


@needs_deepspeed
@pytest.mark.parametrize("kind", ["zero_1", "zero_3"])
def test_with_deepspeed_a_plain_step_is_refused(pool2: Pool, kind: str) -> None:
    for said in pool2.run(refused, kind, {}, "prepare", init=False):
        assert said.startswith("optimizer.step() does not reach the gradients, which DeepSpeed holds; use step(")


def throw_away(kind: str) -> str:
    with make(kind) as strategy:
        loop = Loop(strategy)
        model, _ = loop.wrap(build(), sgd)
        loop.zero_grad()
        loop.backward(model(rows(4, 0)[0]).sum())
        with pytest.raises(UserError) as refusal:
            loop.zero_grad()
        loop.step()
        loop.zero_grad()
        return str(refusal.value)


@needs_deepspeed
def test_with_deepspeed_gradients_cannot_be_thrown_away(pool2: Pool) -> None:
    for said in pool2.run(throw_away, "zero_2", init=False):
        assert said == "zero_grad(): DeepSpeed keeps the gradients of a backward until it steps; call step first"


# Optimizers that look at whole tensors


def adafactor(model: nn.Module) -> Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.05)


def muon(model: nn.Module) -> Optimizer:
    """Muon takes matrices alone."""
    return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.05)


class Adam(torch.optim.SGD):
    """Not torch's, whatever its name says: it makes each gradient as long as 1."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = parameter.grad / parameter.grad.norm()
        super().step()


def not_adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=0.05)


WHOLE_TENSORS = [adafactor, not_adam, *([muon] if hasattr(torch.optim, "Muon") else [])]


def try_builder(kind: str, verb: str, builder: Any) -> str:
    with make(kind) as strategy:
        try:
            place(strategy, verb, builder)
        except UserError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("builder", WHOLE_TENSORS)
@pytest.mark.parametrize(("kind", "verb"), [("fsdp", "prepare"), ("fsdp", "wrap"), ("tp", "prepare")])
def test_cut_parameters_need_an_optimizer_that_works_by_element(
    pool2: Pool, kind: str, verb: str, builder: Any
) -> None:
    for said in pool2.run(try_builder, kind, verb, builder, init=False):
        assert "looks at whole tensors, but this layout splits parameters" in said
        assert said.endswith("or strategy ddp")
        assert "\n" not in said


def steps_with(kind: str, builder: Any) -> dict[str, Tensor]:
    with make(kind) as strategy:
        model, optimizer = place(strategy, "wrap", builder)
        for step in range(2):
            if kind == "single":
                batches = [rows(4, 10 * step + rank) for rank in range(2)]
                torch.stack([squares(model(x), y).mean() for x, y in batches]).mean().backward()
            else:
                backward(strategy, step)
            strategy.step(optimizer)
        return whole(strategy.state(model, optimizer).model)


@pytest.mark.parametrize("builder", WHOLE_TENSORS)
@pytest.mark.parametrize("kind", ["ddp", "fsdp_no_shard"])
def test_whole_parameters_take_any_optimizer(pool2: Pool, kind: str, builder: Any) -> None:
    alone = steps_with("single", builder)
    for weights in pool2.run(steps_with, kind, builder, init=False):
        torch.testing.assert_close(weights, alone, rtol=1e-4, atol=1e-5)


# The loss scale of fp16 with several optimizers

SMALL = 1e-3  # so that fp16 can hold the gradient times the first loss scale


def two_optimizers(kind: str, exchange: str | None) -> list[tuple[float, float, float]]:
    """Takes two steps with two optimizers that have gradients of the same backward.

    The gradient of the first optimizer overflows in the first step. Returns for each step whether its update was
    skipped, the norm of the second optimizer's gradient, and the loss scale afterwards.
    """
    model = build()
    model.scale.requires_grad_(False)
    builders = [lambda m: torch.optim.SGD(m.up.parameters()), lambda m: torch.optim.SGD(m.down.parameters(), lr=0.0)]
    with make(kind, mixed_precision="fp16") as strategy:
        loop, seen = Loop(strategy), []
        module, first, second = loop.wrap(model, *builders, exchange=exchange)
        for step in range(2):
            x, y = rows(4, 0)
            with loop.autocast():
                loss = squares(module(x), y).mean() * SMALL
            loop.backward(loss)
            if step == 0:
                local_part(model.up.bias.grad).fill_(torch.inf)  # type: ignore[arg-type]
            skipped = loop.step(first).skipped.item()
            norm = loop.step(second).grad_norm.item()
            assert strategy._loss_scale is not None
            seen.append((skipped, norm, strategy._loss_scale.scale.item()))
        return seen


@pytest.mark.parametrize(("kind", "exchange"), [("fsdp", None), ("ddp", None), ("ddp", "overlapped")])
def test_the_loss_scale_waits_for_the_last_optimizer(pool2: Pool, kind: str, exchange: str | None) -> None:
    """Gradients that were made with one scale are divided by it, and then the scale is halved."""
    model = build()
    x, y = rows(4, 0)
    with torch.autocast("cpu", torch.float16):
        loss = squares(model(x), y).mean() * SMALL
    (loss * 2.0**16).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.down.parameters()]).item() / 2**16
    expected = [(1.0, norm, 2.0**15), (0.0, norm, 2.0**15)]
    for seen in [two_optimizers("single", None), *pool2.run(two_optimizers, kind, exchange, init=False)]:
        assert seen == [pytest.approx(step, rel=1e-3) for step in expected]


@pytest.mark.parametrize("length", [1e-3, 10.0])
def test_gradients_are_clipped_as_by_clip_grad_norm(length: float) -> None:
    """torch and DeepSpeed add 1e-6 to the norm; a norm of 0.001 would otherwise be clipped to 0.1% more."""
    ours, theirs = (nn.Parameter(torch.zeros(4)) for _ in range(2))
    for parameter in (ours, theirs):
        parameter.grad = torch.full((4,), length / 2)
    Update(torch.optim.SGD([ours], lr=1.0), None).step(max_norm=length / 2)
    nn.utils.clip_grad_norm_([theirs], length / 2)
    torch.optim.SGD([theirs], lr=1.0).step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("max_norm", [None, 0.7])
@pytest.mark.parametrize("number", [0.0, 1e-9, 0.3, 0.7, 5.0, 1e30, math.inf, math.nan])
def test_the_host_judges_a_norm_as_a_device_does(number: float, max_norm: float | None) -> None:
    """A norm on the CPU is judged by Python's numbers, and one on a GPU by operations there."""
    norm = torch.tensor(number)
    skipped, divisor = _judge(norm, norm.item(), max_norm)
    skipped_on_device, divisor_on_device = _judge_on_device(norm, max_norm)
    assert (skipped.item(), skipped.dtype) == (skipped_on_device.item(), skipped_on_device.dtype)
    assert skipped.item() == (not math.isfinite(number))
    if math.isfinite(number):
        expected = 1.0 if divisor_on_device is None else divisor_on_device.item()
        assert (1.0 if divisor is None else divisor.item()) == pytest.approx(expected, rel=2e-7)


@pytest.mark.parametrize("count", [0, 1, 3, 1000, -2, 0.0, 0.5, 7.25, -0.5, math.inf, math.nan])
def test_the_host_inverts_a_count_as_a_device_does(count: float) -> None:
    for dtype in (torch.float32, torch.float64) if isinstance(count, float) else (torch.int64, torch.int32):
        tensor = torch.tensor(count, dtype=dtype)
        torch.testing.assert_close(_per_count(tensor, None), _inverse_on_device(tensor), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_begins_with_the_first_update_that_is_not_skipped(nesterov: bool) -> None:
    """Fused SGD allocates momentum in its first step, and would leave it unfilled if that one is skipped."""
    torch.manual_seed(0)
    start, gradients = torch.randn(2, 5), torch.randn(3, 2, 5)
    parameters = [nn.Parameter(row.clone()) for row in start]
    options: Any = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov}
    update = Update(torch.optim.SGD(parameters, fused=True, **options), None)
    expected = [nn.Parameter(row.clone()) for row in start]
    reference = torch.optim.SGD(expected, **options)
    for step, rows_of in enumerate((gradients[0] * math.inf, *gradients)):
        for i, (parameter, right) in enumerate(zip(parameters, expected, strict=True)):
            has_one = i == 0 or step > 1  # the second parameter gets its first gradient later
            parameter.grad = rows_of[i].clone() if has_one else None
            right.grad = rows_of[i].clone() if has_one else None
        assert bool(update.step().skipped) == (step == 0)
        if step:
            reference.step()
    for parameter, right in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter, right)
