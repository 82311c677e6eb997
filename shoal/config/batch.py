"""Batch arithmetic: global_batch_size = batch_size × gradient_accumulation × data-parallel size.

A config gives the factors it knows; the others are derived.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from shoal.config.schema import TrainingConfig
from shoal.errors import UserError
from shoal.types import BatchPhase

DEFAULT_BATCH_SIZE = 8


def derive_batches(training: TrainingConfig, data_size: int) -> tuple[BatchPhase, ...]:
    """Returns the batch sizes of a run: one phase, or one for each entry of a gradient accumulation schedule.

    `data_size` is the number of data-parallel ranks. With two of the three keys given, the global batch need not divide
    evenly: the last micro-batches of a step are then smaller. If all three are given, they must multiply.
    """
    accumulation = training.gradient_accumulation
    schedule = accumulation if isinstance(accumulation, dict) else {0: accumulation}
    if 0 not in schedule:
        raise UserError(f"training.gradient_accumulation = {accumulation}: epoch 0 has no value; add an entry for 0")
    return tuple(_phase(training, epoch, schedule[epoch], data_size) for epoch in sorted(schedule))


def _phase(training: TrainingConfig, epoch: int, accumulation: int | None, data_size: int) -> BatchPhase:
    total, batch = training.global_batch_size, training.batch_size
    if total is not None and total < data_size:
        raise UserError(
            f"training.global_batch_size = {total} is less than one sample for each of the {data_size} data-parallel "
            "ranks; raise it"
        )
    if total is None:
        batch = batch or DEFAULT_BATCH_SIZE
        return BatchPhase(epoch, batch * (accumulation or 1) * data_size, batch)
    if batch is None:
        return BatchPhase(epoch, total, ceil(total / ((accumulation or 1) * data_size)))
    if accumulation is not None and batch * accumulation * data_size != total:
        raise UserError(
            f"training.batch_size {batch} × gradient_accumulation {accumulation} × {data_size} data-parallel "
            f"= {batch * accumulation * data_size}, but training.global_batch_size is {total}; leave one of them out"
        )
    if batch > ceil(total / data_size):
        raise UserError(
            f"training.batch_size {batch} × {data_size} data-parallel = {batch * data_size} is more than "
            f"training.global_batch_size {total}; lower batch_size to {ceil(total / data_size)}"
        )
    return BatchPhase(epoch, total, batch)


def derived_values(first: BatchPhase, data_size: int) -> dict[str, Any]:
    """Returns all three batch keys of a phase, also those that the config leaves out, for printing."""
    return {
        "training.global_batch_size": first.global_batch_size,
        "training.batch_size": first.batch_size,
        "training.gradient_accumulation": accumulation(first, data_size),
    }


def accumulation(phase: BatchPhase, data_size: int) -> int:
    """Returns the number of micro-batches of one rank in one step."""
    return ceil(num_runs(phase.global_batch_size, phase.batch_size) / data_size)


def num_runs(num_samples: int, batch_size: int) -> int:
    """Returns into how many runs of at most `batch_size` samples a step is split; `run_start` says where they begin.

    Only for a batch size of 2 the last run may have one sample more, so that no run has a single one.
    """
    return ceil(num_samples / batch_size) - (batch_size == 2 and leaves_one(num_samples, batch_size))


def run_start(index: int, num_samples: int, batch_size: int) -> int:
    """Returns the first sample of a run, or `num_samples` for a run behind the last one.

    A last run of one sample would end a model that needs two, such as one with BatchNorm. It takes another sample from
    the run before it.
    """
    number = num_runs(num_samples, batch_size)
    if index >= number:
        return num_samples
    takes_one = index == number - 1 and batch_size > 2 and leaves_one(num_samples, batch_size)
    return index * batch_size - takes_one


def leaves_one(num_samples: int, batch_size: int) -> bool:
    """Returns whether full batches of at least two samples leave a single sample over."""
    return batch_size > 1 and num_samples > batch_size and num_samples % batch_size == 1
