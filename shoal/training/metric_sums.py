"""Metrics of a user's recipe, summed over ranks and steps on the host in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.checkpoint.peers import Peers
from shoal.processes.group import cpu_group
from shoal.strategies import DistributedStrategy
from shoal.types import StepInfo, StepOutput

Sums = dict[str, tuple[float, float]]
"""The sum and the count of each metric by name."""


def gather_from_ranks(strategy: DistributedStrategy, value: Any) -> list[Any]:
    """Returns the values of the ranks that report metrics, in the order of ranks. All ranks call it together."""
    return [value for reports, value in _gather(strategy, (strategy.reports_metrics, value)) if reports]


def _gather(strategy: DistributedStrategy, value: Any) -> list[Any]:
    """Returns the values of all ranks, in their order."""
    if strategy.world_size == 1:
        return [value]
    return Peers(cpu_group() if dist.is_initialized() else None).all_gather(value)


class StepNumbers(NamedTuple):
    """The numbers of some steps, on the host."""

    totals: list[float]
    counts: list[float]
    grad_norms: list[float]
    skipped: list[float]


def read_steps(strategy: DistributedStrategy, steps: Sequence[tuple[StepOutput, StepInfo]]) -> StepNumbers:
    """Waits for the results of steps, and returns them over all ranks. All ranks call it together.

    Under `local_sgd` each rank has those of its own slice: norms are averaged, and a step that one has skipped counts
    as skipped.
    """
    columns = zip(*[(out.total, out.count, info.grad_norm, info.skipped) for out, info in steps], strict=True)
    own = StepNumbers(*[torch.stack(column).tolist() for column in columns])
    if strategy.layout.local_sgd is None:
        return own
    ranks = gather_from_ranks(strategy, own)
    totals, counts, norms, skipped = torch.tensor(ranks, dtype=torch.float64).sum(0).tolist()
    return StepNumbers(totals, counts, [norm / len(ranks) for norm in norms], [min(one, 1.0) for one in skipped])


def to_host(steps: Sequence[Mapping[str, Any]]) -> list[Sums]:
    """Waits for the sums and counts of this rank's steps; torchmetrics objects are left out."""
    numbers = [number for step in steps for value in step.values() if isinstance(value, tuple) for number in value]
    if not numbers:
        return [{}] * len(steps)
    places: dict[Any, list[int]] = {}
    for index, number in enumerate(numbers):
        if isinstance(number, Tensor):
            places.setdefault((number.device, number.dtype), []).append(index)
    for indices in places.values():  # one copy from each device
        for index, number in zip(indices, torch.stack([numbers[i] for i in indices]).tolist(), strict=True):
            numbers[index] = number
    read = iter(numbers)
    return [
        {name: (next(read), next(read)) for name, value in step.items() if isinstance(value, tuple)} for step in steps
    ]


def add_up(steps: Iterable[Sums], start: Sums | None = None) -> Sums:
    """Returns the sums over steps, added one after another, so that it does not matter where a caller stopped."""
    sums = dict(start or {})
    for step in steps:
        for name, (total, count) in step.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + total, before[1] + count)
    return sums


def sum_over_ranks(
    strategy: DistributedStrategy, steps: Sequence[Sums], object_paths: Mapping[str, str], note: Any = None
) -> tuple[list[Sums], dict[str, str], list[Any]]:
    """Returns the sums of each step over all ranks, the paths of torchmetrics objects by name, and each rank's note.

    All are equal on all ranks. A rank that had only fillers has no names of its own. Ranks are added in their order:
    in an all-reduce the order, and so the rounding, would depend on how many steps are sent at once.
    """
    names = [*dict.fromkeys(name for step in steps for name in step)]
    table = torch.tensor([[step.get(name, (0.0, 0.0)) for name in names] for step in steps], dtype=torch.float64)
    by_rank = _gather(strategy, (strategy.reports_metrics, (names, table, dict(object_paths)), note))
    gathered = [value for reports, value, _ in by_rank if reports]
    all_names = [*dict.fromkeys(name for theirs, _, _ in gathered for name in theirs)]
    column = {name: index for index, name in enumerate(all_names)}
    totals = torch.zeros(len(steps), len(all_names), 2, dtype=torch.float64)
    for theirs, numbers, _ in gathered:
        if theirs:
            totals[:, [column[name] for name in theirs]] += numbers
    sums: list[Sums] = [dict(zip(all_names, map(tuple, row), strict=True)) for row in totals.tolist()]
    notes = [note for _, _, note in by_rank]
    return sums, {name: path for _, _, paths in gathered for name, path in paths.items()}, notes


def means(sums: Sums) -> dict[str, float]:
    """Returns each sum divided by its count; NaN if the count is 0."""
    return {name: total / count if count else nan for name, (total, count) in sums.items()}


@dataclass
class SinceLog:
    """What the next line of the log will show: sums over the steps since the last one. A checkpoint holds it."""

    total: float = 0.0
    """The sum of all losses."""
    count: float = 0.0
    metrics: Sums = field(default_factory=dict)
    object_paths: dict[str, str] = field(default_factory=dict)
    """The torchmetrics objects that were returned, by the name of the metric."""

    @property
    def loss(self) -> float:
        return self.total / self.count if self.count else nan

    def as_json(self) -> dict[str, Any]:
        """Returns it as JSON can hold it exactly. Strict JSON has no NaN, so numbers that are not finite are texts."""
        return {
            "loss": [_number(self.total), _number(self.count)],
            "metrics": {name: [_number(total), _number(count)] for name, (total, count) in self.metrics.items()},
            "objects": dict(self.object_paths),
        }

    @classmethod
    def from_json(cls, stored: Any) -> SinceLog:
        """Reads what `as_json` returned; raises ValueError, LookupError or TypeError if it is something else."""
        total, count = map(float, stored["loss"])
        metrics = {str(name): _pair(numbers, float) for name, numbers in dict(stored["metrics"]).items()}
        paths = {str(name): str(path) for name, path in dict(stored["objects"]).items()}
        return cls(total, count, metrics, paths)


def _pair(numbers: Sequence[Any], convert: Callable[[Any], float]) -> tuple[float, float]:
    total, count = map(convert, numbers)
    return total, count


def _number(value: float) -> float | str:
    return value if isfinite(value) else str(value)
