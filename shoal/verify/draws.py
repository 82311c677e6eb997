"""Finds the modules that draw random numbers in a forward, such as dropout that is called as a function.

Every layout seeds its ranks and micro-batches differently, so a model that draws cannot be compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn

from shoal.torch_private import DROPOUT

_LOSS = "the recipe's loss"


def rng_state(device: torch.device) -> bytes:
    """Returns the state of the generators of the CPU and of the device."""
    state = torch.default_generator.get_state().numpy().tobytes()
    if device.type != "cpu":
        state += torch.get_device_module(device).get_rng_state(device).numpy().tobytes()
    return state


class WatchDraws:
    """Compares the generators before and after the forward of every module while it is entered.

    `draws` then has the names of the modules that drew themselves, not by a module inside of them, in their order.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        self.draws: list[str] = []
        self._model, self._device = model, device
        self._hooks: list[Any] = []
        self._open: list[tuple[bytes, int]] = []
        """For each module whose forward is under way, outermost first: the state before, and the number of draws."""
        self._after_forward: bytes | None = None

    def __enter__(self) -> WatchDraws:
        for name, module in self._model.named_modules():
            self._hooks += [
                module.register_forward_pre_hook(
                    lambda *_: self._open.append((rng_state(self._device), len(self.draws)))
                ),
                module.register_forward_hook(lambda module, *_, name=name: self._close(name, module)),
            ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        if kind is None and self._after_forward not in (None, rng_state(self._device)):
            self.draws.append(_LOSS)

    def _close(self, name: str, module: nn.Module) -> None:
        before, draws_before = self._open.pop()
        self._after_forward = rng_state(self._device)
        if self._after_forward != before and len(self.draws) == draws_before:
            self.draws.append(f"{name or 'the model'} ({type(module).__name__})")


def seed_at_forward(model: nn.Module, seed: int, device: torch.device) -> Any:
    """Seeds the generators whenever the model is called, until the returned handle is removed."""

    def seed_generators(*_: Any) -> None:
        torch.default_generator.manual_seed(seed)
        if device.type != "cpu":
            torch.get_device_module(device).manual_seed(seed)

    return model.register_forward_pre_hook(seed_generators, prepend=True)


@contextmanager
def seeds_at_forward(model: nn.Module) -> Iterator[list[int]]:
    """Yields a list that collects the seed of the generator at each call of the model."""
    seeds: list[int] = []
    hook = model.register_forward_pre_hook(lambda *_: seeds.append(torch.default_generator.initial_seed()))
    try:
        yield seeds
    finally:
        hook.remove()


def turn_off_dropout(model: nn.Module) -> None:
    """Sets the probability of every dropout to 0: `p` of dropout modules, and numbers that are named after it, which
    are given to functions (`dropout` of nn.MultiheadAttention, `attention_dropout`, `drop_path`)."""
    for module in model.modules():
        if isinstance(module, DROPOUT):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
