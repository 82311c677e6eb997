"""The ranks that write a checkpoint together: object collectives, and errors that all ranks raise together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from shoal.checkpoint.regions import WrongLayout
from shoal.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Peers:
    """All ranks. A background thread needs its own `group`: two threads must not use one process group at once."""

    group: dist.ProcessGroup | None = None
    alone: bool = False
    """True for a rank that writes everything itself, without any collective."""

    @property
    def _uses_collectives(self) -> bool:
        return dist.is_initialized() and not self.alone

    @property
    def rank(self) -> int:
        return dist.get_rank() if self._uses_collectives else 0

    @property
    def size(self) -> int:
        return dist.get_world_size() if self._uses_collectives else 1

    def run_together(self, task: Callable[[], T]) -> T:
        """Runs `task` on every rank, or raises the first rank's error on every rank."""
        error: Exception | None = None
        try:
            result = task()
        except (OSError, WrongLayout, UserError) as caught:
            error = caught
        if problems := [*filter(None, self.all_gather(error))]:
            raise problems[0]
        return result

    def run_on_rank_0(self, task: Callable[[], T]) -> T | None:
        """Runs `task` on rank 0 alone, or raises its error on every rank."""
        return self.run_together(lambda: task() if self.rank == 0 else None)

    def all_gather(self, value: T) -> list[T]:
        """Returns all ranks' values, on every rank."""
        if not self._uses_collectives:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def union(self, named: dict[str, T]) -> dict[str, T]:
        """Returns the entries of all ranks' dictionaries, on every rank."""
        return {name: value for entries in self.all_gather(named) for name, value in entries.items()}

    def gather(self, value: T) -> list[T]:
        """Returns all ranks' values on rank 0, which alone has to hold them; nothing on the others."""
        if not self._uses_collectives:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, group=self.group)
        return values or []

    def scatter(self, values: list[T]) -> T:
        """Returns to rank i the i-th of rank 0's values."""
        if not self._uses_collectives:
            return values[0]
        received: list[Any] = [None]
        dist.scatter_object_list(received, values if self.rank == 0 else None, group=self.group)
        return received[0]

    def broadcast(self, value: T) -> T:
        """Returns rank 0's value, on every rank."""
        values = [value]
        if self._uses_collectives:
            dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]


ALL, ALONE = Peers(), Peers(alone=True)
