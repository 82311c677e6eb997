"""DeepSpeed's ZeRO 1, 2 and 3 compute the same training as one device, and share the work."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pool import Pool

from shoal.errors import UserError
from shoal.verify import prove
from shoal.verify.layouts import LAYOUTS, why_not
from verify.runs import bdh, failed, llama, ragged, runner_on, with_adamw

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="the package deepspeed is not installed")

STAGES = ["zero_1", "zero_2", "zero_3"]
ALL_SPLIT = {"stage3_param_persistence_threshold": 0}
MODELS = {"bdh": bdh, "llama": llama}


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_stages_equal_one_device(pool2: Pool, accumulation: int) -> None:
    """Neither the batch nor the parameters are divisible by the number of ranks, and sequences differ in length."""
    run = ragged(distributed={"deepspeed": ALL_SPLIT}, global_batch_size=11, gradient_accumulation=accumulation)
    for verdict in prove(run, 2, STAGES, runner=runner_on(pool2)):
        assert failed(verdict) == {}, verdict.layout
        details = {check.name: check.detail for check in verdict.checks}
        assert details["optimizer bytes"].startswith("0.50 of one device ")
        assert details["parameter bytes"].startswith("0.50" if verdict.layout == "zero_3" else "1.00")


@pytest.mark.slow  # strategies/test_deepspeed.py trains them too
@with_adamw
def test_frozen_parameters_and_small_ones_that_stay_whole(pool2: Pool, adamw: bool) -> None:
    for verdict in prove(ragged("Frozen", global_batch_size=8), 2, STAGES, runner=runner_on(pool2, adamw=adamw)):
        assert failed(verdict) == {}, verdict.layout


@pytest.mark.slow
def test_small_gradients_are_clipped_alike(pool2: Pool) -> None:
    """DeepSpeed adds 1e-6 to the norm that it clips by, which matters if the norm is 0.008."""
    for verdict in prove(ragged("Quiet", global_batch_size=12), 2, STAGES, steps=2, runner=runner_on(pool2)):
        assert failed(verdict) == {}, verdict.layout


@pytest.mark.slow
def test_half_precision(pool2: Pool) -> None:
    run = ragged(distributed={"deepspeed": ALL_SPLIT}, global_batch_size=8, mixed_precision="bf16")
    for verdict in prove(run, 2, ["zero_2", "zero_3"], runner=runner_on(pool2)):
        assert failed(verdict) == {}, verdict.layout


@pytest.mark.slow
def test_offloaded(pool2: Pool) -> None:
    offload = {**ALL_SPLIT, "offload_optimizer": "cpu"}
    run = ragged(distributed={"deepspeed": offload}, global_batch_size=11, gradient_accumulation=3)
    for verdict in prove(run, 2, STAGES, runner=runner_on(pool2)):
        assert failed(verdict) == {}, verdict.layout


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_model_recomputed_and_chunked_in_half_precision(pool2: Pool, tmp_path: Path, precision: str) -> None:
    less_memory = {"activation_checkpointing": "full", "loss_chunks": 3, "mixed_precision": precision}
    run = llama(tmp_path, {"deepspeed": ALL_SPLIT}, global_batch_size=8, gradient_accumulation=2, **less_memory)
    (verdict,) = prove(run, 2, ["zero_3"], runner=runner_on(pool2))
    assert failed(verdict) == {}


def test_what_it_has_not_is_said() -> None:
    with pytest.raises(
        UserError, match=r"--strategies zero_2: training.mixed_precision = pure_bf16 is not for strategy deepspeed"
    ):
        prove(ragged(global_batch_size=8, mixed_precision="pure_bf16"), 2, ["zero_2"])


def test_without_the_package_it_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.verify.layouts.is_installed", lambda: False)
    reason = why_not(ragged(global_batch_size=8), LAYOUTS["zero_1"], 2)
    assert reason is not None
    assert "shoal[deepspeed]" in reason


@pytest.mark.slow
@pytest.mark.parametrize("procs", [2, 4])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("less_memory", [{}, {"activation_checkpointing": "full"}, {"loss_chunks": 4}])
@pytest.mark.parametrize("model", MODELS)
def test_the_matrix(
    pool2: Pool, pool4: Pool, tmp_path: Path, procs: int, accumulation: int, less_memory: dict[str, Any], model: str
) -> None:
    keys = {"global_batch_size": 13, "gradient_accumulation": accumulation, **less_memory}
    run = MODELS[model](tmp_path, {"deepspeed": ALL_SPLIT}, **keys)
    for verdict in prove(run, procs, STAGES, runner=runner_on({2: pool2, 4: pool4}[procs])):
        assert failed(verdict) == {}, verdict.layout


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_compiled(pool2: Pool, tmp_path: Path, model: str) -> None:
    run = MODELS[model](tmp_path, global_batch_size=8, gradient_accumulation=2, compile=True)
    for verdict in prove(run, 2, STAGES, runner=runner_on(pool2)):
        assert failed(verdict) == {}, verdict.layout
