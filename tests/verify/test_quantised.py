"""Gradients through a base in 4 or 8 bits are the same in every layout, and the base is sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pool import Pool

from shoal.config import Run
from shoal.verify import prove
from verify.runs import failed, on_text, runner_on

pytest.importorskip("bitsandbytes")
pytest.importorskip("transformers")


def quantised(tmp_path: Path, distributed: dict[str, Any] | None = None, training: Any = None, **model: Any) -> Run:
    sizes = {"hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 2, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    section = {"config": {"model_type": "llama", **sizes, **heads}, **model}
    training = {"global_batch_size": 6, **(training or {})}
    return on_text(tmp_path, "verify.planted:TrainedNorms", section, distributed, **training)


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "fsdp_shard_grad_op", "zero_1", "zero_2", "zero_3"])
def test_layouts(pool2: Pool, tmp_path: Path, layout: str) -> None:
    run = quantised(tmp_path, load_in_4bit=True, bnb_4bit_use_double_quant=True)
    (verdict,) = prove(run, 2, [layout], runner=runner_on(pool2))
    print(verdict)
    assert failed(verdict) == {}
    assert verdict.left_out == ""
