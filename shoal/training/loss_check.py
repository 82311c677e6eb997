"""Checks before the first step of a run that a recipe's loss is the sum over the samples of a batch.

The gradient of a step is (sum of losses) / (count). A loss that is already a mean would be divided twice: gradients
would be too small by the size of a micro-batch, and another layout would train otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import UserError, one_line
from shoal.seeding import GeneratorsKept
from shoal.strategies import DistributedStrategy
from shoal.tensors import map_tensors, module_state_kept
from shoal.training.modes import evaluation_mode
from shoal.types import MicroBatch

TOLERANCE = 0.01
"""How far a loss may be from what it is compared with, relative to the losses: half precision rounds."""


@dataclass(frozen=True)
class Score:
    """The loss and the count of a batch, summed over all ranks."""

    total: float
    count: float


def check_loss(
    strategy: DistributedStrategy, model: nn.Module, micro: MicroBatch, recipe: Any, warn: Callable[[str], None]
) -> str:
    """Compares the loss of a batch with those of its two halves; returns what it found, for the report.

    Raises UserError if the loss is a mean, and warns if it is neither a sum nor a mean. All ranks call it. It computes
    eagerly, in evaluation mode, where dropout is off and batch norm does not mix samples; the model is left as it was.
    """
    if recipe.loss_mixes_samples:
        return "not checked to be a sum: the recipe has loss_mixes_samples = True"
    if strategy.any_rank(not _can_be_divided(micro)):
        return "not checked to be a sum: not all tensors of a batch have one row for each sample"
    size = len(micro.ids)
    first, second = ([0], [0]) if size == 1 else ([*range(size // 2)], [*range(size // 2, size)])
    numbers, error = [0.0] * 9, ""
    with _undisturbed(strategy, model):
        try:
            # A loss that draws random numbers depends on the order of the samples, so both orders are computed.
            orders = first + second, first, second, second + first
            numbers = [number for rows in orders for number in _score(strategy, model, micro, rows, recipe)]
            numbers.append((len(first) * numbers[2] + len(second) * numbers[4]) / (len(first) + len(second)))
        except Exception as failure:
            if _exchanges_in_forward(strategy):  # ranks that have not failed wait for this one
                failure.add_note(
                    "in the check of the loss before the first step; loss_mixes_samples = True in the recipe skips it"
                )
                raise
            error = one_line(failure) or type(failure).__name__
    if strategy.any_rank(bool(error)):
        return f"not checked to be a sum: it cannot be computed for half a batch ({error or 'on another rank'})"
    sums = strategy.sum_over_data(torch.tensor(numbers, dtype=torch.float32, device=strategy.device)).tolist()
    scores = [Score(*sums[index : index + 2]) for index in range(0, 8, 2)]
    return _judge(scores, sums[8], size > 1, type(recipe).__name__, warn)


def _exchanges_in_forward(strategy: DistributedStrategy) -> bool:
    """Returns whether a forward needs all ranks, as it does wherever a model is split."""
    return strategy.world_size > 1 and (strategy.layout.is_sharded_family or strategy.layout.engine == "deepspeed")


def _judge(scores: Sequence[Score], mean: float, can_swap: bool, name: str, warn: Callable[[str], None]) -> str:
    """Says what the scores of a batch, its two halves and the swapped halves mean; `mean` is what a mean would be."""
    whole, first, second, swapped = scores
    if not all(isfinite(number) for score in scores for number in (score.total, score.count)):
        return "not checked to be a sum: it is not finite"
    if _is_sum(whole, first, second):
        return "a sum over samples, as it has to be"
    if whole.total != 0 and _near(whole.total, mean, abs(whole.total)):
        raise UserError(
            f"recipe {name}: loss is a mean, but shoal needs the sum over the batch and divides it by the count; use "
            "reduction='sum', or .sum() in place of .mean()"
        )
    if not can_swap or not _near(swapped.total, whole.total, abs(whole.total)):
        return "not checked to be a sum: it draws random numbers, or the batch has one sample"
    warn(
        f"recipe {name}: the loss of a batch is {whole.total:.6g}, but those of its halves are {first.total:.6g} and "
        f"{second.total:.6g}, so layouts and batch sizes train otherwise; return a sum over samples, or set "
        "loss_mixes_samples = True in the recipe if samples of a batch must be compared"
    )
    return "NOT a sum over samples"


def _is_sum(whole: Score, first: Score, second: Score) -> bool:
    """Returns whether the halves give the same loss per count as the whole."""
    parts, counts = first.total + second.total, first.count + second.count
    size = abs(whole.total) * counts + (abs(first.total) + abs(second.total)) * whole.count
    return _near(whole.total * counts, parts * whole.count, size)


def _near(a: float, b: float, size: float) -> bool:
    return abs(a - b) <= TOLERANCE * size


def _can_be_divided(micro: MicroBatch) -> bool:
    """Returns whether every tensor of the batch has one row for each sample."""
    tensors: list[Tensor] = []
    map_tensors(tensors.append, micro.data)
    return bool(tensors) and all(tensor.ndim and len(tensor) == len(micro.ids) for tensor in tensors)


def _score(
    strategy: DistributedStrategy, model: nn.Module, micro: MicroBatch, rows: list[int], recipe: Any
) -> tuple[float, float]:
    part = replace(
        micro,
        data=map_tensors(lambda tensor: tensor[rows], micro.data),
        epochs=[micro.epochs[row] for row in rows],
        ids=[micro.ids[row] for row in rows],
        weight=1,
    )
    output = strategy.evaluate(model, [part], recipe, over_ranks=False)
    return float(output.total), float(output.count)


@contextmanager
def _undisturbed(strategy: DistributedStrategy, model: nn.Module) -> Iterator[None]:
    """Computes eagerly and in evaluation mode; leaves modes, buffers and generators as they were."""
    devices = [] if strategy.device.type == "cpu" else [strategy.device]
    with (
        torch.compiler.set_stance("force_eager"),
        torch.random.fork_rng(devices),
        GeneratorsKept(),
        module_state_kept([model]),
        evaluation_mode(model),
    ):
        yield
