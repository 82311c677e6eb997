"""Gradients through a base in 4 or 8 bits are the same in every layout, and the base is sharded."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool

from shoal.config import Run
from shoal.verify import prove
from shoal.verify.compare import _packed
from shoal.verify.trace import Trace, trace
from verify.runs import failed, on_text, runner_on

pytest.importorskip("bitsandbytes")
pytest.importorskip("transformers")


def quantised(tmp_path: Path, distributed: dict[str, Any] | None = None, training: Any = None, **model: Any) -> Run:
    sizes = {"hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 2, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    section = {"config": {"model_type": "llama", **sizes, **heads}, **model}
    training = {"global_batch_size": 6, **(training or {})}
    return on_text(tmp_path, "verify.planted:TrainedNorms", section, distributed, **training)


def prove_all(pool: Pool, run: Run, layouts: list[str], adamw: bool = True) -> None:
    for verdict in prove(run, 2, layouts, runner=runner_on(pool, adamw=adamw)):
        assert failed(verdict) == {}, verdict.layout
        assert verdict.left_out == "", verdict.layout
        details = {check.name: check.detail for check in verdict.checks}
        bits = 8 if run.recipe_config.model.load_in_8bit else 4
        assert details["quantised weights"] == f"14 layers with {bits}.00 bits a weight, besides their scales"
        is_sharded = verdict.layout in ("fsdp", "fsdp_shard_grad_op", "zero_3", "fsdp_cp")
        assert details["parameter bytes"].startswith("0.50" if is_sharded else "1.00"), verdict.layout


def test_a_4_bit_base_is_the_same_and_sharded(pool2: Pool, tmp_path: Path) -> None:
    storage = "uint8" if torch.__version__ >= "2.13" else "bfloat16"  # fully_shard took no integers before
    run = quantised(tmp_path, load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_quant_storage=storage)
    prove_all(pool2, run, ["fsdp"], adamw=False)


def test_packed_weights_are_seen_if_they_are_not_packed(tmp_path: Path) -> None:
    """The check must fail if a layer holds a byte for each weight."""
    trace = Trace(packed={"good": (50, 100, 4), "bad": (100, 100, 4)})
    (check,) = _packed([trace])
    assert not check.passed
    assert "too many in bad" in check.detail


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["uint8", "bfloat16", "float32"])
@pytest.mark.parametrize("double", [False, True])
def test_layouts_of_4_bits(pool2: Pool, tmp_path: Path, storage: str, double: bool) -> None:
    options = {"bnb_4bit_use_double_quant": double, "bnb_4bit_quant_storage": storage}
    distributed = {"deepspeed": {"stage3_param_persistence_threshold": 0}}
    layouts = ["ddp", "fsdp", "fsdp_shard_grad_op", *(["zero_1", "zero_2", "zero_3"] if find_spec("deepspeed") else [])]
    prove_all(pool2, quantised(tmp_path, distributed, load_in_4bit=True, **options), layouts)


@pytest.mark.slow
def test_layouts_of_8_bits(pool2: Pool, tmp_path: Path) -> None:
    prove_all(pool2, quantised(tmp_path, load_in_8bit=True), ["ddp", "fsdp"])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "pure_bf16"])
def test_half_precision_and_less_memory(pool2: Pool, tmp_path: Path, precision: str) -> None:
    training = {"mixed_precision": precision, "activation_checkpointing": "full", "loss_chunks": 2}
    run = quantised(tmp_path, training=training, load_in_4bit=True, bnb_4bit_quant_storage="bfloat16")
    prove_all(pool2, run, ["fsdp"])


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["uint8", "bfloat16"])
def test_4_bits_in_two_replicas_of_two_shards(pool4: Pool, tmp_path: Path, storage: str) -> None:
    """Packed weights are sharded within each replica."""
    run = quantised(tmp_path, load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_quant_storage=storage)
    (verdict,) = prove(run, 4, ["fsdp_hybrid"], runner=runner_on(pool4))
    assert failed(verdict) == {}
    details = {check.name: check.detail for check in verdict.checks}
    assert details["quantised weights"] == "14 layers with 4.00 bits a weight, besides their scales"
    assert details["parameter bytes"].startswith("0.50")


def trace_offloaded(run: Run, steps: int, shared: Any, adamw: bool, in_float64: bool) -> Trace:
    """Traces a run whose parameters fully_shard offloads as for `cpu_offload: true`, which needs a GPU; here it moves
    them from the host to the host."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.strategies.engines.fsdp.OffloadPolicy", lambda: CPUOffloadPolicy(pin_memory=False))
        return trace(run, steps, shared, adamw, in_float64)


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["uint8", "bfloat16"])
def test_4_bits_are_offloaded(pool2: Pool, tmp_path: Path, storage: str) -> None:
    run = quantised(tmp_path, load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_quant_storage=storage)
    for verdict in prove(run, 2, ["fsdp"], runner=runner_on(pool2, trace_offloaded)):
        assert failed(verdict) == {}
