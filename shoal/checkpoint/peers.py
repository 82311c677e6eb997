"""The ranks that write a checkpoint together, and how they agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from shoal.checkpoint.regions import WrongLayout

T = TypeVar("T")


@dataclass(frozen=True)
class Peers:
    """All ranks; `group` is for talking in the background, while others talk in theirs."""

    group: dist.ProcessGroup | None = None
    alone: bool = False
    """True for a rank that writes everything by itself, without asking the others."""

    @property
    def _together(self) -> bool:
        return dist.is_initialized() and not self.alone

    @property
    def rank(self) -> int:
        return dist.get_rank() if self._together else 0

    @property
    def size(self) -> int:
        return dist.get_world_size() if self._together else 1

    def agree(self, task: Callable[[], T]) -> T:
        """Does `task` on every rank, or raises the first rank's error on every rank."""
        error: Exception | None = None
        try:
            result = task()
        except (OSError, WrongLayout) as caught:
            error = caught
        for problem in self.tell_all(error):
            if problem:
                raise problem
        return result

    def tell_all(self, value: T) -> list[T]:
        """All ranks' values, on every rank."""
        if not self._together:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather(self, value: T) -> list[T]:
        """All ranks' values on rank 0, which alone has to hold them; nothing on the others."""
        if not self._together:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, group=self.group)
        return values or []

    def scatter(self, values: list[T]) -> T:
        """To every rank its own of rank 0's."""
        if not self._together:
            return values[0]
        received: list[Any] = [None]
        dist.scatter_object_list(received, values if self.rank == 0 else None, group=self.group)
        return received[0]


ALL, ALONE = Peers(), Peers(alone=True)
