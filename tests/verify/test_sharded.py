"""All forms of FSDP compute the same training as one device, and share the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pool import Pool

from shoal.errors import UserError
from shoal.verify import prove
from verify.runs import bdh, failed, llama, ragged, runner_on, with_adamw

SHARDINGS = ["fsdp", "fsdp_shard_grad_op", "fsdp_no_shard"]
MODELS = {"bdh": bdh, "llama": llama}
EVERY_TIME = {"fsdp": {"reduce_every_micro_batch": True}}


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_shardings_equal_one_device(pool2: Pool, accumulation: int) -> None:
    """Neither the batch nor the parameters are divisible by the number of ranks, and sequences differ in length."""
    run = ragged(global_batch_size=11, gradient_accumulation=accumulation)
    for verdict in prove(run, 2, SHARDINGS, runner=runner_on(pool2)):
        assert failed(verdict) == {}, verdict.layout


@pytest.mark.parametrize(
    "layout", ["fsdp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "zero_1"))]
)
def test_a_large_buffer_is_no_extra_work(pool2: Pool, layout: str) -> None:
    """All layouts send persistent buffers before each step."""
    (verdict,) = prove(ragged("Tabled", global_batch_size=8), 2, [layout], runner=runner_on(pool2))
    assert failed(verdict) == {}


@with_adamw
def test_replicas_of_shards_equal_one_device(pool4: Pool, adamw: bool) -> None:
    run = ragged(global_batch_size=13, gradient_accumulation=3)
    for verdict in prove(run, 4, ["fsdp", "fsdp_hybrid"], runner=runner_on(pool4, adamw=adamw)):
        assert failed(verdict) == {}, verdict.layout


@with_adamw
@pytest.mark.parametrize("procs", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_reducing_every_micro_batch_equals_one_device(pool2: Pool, pool4: Pool, procs: int, adamw: bool) -> None:
    run = ragged(distributed=EVERY_TIME, global_batch_size=11, gradient_accumulation=3)
    (verdict,) = prove(
        run,
        procs,
        ["fsdp" if procs == 2 else "fsdp_hybrid"],
        runner=runner_on({2: pool2, 4: pool4}[procs], adamw=adamw),
    )
    assert failed(verdict) == {}


@with_adamw
@pytest.mark.parametrize("model", ["bdh", pytest.param("llama", marks=pytest.mark.slow)])
def test_models_sharded_recomputed_and_chunked_equal_one_device(
    pool2: Pool, tmp_path: Path, model: str, adamw: bool
) -> None:
    less_memory = {"activation_checkpointing": "full", "loss_chunks": 3}
    run = MODELS[model](tmp_path, global_batch_size=7, gradient_accumulation=2, **less_memory)
    (verdict,) = prove(run, 2, ["fsdp"], runner=runner_on(pool2, adamw=adamw))
    assert failed(verdict) == {}


@with_adamw
@pytest.mark.parametrize(
    "precision", ["bf16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp16", "pure_bf16"))]
)
def test_half_precision_stays_within_its_bounds(pool2: Pool, tmp_path: Path, precision: str, adamw: bool) -> None:
    run = llama(tmp_path, global_batch_size=8, gradient_accumulation=2, mixed_precision=precision)
    (verdict,) = prove(run, 2, ["fsdp"], runner=runner_on(pool2, adamw=adamw))
    assert failed(verdict) == {}


@with_adamw
def test_options_are_proved_too(pool2: Pool, tmp_path: Path, adamw: bool) -> None:
    options = {"wrap_classes": ["LlamaMLP", "LlamaAttention"], "forward_prefetch": True}
    run = llama(tmp_path, {"fsdp": options}, global_batch_size=6)
    (verdict,) = prove(run, 2, ["fsdp"], runner=runner_on(pool2, adamw=adamw))
    assert failed(verdict) == {}


@with_adamw
def test_frozen_parameters_are_gathered_but_not_summed(pool2: Pool, adamw: bool) -> None:
    for verdict in prove(
        ragged("Frozen", global_batch_size=8), 2, [*SHARDINGS, "ddp"], runner=runner_on(pool2, adamw=adamw)
    ):
        assert failed(verdict) == {}, verdict.layout


@with_adamw
@pytest.mark.parametrize(
    ("fsdp", "precision"),
    [({"reduce_dtype": "bf16"}, "bf16"), pytest.param({"param_dtype": "bf16"}, "bf16", marks=pytest.mark.slow)],
)
def test_half_types_send_half(pool2: Pool, fsdp: dict[str, Any], precision: str, adamw: bool) -> None:
    run = ragged(distributed={"fsdp": fsdp}, global_batch_size=8, mixed_precision=precision)
    for verdict in prove(run, 2, ["fsdp", "fsdp_no_shard"], runner=runner_on(pool2, adamw=adamw)):
        assert failed(verdict) == {}, verdict.layout


def test_layouts_that_do_not_fit_are_left_out_or_refused(pool2: Pool) -> None:
    with pytest.raises(
        UserError, match="--strategies fsdp_hybrid: 2 processes are too few for this mesh; use --procs 4 or more"
    ):
        prove(ragged(global_batch_size=8), 2, ["fsdp_hybrid"], runner=runner_on(pool2))
    with pytest.raises(
        UserError, match="--strategies ddp: ddp does not support mixed_precision: pure_bf16; use fsdp or bf16"
    ):
        prove(ragged(global_batch_size=8, mixed_precision="pure_bf16"), 2, ["ddp"], runner=runner_on(pool2))
    with pytest.raises(UserError, match=r"--strategies fsdp_no_shard: .*reduce_every_micro_batch"):
        prove(ragged(distributed=EVERY_TIME, global_batch_size=8), 2, ["fsdp_no_shard"], runner=runner_on(pool2))


@pytest.mark.slow
@pytest.mark.parametrize("procs", [2, 4])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("every_time", [False, True])
@pytest.mark.parametrize("less_memory", [{}, {"activation_checkpointing": "full"}, {"loss_chunks": 4}])
@pytest.mark.parametrize("model", MODELS)
def test_the_matrix(
    pool2: Pool,
    pool4: Pool,
    tmp_path: Path,
    procs: int,
    accumulation: int,
    every_time: bool,
    less_memory: dict[str, Any],
    model: str,
) -> None:
    keys = {"global_batch_size": 13, "gradient_accumulation": accumulation, **less_memory}
    run = MODELS[model](tmp_path, EVERY_TIME if every_time else None, **keys)
    layouts = [*SHARDINGS, *(["fsdp_hybrid"] if procs == 4 else [])]
    if every_time:
        layouts.remove("fsdp_no_shard")  # where it would save nothing, and is refused
    for verdict in prove(run, procs, layouts, runner=runner_on({2: pool2, 4: pool4}[procs])):
        assert failed(verdict) == {}, verdict.layout


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full", {"mode": "full", "offload": True}, "selective"], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_compiled(pool2: Pool, tmp_path: Path, model: str, recompute: str | dict[str, Any]) -> None:
    keys = {"compile": True, "activation_checkpointing": recompute, "loss_chunks": 2}
    run = MODELS[model](tmp_path, global_batch_size=8, gradient_accumulation=2, **keys)
    for verdict in prove(run, 2, ["ddp", "fsdp", "fsdp_shard_grad_op"], runner=runner_on(pool2)):
        assert failed(verdict) == {}, verdict.layout
