"""Buffers that a forward changes, such as BatchNorm's running means, in engines that do not keep them equal."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from shoal.torch_private import times_written


class MovingBuffers:
    """Lets such buffers start every step with rank 0's values, as DDP does. The first step shows which they are."""

    def __init__(self, broadcast: Callable[[Tensor], None]) -> None:
        self._broadcast = broadcast
        self._moving: list[str] | None = None
        self._before: dict[str, tuple[int, int]] = {}

    def before_step(self, model: nn.Module) -> None:
        if self._moving is None:
            self._before = _versions(model)
        for name in self._moving or ():
            self._broadcast(model.get_buffer(name))

    def after_step(self, model: nn.Module) -> None:
        if self._moving is None:
            versions = _versions(model)
            self._moving = [name for name, before in self._before.items() if versions.get(name, before) != before]


def _versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Counts writes instead of comparing values, which would read the device."""
    return {name: (id(buffer), times_written(buffer)) for name, buffer in model.named_buffers()}
