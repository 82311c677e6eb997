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
    first, second = ([0], [0]) if size == 1 else ([*range(size // 2)], [*range(size // 2, 2 * (size // 2))])
    error, scores, swapped = "", [Score(0, 0)] * 3, None
    with _undisturbed(strategy, model):
        try:
            scores = [_score(strategy, model, micro, rows, recipe) for rows in (first + second, first, second)]
            if _is_neither(*scores):  # a loss that draws random numbers depends on the order of the samples
                swapped = _score(strategy, model, micro, second + first, recipe)
        except Exception as failure:
            error = one_line(failure) or type(failure).__name__
    if strategy.any_rank(bool(error)):
        return f"not checked to be a sum: half a batch cannot be computed ({error or 'on another rank'})"
    return _judge(scores, swapped if size > 1 else None, type(recipe).__name__, warn)


def _judge(scores: Sequence[Score], swapped: Score | None, name: str, warn: Callable[[str], None]) -> str:
    whole, first, second = scores
    if not all(isfinite(number) for score in scores for number in (score.total, score.count)):
        return "not checked to be a sum: it is not finite"
    if is_sum(whole, first, second):
        return "a sum over samples"
    if is_mean(whole, first, second):
        raise UserError(
            f"recipe {name}: loss is a mean, but shoal needs the sum over the batch and divides it by the count; use "
            "reduction='sum', or .sum() in place of .mean()"
        )
    if swapped is None or not _near(swapped.total, whole.total, abs(whole.total)):
        return "not checked to be a sum: it draws random numbers, or the batch has one sample"
    warn(
        f"recipe {name}: the loss of a batch is {whole.total:.6g}, but those of its halves are {first.total:.6g} and "
        f"{second.total:.6g}, so layouts and batch sizes train otherwise; return a sum over samples, or set "
        "loss_mixes_samples = True in the recipe if samples of a batch must be compared"
    )
    return "NOT a sum over samples"


def is_sum(whole: Score, first: Score, second: Score) -> bool:
    """Returns whether the halves give the same loss per count as the whole."""
    parts, counts = first.total + second.total, first.count + second.count
    size = abs(whole.total) * counts + (abs(first.total) + abs(second.total)) * whole.count
    return _near(whole.total * counts, parts * whole.count, size)


def is_mean(whole: Score, first: Score, second: Score) -> bool:
    """Returns whether the loss of the whole is the mean of the losses of its halves, which have as many samples."""
    mean = (first.total + second.total) / 2
    return whole.total != 0 and _near(whole.total, mean, abs(whole.total))


def _is_neither(whole: Score, first: Score, second: Score) -> bool:
    return not is_sum(whole, first, second) and not is_mean(whole, first, second)


def _near(a: float, b: float, size: float) -> bool:
    return abs(a - b) <= TOLERANCE * size


def _can_be_divided(micro: MicroBatch) -> bool:
    """Returns whether every tensor of the batch has one row for each sample."""
    tensors: list[Tensor] = []
    map_tensors(tensors.append, micro.data)
    return bool(tensors) and all(tensor.ndim and len(tensor) == len(micro.ids) for tensor in tensors)


def _score(strategy: DistributedStrategy, model: nn.Module, micro: MicroBatch, rows: list[int], recipe: Any) -> Score:
    part = replace(
        micro,
        data=map_tensors(lambda tensor: tensor[rows], micro.data),
        epochs=[micro.epochs[row] for row in rows],
        ids=[micro.ids[row] for row in rows],
        weight=1,
    )
    output = strategy.evaluate(model, [part], recipe)
    return Score(float(output.total), float(output.count))


@contextmanager
def _undisturbed(strategy: DistributedStrategy, model: nn.Module) -> Iterator[None]:
    """Computes eagerly and in evaluation mode; leaves modes, buffers and generators as they were."""
    devices = [] if strategy.device.type == "cpu" else [strategy.device]
    compiled = strategy.engaged.compiled
    eager_calls = compiled.eager_calls if compiled else 0
    with (
        torch.compiler.set_stance("force_eager"),
        torch.random.fork_rng(devices),
        GeneratorsKept(),
        module_state_kept([model]),
        evaluation_mode(model),
    ):
        yield
    if compiled:
        compiled.eager_calls = eager_calls
