"""Optimizers as users write them, for the tests."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


class Base(Optimizer):
    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0, strength: float = 1.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "strength": strength})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    self.update(parameter, parameter.grad, group)

    def update(self, parameter: Any, gradient: Any, group: Any) -> None:
        raise NotImplementedError


class Counting(Base):
    """Adam with a step count that is a number of Python."""

    def update(self, parameter: Any, gradient: Any, group: Any) -> None:
        state = self.state[parameter]
        if not state:
            state.update(count=0, mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter))
        state["count"] += 1
        state["mean"].lerp_(gradient, 0.1)
        state["square"].lerp_(gradient.square(), 0.01)
        mean, square = state["mean"] / (1 - 0.9 ** state["count"]), state["square"] / (1 - 0.99 ** state["count"])
        parameter.sub_(group["lr"] * group["strength"] * mean / (square.sqrt() + 1e-8))


class Momentum(Base):
    """The same, without numbers."""

    def update(self, parameter: Any, gradient: Any, group: Any) -> None:
        mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
        parameter.sub_(group["lr"] * mean.lerp_(gradient, 0.1))


class Lars(Base):
    """Looks at the norm of a whole tensor."""

    def update(self, parameter: Any, gradient: Any, group: Any) -> None:
        parameter.sub_(group["lr"] * gradient / gradient.norm())


class Factored(Base):
    """Keeps a number for each row."""

    def update(self, parameter: Any, gradient: Any, group: Any) -> None:
        rows = self.state[parameter].setdefault("rows", torch.zeros(len(parameter)))
        rows += 1
        parameter.sub_(group["lr"] * gradient)


class Hidden(Base):
    """Keeps its step count where no checkpoint looks."""

    steps = 0

    def update(self, parameter: Any, gradient: Any, group: Any) -> None:
        self.steps += 1
        parameter.sub_(group["lr"] / self.steps * gradient)


class InGroups(Base):
    def update(self, parameter: Any, gradient: Any, group: Any) -> None:
        group["k"] = group.get("k", 0) + 1
        parameter.sub_(group["lr"] / group["k"] * gradient)


class EveryTenth(Base):
    """Looks at its count so rarely that a short trial does not notice."""

    steps = 0

    def update(self, parameter: Any, gradient: Any, group: Any) -> None:
        self.steps += 1
        parameter.sub_(group["lr"] * (2 if self.steps % 10 == 0 else 1) * gradient)


class Watching(Momentum):
    """Keeps a number that changes nothing."""

    def update(self, parameter: Any, gradient: Any, group: Any) -> None:
        self.largest = gradient.abs().max().item()
        super().update(parameter, gradient, group)


class Listing(Base):
    def update(self, parameter: Any, gradient: Any, group: Any) -> None:
        self.state[parameter].setdefault("history", []).append(0.0)


class NoRate(Optimizer):
    def __init__(self, params: Any):
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


class Picky(Momentum):
    def __init__(self, params: Any, lr: float, strength: float = 1.0):
        if strength > 1:
            raise ValueError("too strong")
        super().__init__(params, lr, 0.0, strength)


def not_a_class(params: Any) -> None: ...
