"""Buffers that a forward changes, such as BatchNorm's running means, where nobody but us keeps them equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class MovingBuffers:
    """Lets them start every step as rank 0 has them, as under DDP. Which they are is seen in the first step."""

    def __init__(self, broadcast: Callable[[Tensor], None]) -> None:
        self._broadcast = broadcast
        self._names: list[str] | None = None

    @contextmanager
    def equal_at_start(self, model: nn.Module) -> Iterator[None]:
        """Around a step's forwards."""
        if self._names is not None:
            for name in self._names:
                self._broadcast(model.get_buffer(name))
            yield
            return
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        yield
        after = dict(model.named_buffers())
        self._names = [n for n, b in before.items() if n in after and not torch.equal(b, after[n])]
