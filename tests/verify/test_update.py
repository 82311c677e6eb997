"""The update is checked by itself, with equal weights and gradients, so that no precision hides a bug in it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from pool import Pool
from torch import Tensor, nn

from shoal.config.callbacks import check_callbacks
from shoal.errors import UserError
from shoal.training.muon import Muon
from shoal.verify import prove
from shoal.verify.trace import trace
from verify.planted import trace_with
from verify.runs import failed, llama, ragged, runner_on

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="the package deepspeed is not installed")
UPDATE_CHECKS = {"update norm", "update alone", "resumed update", "optimizer state"}
FAULTS = {
    "decay twice": {"update alone", "resumed update"},
    "no decay": {"update alone", "resumed update"},
    "wrong betas": {"resumed update", "optimizer state"},
    "learning rate 1% too high": {"update alone", "resumed update"},
    "no clipping": {"optimizer state"},
}
"""The checks that must find each bug."""


def faults_in(precision: str, layouts: list[str], default: str) -> list[Any]:
    """Returns a case for each bug in each layout; all but one are in the slow tier."""
    return [
        pytest.param(precision, layout, fault, marks=[] if fault == default else pytest.mark.slow)
        for layout in layouts
        for fault in FAULTS
    ]


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="the package bitsandbytes is not installed")
def test_an_optimizer_that_keeps_a_count_as_an_integer_is_compared(pool2: Pool) -> None:
    (verdict,) = prove(ragged(optimizer="paged_adamw_32bit"), 2, ["ddp"], steps=2, runner=runner_on(pool2))
    assert not failed(verdict)


@pytest.mark.parametrize(
    ("precision", "layout", "fault"),
    [
        *faults_in("bf16", ["ddp"], "wrong betas"),
        *faults_in("bf16", ["fsdp"], "no clipping"),
        *faults_in("fp16", ["ddp"], "decay twice"),
        *faults_in("fp16", ["fsdp"], ""),
        *faults_in("pure_bf16", ["fsdp"], ""),
    ],
)
def test_faults_of_the_optimizer_are_found_in_half_precision(
    pool2: Pool, precision: str, layout: str, fault: str
) -> None:
    run = ragged(global_batch_size=12, mixed_precision=precision)
    (verdict,) = prove(run, 2, [layout], steps=2, runner=runner_on(pool2, partial(trace_with, fault)))
    assert FAULTS[fault] <= failed(verdict).keys()
    assert verdict.outcome == "different"


def test_a_layout_that_applies_infinite_gradients_is_found(pool2: Pool) -> None:
    run, bug = ragged(global_batch_size=12), "infinite gradients are applied"
    (verdict,) = prove(run, 2, ["fsdp"], steps=2, runner=runner_on(pool2, partial(trace_with, bug)))
    assert failed(verdict) == {"skipping": "an update with an infinite gradient is NOT skipped"}


@needs_deepspeed
@pytest.mark.parametrize(
    ("stage", "fault"),
    [
        pytest.param(stage, fault, marks=[] if (stage, fault) == (3, "decay twice") else pytest.mark.slow)
        for stage in (1, 2, 3)
        for fault in FAULTS
        if fault != "no clipping"  # it is planted in the native update
    ],
)
def test_faults_of_the_optimizer_are_found_under_deepspeed(pool2: Pool, stage: int, fault: str) -> None:
    run = ragged(global_batch_size=12, mixed_precision="bf16")
    (verdict,) = prove(run, 2, [f"zero_{stage}"], steps=2, runner=runner_on(pool2, partial(trace_with, fault)))
    assert FAULTS[fault] <= failed(verdict).keys()


@pytest.mark.parametrize("layout", ["pp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tp", "cp"))])
def test_the_update_of_every_part_of_a_mesh_is_checked(tmp_path: Path, pool2: Pool, layout: str) -> None:
    run = llama(tmp_path, global_batch_size=8, mixed_precision="bf16")
    runner = runner_on(pool2, partial(trace_with, "learning rate 1% too high"))
    (verdict,) = prove(run, 2, [layout], steps=2, runner=runner)
    assert failed(verdict).keys() == {"update alone", "resumed update"}


def test_a_loss_scale_that_is_not_taken_back_is_found(pool2: Pool) -> None:
    run = ragged(global_batch_size=12, mixed_precision="fp16")
    (verdict,) = prove(run, 2, ["ddp"], steps=2, runner=runner_on(pool2, partial(trace_with, "loss scale stays")))
    assert {"update norm", "gradient norm"} <= failed(verdict).keys()


@pytest.mark.parametrize("layout", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_optimizer_state_that_is_not_restored_is_found(pool2: Pool, layout: str) -> None:
    runner = runner_on(pool2, partial(trace_with, "optimizer state lost"))
    (verdict,) = prove(ragged(global_batch_size=12, mixed_precision="bf16"), 2, [layout], steps=2, runner=runner)
    assert failed(verdict).keys() == {"resumed update"}


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_update_of_an_offloaded_optimizer_is_checked(pool2: Pool, stage: int, precision: str) -> None:
    options = {"offload_optimizer": "cpu", "stage3_param_persistence_threshold": 0}
    run = ragged(distributed={"deepspeed": options}, global_batch_size=11, mixed_precision=precision)
    (verdict,) = prove(run, 2, [f"zero_{stage}"], steps=2, runner=runner_on(pool2))
    assert failed(verdict) == {}
    assert {check.name for check in verdict.checks} >= UPDATE_CHECKS


def muon_of_parts(*args: Any) -> Any:
    """Orthogonalizes what each rank has of a matrix by itself, which SGD and AdamW cannot show."""
    change = Muon._change

    def change_of_part(self: Muon, direction: Tensor, parameter: nn.Parameter, lr: float) -> Tensor:
        return change(self, direction, nn.Parameter(parameter.detach()), lr)  # which is no part of anything

    with patch.object(Muon, "_change", change_of_part):
        return trace(*args)


@pytest.mark.parametrize("tracer", [trace, muon_of_parts])
def test_the_update_of_the_runs_own_optimizer_is_compared(pool2: Pool, tracer: Any) -> None:
    run = ragged("Matrices", global_batch_size=12, optimizer={"name": "muon"})
    (verdict,) = prove(run, 2, ["fsdp"], steps=2, runner=runner_on(pool2, tracer))
    found = {name for name in failed(verdict) if name.endswith(", muon")}
    assert found == ({"update alone, muon", "resumed update, muon"} if tracer is muon_of_parts else set())
    assert verdict.outcome == ("different" if tracer is muon_of_parts else "same")
    assert "optimizer state, muon" in {check.name for check in verdict.checks}


def test_the_proof_says_which_callbacks_it_leaves_out() -> None:
    callbacks, lines = check_callbacks(["ema", "early_stopping"], {}), list[str]()

    def runner(*args: Any) -> Any:
        raise UserError("nothing has to be computed for this")

    with pytest.raises(UserError, match="nothing has to be computed"):
        prove(replace(ragged(), callbacks=callbacks), 2, ["ddp"], runner=runner, on_warning=lines.append)
    assert lines == ["not part of the proof: the callbacks early_stopping"]
