"""Buffers that a forward changes, such as BatchNorm's running means, in engines that do not keep them equal."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class MovingBuffers:
    """Lets such buffers start every step with rank 0's values, as DDP does. The first step shows which they are."""

    def __init__(self, broadcast: Callable[[Tensor], None]) -> None:
        self._broadcast = broadcast
        self._moving: list[str] | None = None
        self._before: dict[str, Tensor] = {}

    def before_step(self, model: nn.Module) -> None:
        if self._moving is None:
            self._before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for name in self._moving or ():
            self._broadcast(model.get_buffer(name))

    def after_step(self, model: nn.Module) -> None:
        """Compares values once. Autograd's count of writes would not do: BatchNorm writes without being counted."""
        if self._moving is None:
            after = dict(model.named_buffers())
            self._moving = [
                name for name, b in self._before.items() if name in after and not torch.equal(b, after[name])
            ]
            self._before = {}
