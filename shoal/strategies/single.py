"""One process, one device."""

from __future__ import annotations

from typing import Any

from shoal.errors import UserError
from shoal.strategies.base import DistributedStrategy


class SingleStrategy(DistributedStrategy):
    name = "single"

    def __init__(self, **options: Any):
        super().__init__(**options)
        if self.world.size > 1:
            raise UserError(
                f"distributed.strategy = single, but {self.world.size} processes were started; use ddp or start one"
            )
