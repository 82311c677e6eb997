"""Tensor, context and pipeline parallelism, and their combinations, compute the same training as one device."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from pool import Pool

from shoal.config import Run
from shoal.config.layout import check_layout
from shoal.errors import UserError
from shoal.verify import prove
from shoal.verify.trace import Trace, trace
from verify.planted import trace_with
from verify.runs import bdh, failed, llama, on_text, runner_on, with_adamw

LEAN = {"activation_checkpointing": "full", "loss_chunks": 3}


@with_adamw
@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_llama_in_two(tmp_path: Path, pool2: Pool, accumulation: int, adamw: bool) -> None:
    """Neither the 11 samples nor the 259 tokens of the vocabulary are divisible by the number of ranks."""
    run = llama(tmp_path, global_batch_size=11, gradient_accumulation=accumulation)
    for verdict in prove(run, 2, ["tp", "tp_sp", "cp"], runner=runner_on(pool2, adamw=adamw)):
        assert failed(verdict) == {}, verdict.layout


@pytest.mark.slow
def test_a_llama_in_four(tmp_path: Path, pool4: Pool) -> None:
    run = llama(tmp_path, global_batch_size=11, gradient_accumulation=3)
    for verdict in prove(run, 4, ["tp_fsdp", "cp_fsdp"], runner=runner_on(pool4)):
        assert failed(verdict) == {}, verdict.layout


@pytest.mark.slow  # training/test_moves.py has pipelines, and so have the planted bugs below
@with_adamw
def test_a_pipeline_in_two(tmp_path: Path, pool2: Pool, adamw: bool) -> None:
    """A step has exactly as many micro-batches as the schedule needs; the last one is short."""
    run = llama(tmp_path, global_batch_size=11, gradient_accumulation=2)
    layouts = ["pp", "pp_gpipe", "pp_interleaved", "pp_zbv"]
    for verdict in prove(run, 2, layouts, runner=runner_on(pool2, adamw=adamw)):
        assert failed(verdict) == {}, verdict.layout


@pytest.mark.slow
@with_adamw
def test_a_pipeline_in_four(tmp_path: Path, pool4: Pool, adamw: bool) -> None:
    """A step has three micro-batches more than the schedule needs."""
    run = llama(tmp_path, global_batch_size=17, gradient_accumulation=5)
    for verdict in prove(run, 4, ["pp_fsdp", "pp_tp"], runner=runner_on(pool4, adamw=adamw)):
        assert failed(verdict) == {}, verdict.layout


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp", "pp_gpipe", "pp_ddp", "pp_fsdp", "pp_tp", "tp_ddp"])
@pytest.mark.parametrize("options", [{}, LEAN, {"mixed_precision": "bf16"}, {"mixed_precision": "fp16", **LEAN}])
def test_more_pipelines_in_four(tmp_path: Path, pool4: Pool, options: dict[str, Any], layout: str) -> None:
    run = llama(tmp_path, global_batch_size=25, gradient_accumulation=7, **options)
    (verdict,) = prove(run, 4, [layout], runner=runner_on(pool4))
    assert failed(verdict) == {}


@pytest.mark.slow
def test_three_dimensions_on_eight(tmp_path: Path) -> None:
    run = llama(tmp_path, global_batch_size=17, gradient_accumulation=4)
    with Pool(8, scratch=tmp_path) as pool8:
        (verdict,) = prove(run, 8, ["pp_tp_fsdp"], runner=runner_on(pool8))
    assert failed(verdict) == {}


@pytest.mark.slow
@with_adamw
def test_a_bdh(tmp_path: Path, pool2: Pool, pool4: Pool, adamw: bool) -> None:
    run = bdh(tmp_path, global_batch_size=11, gradient_accumulation=3)
    for pool, layouts in ((pool2, ["tp"]), (pool4, ["tp", "tp_fsdp"])):
        for verdict in prove(run, pool.size, layouts, runner=runner_on(pool, adamw=adamw)):
            assert failed(verdict) == {}, verdict.layout


def test_tensor_parallelism_shares_the_work(tmp_path: Path, pool2: Pool) -> None:
    """Each of two ranks computes at most 0.6 of all matrix products, including the head and attention."""
    for model in (bdh, llama):
        (verdict,) = prove(model(tmp_path, global_batch_size=8), 2, ["tp"], runner=runner_on(pool2, adamw=False))
        assert failed(verdict) == {}
        flops = {check.name: check.detail for check in verdict.checks}["matmul FLOPs"]
        assert float(flops.split()[0]) <= 0.6


def wide_llama(tmp_path: Path, **training: Any) -> Run:
    """Returns a Llama with as many key/value heads as ranks."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 259}
    model = {"config": {"model_type": "llama", **sizes, "num_attention_heads": 8, "num_key_value_heads": 4}}
    return on_text(tmp_path, "causal_lm", model, **training)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, LEAN, {"compile": True}], ids=["plain", "lean", "compiled"])
def test_a_llama_in_four_parts_of_every_layer(tmp_path: Path, pool4: Pool, options: dict[str, Any]) -> None:
    run = wide_llama(tmp_path, global_batch_size=9, gradient_accumulation=2, **options)
    for verdict in prove(run, 4, ["tp", "tp_sp", "cp", "tp_fsdp", "cp_fsdp"], runner=runner_on(pool4)):
        assert failed(verdict) == {}, verdict.layout


