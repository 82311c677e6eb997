"""Trying out an optimizer on small tensors: does it step, treat each element by itself, and resume exactly?

An optimizer of a user's own says none of this, so it is found out: on a tensor as a whole and in parts, and in one go
and interrupted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import UserError, one_line
from shoal.parallel.sharding.slots import slot_of, slots_as_tensors
from shoal.tensors import local_part

Groups = list[dict[str, Any]]
Build = Callable[[Groups], Optimizer]

SHAPE, STEPS, LEARNING_RATE = (6, 4), 8, 0.1
LONG_STEPS = 250
"""For an optimizer that changes a number besides its state, such as a count, which it may use every so many steps."""
PARTS: Sequence[Callable[[Tensor], Sequence[Tensor]]] = (
    lambda whole: [whole[:4], whole[4:], whole[6:]],  # rows, as fully_shard; a rank may have none
    lambda whole: [whole[:, :1], whole[:, 1:]],  # columns, as tensor parallelism
    lambda whole: [whole.flatten()[:7], whole.flatten()[7:]],  # stretches of elements, as ZeRO
)
"""How layouts split a tensor."""


@dataclass(frozen=True)
class Trial:
    """What was found out about an optimizer."""

    elementwise: bool
    """True if updating the parts of a tensor is updating the tensor."""
    all_tensors: bool
    """True if its state has no numbers of Python."""
    problem: str
    """Why it cannot be used at all, or an empty string."""


def try_out(optimizer: Optimizer) -> Trial:
    """Tries an optimizer that is built like this one, on the device of its parameters."""
    build, device = builder_of(optimizer), _device(optimizer)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(SHAPE, generator=generator)
        sizes = torch.logspace(-1, 1, SHAPE[0])[:, None]  # parts with gradients of different sizes
        gradients = [torch.randn(SHAPE, generator=generator) * sizes for _ in range(STEPS)]
        start, gradients = start.to(device), [gradient.to(device) for gradient in gradients]
        try:
            undisturbed, state = _train(build, start, gradients)
            problem = _resume_problem(build, start, gradients, undisturbed)
            if not problem and _changes_besides_state(build, start, gradients):
                longer = [gradients[step % STEPS] for step in range(LONG_STEPS)]
                problem = _resume_problem(build, start, longer, _train(build, start, longer)[0])
        except Exception as error:
            return Trial(False, False, f"it fails on a small tensor: {one_line(error)}")
        shapes = (value.shape for value in state.values() if isinstance(value, Tensor))
        like_parameter = all(shape == start.shape or shape.numel() == 1 for shape in shapes)
        elementwise = like_parameter and all(_same_in_parts(build, start, gradients, undisturbed, p) for p in PARTS)
    return Trial(elementwise, all(isinstance(value, Tensor) for value in state.values()), problem)


def builder_of(optimizer: Optimizer) -> Build:
    """Returns a function that builds another optimizer like this one.

    It is the function that has built this one, if that left itself as `build_again`. Otherwise the class is called
    with those of its arguments that are in `defaults`, where optimizers keep them by convention.
    """
    if again := getattr(optimizer, "build_again", None):
        build: Build = again
        return build
    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters
    options = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    return lambda groups: kind(groups, **options)


def starts_with_state(optimizer: Optimizer) -> bool:
    """Returns whether the constructor already makes state, as Adagrad's does."""
    return bool(optimizer.state) and bool(builder_of(optimizer)([{"params": [nn.Parameter(torch.zeros(1))]}]).state)


def _device(optimizer: Optimizer) -> torch.device:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not parameter.is_meta:
                return local_part(parameter).device
    return torch.device("cpu")


def _build_for(build: Build, parameter: nn.Parameter) -> Optimizer:
    optimizer = build([{"params": [parameter]}])
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = LEARNING_RATE  # with a small one, differences would drown in rounding
    return optimizer


def _step(optimizer: Optimizer, parameter: nn.Parameter, gradient: Tensor, step: int) -> None:
    torch.manual_seed(step)
    parameter.grad = gradient.clone()
    optimizer.step()


def _train(build: Build, start: Tensor, gradients: Sequence[Tensor]) -> tuple[Tensor, dict[str, Any]]:
    """Returns a tensor after some steps, and the state that the optimizer keeps for it."""
    parameter = nn.Parameter(start.clone())
    optimizer = _build_for(build, parameter)
    for step, gradient in enumerate(gradients):
        _step(optimizer, parameter, gradient, step)
    return parameter.detach(), dict(optimizer.state[parameter])


def _changes_besides_state(build: Build, start: Tensor, gradients: Sequence[Tensor]) -> bool:
    """Returns whether steps change numbers in the optimizer itself or in its parameter groups."""
    parameter = nn.Parameter(start.clone())
    optimizer = _build_for(build, parameter)
    before = _numbers(optimizer)
    for step, gradient in enumerate(gradients):
        _step(optimizer, parameter, gradient, step)
    return _numbers(optimizer) != before


def _numbers(optimizer: Optimizer) -> list[tuple[str, float]]:
    """Returns the numbers among the attributes of an optimizer, and in its groups, by name."""
    groups = [item for group in optimizer.param_groups for item in group.items()]
    named = [*vars(optimizer).items(), *groups]
    singles = [(name, value) for name, value in named if isinstance(value, int | float | Tensor)]
    return [(name, float(value)) for name, value in singles if not isinstance(value, Tensor) or value.numel() == 1]


def _same_in_parts(
    build: Build,
    start: Tensor,
    gradients: Sequence[Tensor],
    expected: Tensor,
    split: Callable[[Tensor], Sequence[Tensor]],
) -> bool:
    """Returns whether optimizers of the parts, which know nothing of each other, make the whole."""
    parts_of_gradients = zip(*(split(gradient) for gradient in gradients), strict=True)
    try:
        stepped = [_train(build, part, g)[0] for part, g in zip(split(start), parts_of_gradients, strict=True)]
    except Exception:
        return False
    return all(torch.allclose(a, b, 1e-4, 1e-5) for a, b in zip(stepped, split(expected), strict=True))


def _resume_problem(build: Build, start: Tensor, gradients: Sequence[Tensor], undisturbed: Tensor) -> str:
    """Returns why a run that resumes would not end as an undisturbed one, or an empty string."""
    half = len(gradients) // 2
    weights, state = _train(build, start, gradients[:half])
    parameter = nn.Parameter(weights.clone())
    optimizer = _build_for(build, parameter)
    try:
        stored = slots_as_tensors(state)
    except UserError as error:
        return str(error)
    optimizer.state[parameter] = dict(slot_of(name, value) for name, value in stored.items())
    for step, gradient in enumerate(gradients[half:], half):
        _step(optimizer, parameter, gradient, step)
    if torch.equal(parameter.detach(), undisturbed):
        return ""
    return "it does not resume exactly: it keeps something outside of `state[parameter]`, which checkpoints do not hold"
