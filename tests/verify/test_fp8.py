"""Layouts in fp8 compute the same training as one device, and share the work."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pool import Pool

from shoal.config import Run, check_run
from shoal.training import train
from shoal.verify import prove
from verify.planted import trace_with
from verify.runs import failed, on_text, runner_on

pytest.importorskip("torchao", reason="torchao is not installed; pip install 'shoal[quant]'")
HEAD = {"loss_chunks": 2, "fp8_head": True}


def llama(tmp_path: Path, **training: Any) -> Run:
    """Returns a run in fp8 of a Llama whose sizes are multiples of 32, as products in fp8 of two ranks need."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
    model = {"config": {"model_type": "llama", **sizes, "num_attention_heads": 4, "num_key_value_heads": 2}}
    keys = {"mixed_precision": "fp8", "global_batch_size": 8, **training}
    return on_text(tmp_path, "causal_lm", model, **keys)


@pytest.mark.parametrize("head", [{}, HEAD], ids=["", "head"])
@pytest.mark.parametrize(
    "layouts",
    [
        ["tp_sp"],
        pytest.param(["ddp", "fsdp", "fsdp_shard_grad_op", "fsdp_no_shard"], marks=pytest.mark.slow),
        pytest.param(["tp", "cp", "pp"], marks=pytest.mark.slow),
    ],
    ids=lambda names: names[0],
)
def test_layouts_equal_one_device(tmp_path: Path, pool2: Pool, layouts: list[str], head: dict[str, Any]) -> None:
    for verdict in prove(llama(tmp_path, **head), 2, layouts, runner=runner_on(pool2, adamw=False)):
        assert failed(verdict) == {}, verdict.layout


@pytest.mark.parametrize(
    ("bug", "check"),
    [
        ("no gradients of queries and keys", "gradients"),
        pytest.param("gradients 9% too large", "gradient norm", marks=pytest.mark.slow),
        pytest.param("logits a quarter too large", "loss", marks=pytest.mark.slow),
    ],
)
def test_bugs_are_found_under_wide_bounds(tmp_path: Path, pool2: Pool, bug: str, check: str) -> None:
    runner = runner_on(pool2, partial(trace_with, bug), adamw=False)
    (verdict,) = prove(llama(tmp_path, **HEAD), 2, ["ddp"], runner=runner)
    assert check in failed(verdict)


def test_the_report_says_what_is_in_fp8(tmp_path: Path) -> None:
    for name, head, said in (("plain", {}, "14 linear layers "), ("head", HEAD, "14 linear layers and the head ")):
        tree = llama(tmp_path, max_steps=1, **head).tree()
        tree["experiment"]["output_dir"] = str(tmp_path / name)
        tree["logging"] |= {"console": "off", "tensorboard": False}
        train(check_run(tree))
        (line,) = (line for line in (tmp_path / name / "report.txt").read_text().splitlines() if line.startswith("fp8"))
        assert said in line + " "
