"""Averages of the weights are proved, or refused where a layout would lose them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import Pool

from shoal.config import Run, check_run
from shoal.verify import prove
from shoal.verify.trace import Trace, trace
from verify.runs import failed, ragged, runner_on

ONE_MICRO_BATCH = {"global_batch_size": 8, "batch_size": 4}


def with_callbacks(run: Run, *names: object) -> Run:
    return check_run({**run.tree(), "callbacks": [*names]})


def test_the_averages_of_callbacks_are_proved(pool2: Pool) -> None:
    run = with_callbacks(ragged(**ONE_MICRO_BATCH), {"name": "ema", "decay": 0.5}, {"name": "swa", "start_step": 1})
    for verdict in prove(run, 2, ["ddp", "fsdp"], runner=runner_on(pool2, adamw=False)):
        assert failed(verdict) == {}, verdict.layout
        assert [check.name for check in verdict.checks].count("callbacks") == 1


def trace_without_average(*args: Any) -> Trace:
    from shoal.callbacks.average import Average

    update, Average.update = Average.update, lambda self, weight: None  # type: ignore[method-assign]
    try:
        return trace(*args)
    finally:
        Average.update = update  # type: ignore[method-assign]


def test_an_average_that_does_not_move_is_found(pool2: Pool) -> None:
    run = with_callbacks(ragged(**ONE_MICRO_BATCH), "ema")
    (verdict,) = prove(run, 2, ["ddp"], runner=runner_on(pool2, trace_without_average, adamw=False))
    assert failed(verdict).keys() == {"callbacks"}


def test_an_average_in_the_model_that_fsdp_would_lose_is_refused(pool2: Pool) -> None:
    ddp, fsdp = prove(ragged("AveragesItself", **ONE_MICRO_BATCH), 2, ["ddp", "fsdp"], runner=runner_on(pool2))
    assert failed(ddp) == {}
    assert fsdp.outcome == "left out"
    assert "its frozen parameter average.0.weight in place in a step, and FSDP forgets the change" in fsdp.left_out


def test_one_that_is_changed_behind_autograds_back_is_found(pool2: Pool) -> None:
    (verdict,) = prove(ragged("AveragesByData", **ONE_MICRO_BATCH), 2, ["fsdp"], runner=runner_on(pool2, adamw=False))
    assert verdict.outcome == "different"
    assert "buffers" in failed(verdict)


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_one_that_a_hook_changes_is_right(pool2: Pool, strategy: str) -> None:
    run = ragged("AveragesInHook", **ONE_MICRO_BATCH)
    (verdict,) = prove(run, 2, [strategy], runner=runner_on(pool2, adamw=False))
    assert failed(verdict) == {}
    reference = trace(run, 3, None, adamw=False)
    moved = [name for name in reference.start if "average" in name and "weight" in name]
    assert moved
    assert not any(torch.equal(reference.start[name], reference.sgd_weights[name]) for name in moved)
