"""The results of evaluating one set of data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shoal.training.metric_sums import Sums, add_up, means, sum_over_ranks, to_host
from shoal.training.session import Session
from shoal.types import StepOutput

KEPT_ON_DEVICE = 100
"""After so many batches the sums of metrics go to the host: each takes some memory of the device."""


class Evaluation:
    """Adds up the loss and the recipe's metrics over the batches of a set."""

    def __init__(self, session: Session):
        self._strategy, self._objects = session.strategy, session.metric_objects
        self._total = self._count = torch.zeros((), device=session.strategy.device)
        self._steps: list[Mapping[str, Any]] = []
        self._sums: Sums = {}
        """Those of this rank."""
        self._object_paths: dict[str, str] = {}

    def add(self, output: StepOutput) -> None:
        self._total, self._count = self._total + output.total, self._count + output.count
        self._steps.append(output.metrics)
        if len(self._steps) == KEPT_ON_DEVICE:
            self._settle()

    def values(self) -> dict[str, float]:
        """Returns the mean loss and the metrics over all ranks, by name. All ranks call it together."""
        self._settle()
        (sums,), paths, _ = sum_over_ranks(self._strategy, [self._sums], self._object_paths)
        return {"loss": (self._total / self._count).item(), **means(sums), **self._objects.compute(paths)}

    def _settle(self) -> None:
        self._sums = add_up(to_host(self._steps), self._sums)
        self._object_paths |= self._objects.paths_of(self._steps)
        self._steps.clear()