@with_adamw
@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 8},  # norms inside attention
        pytest.param(
            {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"model_type": "llama", "tie_word_embeddings": True, "pad_token_id": 32, "num_key_value_heads": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param({"model_type": "qwen2", "num_key_value_heads": 2}, marks=pytest.mark.slow),
        pytest.param({"model_type": "gemma3_text", "head_dim": 8}, marks=pytest.mark.slow),  # an embedding that scales
        pytest.param({"model_type": "gpt_neox"}, marks=pytest.mark.slow),  # query, key and value in one layer
        pytest.param({"model_type": "gemma2", "head_dim": 8}, marks=pytest.mark.slow),  # logits changed after the head
    ],
    ids=lambda keys: "-".join(str(value) for value in keys.values()),
)
def test_other_models(tmp_path: Path, pool2: Pool, keys: dict[str, Any], adamw: bool) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 259}
    model = {"config": {**sizes, "num_attention_heads": 4, **keys}}
    capped = keys["model_type"] == "gemma2"  # its head stays whole on every rank
    layouts = ["tp"] if capped or keys["model_type"] == "gemma3_text" else ["tp", "tp_sp"]
    run = on_text(tmp_path, "causal_lm", model, global_batch_size=6)
    for verdict in prove(run, 2, layouts, runner=runner_on(pool2, adamw=adamw)):
        assert failed(verdict).keys() <= ({"parameter bytes", "matmul FLOPs"} if capped else set()), verdict.layout
        assert verdict.outcome == ("other work" if capped else "same")


def trace_without_sums(*args: Any) -> Trace:
    """Traces a run in which each rank takes its part of a gradient for the sum."""
    with patch("shoal.parallel.tensor.tensor_parallel.sum_gradients", lambda tensor, group: tensor):
        return trace(*args)


def trace_with_all_heads_swapped(*args: Any) -> Trace:
    """Traces a run in which ranks attend only to their own tokens."""
    with patch("shoal.parallel.context.ulysses.swap", lambda tensor, split, join, group: tensor):
        return trace(*args)


@pytest.mark.parametrize(
    ("layout", "tracer"),
    [
        ("cp", trace_with_all_heads_swapped),
        *(pytest.param(layout, trace_without_sums, marks=pytest.mark.slow) for layout in ("tp", "tp_sp")),
    ],
)
def test_forgotten_exchanges_are_found(tmp_path: Path, pool2: Pool, layout: str, tracer: Any) -> None:
    (verdict,) = prove(llama(tmp_path, global_batch_size=6), 2, [layout], runner=runner_on(pool2, tracer, adamw=False))
    assert "gradients" in failed(verdict)


@pytest.mark.parametrize(
    ("layout", "bug", "checks"),
    [
        ("pp", "norm of one stage", {"gradient norm", "weights, SGD"}),
        ("tp", "tensor ranks draw differently", {"random numbers"}),
        pytest.param("pp", "gradient of a micro-batch lost", {"gradients", "later gradients"}, marks=pytest.mark.slow),
        pytest.param("cp", "same tokens on all ranks", {"loss", "gradients", "evaluation"}, marks=pytest.mark.slow),
    ],
)
def test_planted_bugs_of_a_mesh_are_found(tmp_path: Path, pool2: Pool, layout: str, bug: str, checks: set[str]) -> None:
    runner = runner_on(pool2, partial(trace_with, bug), adamw=False)
    (verdict,) = prove(llama(tmp_path, global_batch_size=6), 2, [layout], steps=2, runner=runner)
    assert checks <= failed(verdict).keys()
    if layout == "tp":  # dropout is off, so nothing else can see it
        assert checks == failed(verdict).keys()


@pytest.mark.parametrize(
    ("model", "mesh", "words"),
    [
        (llama, {"tp": 4}, "tp = 4 does not divide model.config.num_key_value_heads = 2"),
        (llama, {"cp": 4}, "tp × cp = 4 does not divide model.config.num_key_value_heads = 2"),
        (llama, {"pp": 8}, "schedule = 1f1b on distributed.mesh.pp = 8 has 8 stages and needs 8 blocks, .* has 4"),
        (bdh, {"tp": 3}, "tp = 3 does not divide model.n_head = 4"),
        (bdh, {"pp": 2}, "share their weights"),
        (bdh, {"cp": 2}, "BDH does not support context parallelism"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_anything_starts(
    tmp_path: Path, model: Any, mesh: dict[str, int], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        model(tmp_path, distributed={"strategy": "mesh", "mesh": mesh}, global_batch_size=8)


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_two_stages_per_rank_need_twice_the_blocks(tmp_path: Path, schedule: str) -> None:
    layout = {"strategy": "mesh", "pipeline": {"schedule": schedule}}
    words = f"distributed.pipeline.schedule = {schedule} on .*pp = 4 has 8 stages and needs 8 blocks, .* has 4; .* 1f1b"
    with pytest.raises(UserError, match=words):
        llama(tmp_path, distributed={**layout, "mesh": {"pp": 4}})
    run = llama(tmp_path, distributed={**layout, "mesh": {"pp": -1, "dp_shard": 1}})
    recipe = run.recipe_type(run.recipe_config)
    check_layout(run.config, recipe, 2, 2)
    with pytest.raises(UserError, match=words):
        check_layout(run.config, recipe, 4, 4)
