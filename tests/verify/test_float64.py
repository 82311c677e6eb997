"""Numbers that differ in fp32 are compared in float64, which tells rounding errors at a jump from a wrong layout."""

from __future__ import annotations

from functools import partial

import pytest
from pool import Pool

from shoal.verify import print_verdict, prove
from shoal.verify.compare import BOUNDS, Bounds
from verify.planted import trace_with
from verify.runs import failed, ragged, runner_on


def test_the_bounds_of_fp32_are_those_that_the_docs_promise() -> None:
    assert BOUNDS["fp32"] == Bounds(gradient=1e-5, sgd_weights=1e-4, adamw_weights=1e-3, floor=1e-7)


@pytest.mark.parametrize("adamw", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rounding_errors_at_a_jump_do_not_make_a_layout_wrong(
    pool2: Pool, adamw: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ragged("Jumping", global_batch_size=12, sync_batch_norm=True)
    (verdict,) = prove(run, 2, ["ddp"], runner=runner_on(pool2, adamw=adamw))
    assert failed(verdict) == {}
    assert verdict.outcome == "same"
    details = {check.name: check.detail for check in verdict.checks}
    assert details["gradients"].startswith("in float64 ")
    print_verdict(verdict)
    assert "proved in float64: what differs in fp32 is rounding" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("bug", "check"),
    [
        ("forgotten 1/accumulation", "gradients"),
        pytest.param("one rank's gradient lost", "gradients", marks=pytest.mark.slow),
        pytest.param("missing all-reduce", "ranks agree", marks=pytest.mark.slow),
        pytest.param("decay twice", "update alone", marks=pytest.mark.slow),
        pytest.param("wrong bias correction", "weights, AdamW", marks=pytest.mark.slow),
    ],
)
def test_faults_of_a_layout_are_found_in_a_model_with_jumps(pool2: Pool, bug: str, check: str) -> None:
    run = ragged("Jumping", global_batch_size=12, gradient_accumulation=2, sync_batch_norm=True)
    runner = runner_on(pool2, partial(trace_with, bug), adamw=check in ("update alone", "weights, AdamW"))
    (verdict,) = prove(run, 2, ["ddp"], steps=2, runner=runner)
    assert check in failed(verdict)
    assert not verdict.passed


def test_a_loss_that_differs_in_fp32_is_no_rounding(pool2: Pool) -> None:
    (verdict,) = prove(ragged("Overflowing"), 2, ["ddp"], steps=2, runner=runner_on(pool2, adamw=False))
    assert "loss" in failed(verdict)
    assert verdict.outcome == "different"
    assert verdict.float64 == ""


def test_a_model_that_cannot_compute_in_float64_keeps_its_verdict(pool2: Pool) -> None:
    run = ragged("Stubborn", global_batch_size=12, sync_batch_norm=True)
    (verdict,) = prove(run, 2, ["ddp"], steps=2, runner=runner_on(pool2, adamw=False))
    assert "gradients" in failed(verdict)
    assert "in float64, which would show whether it is rounding, it fails: " in verdict.float64
