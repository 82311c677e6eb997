"""LoRA and DoRA compute the same training in every layout as on one device, and the frozen base is sharded too."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from lora.test_added_tokens import save_base
from pool import Pool

from shoal.config import Run, check_run
from shoal.config.layout import check_layout
from shoal.errors import UserError
from shoal.verify import prove
from verify.runs import failed, llama, runner_on

transformers = pytest.importorskip("transformers")

ALL_LINEAR = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
DORA = {**ALL_LINEAR, "use_dora": True}
TP = {"strategy": "mesh", "mesh": {"tp": 2}}
KINDS = [pytest.param(ALL_LINEAR, id="lora"), pytest.param(DORA, id="dora")]


def adapted(tmp_path: Path, lora: dict[str, Any], distributed: dict[str, Any] | None = None, **training: Any) -> Run:
    """Returns a run that trains adapters beside the saved weights of a small Llama."""
    tree = llama(tmp_path, distributed, **training).tree()
    folder = tmp_path.parent / "llama_base"
    if not folder.exists():
        torch.manual_seed(0)
        keys = {key: value for key, value in tree["model"]["config"].items() if key != "model_type"}
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**keys)).save_pretrained(folder)
    tree["model"] = {"name": str(folder)}
    tree["dataset"]["tokenizer"] = "bytes"
    return check_run({**tree, "lora": lora})


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp_sp", "fsdp", "pp"])
def test_dora_in_two(tmp_path: Path, pool2: Pool, layout: str) -> None:
    """DoRA has all parts of LoRA; the slow tests prove both in all layouts."""
    run = adapted(tmp_path, DORA, global_batch_size=7, gradient_accumulation=2)
    (verdict,) = prove(run, 2, [layout], steps=2, runner=runner_on(pool2, adamw=False))
    assert failed(verdict) == {}


@pytest.mark.slow
def test_lora_shares_the_work_of_tensor_parallel_ranks(tmp_path: Path, pool2: Pool) -> None:
    run = adapted(tmp_path, ALL_LINEAR, global_batch_size=7, gradient_accumulation=2)
    (verdict,) = prove(run, 2, ["tp"], steps=2, runner=runner_on(pool2, adamw=False))
    assert failed(verdict) == {}


@pytest.mark.slow
@pytest.mark.parametrize("lora", KINDS)
def test_all_layouts_in_two(tmp_path: Path, pool2: Pool, lora: dict[str, Any]) -> None:
    run = adapted(tmp_path, lora, global_batch_size=7, gradient_accumulation=2)
    layouts = ["single", "ddp", "fsdp", "tp", "tp_sp", "cp", "pp"]
    layouts += ["fsdp_shard_grad_op", "fsdp_no_shard", "pp_gpipe", "pp_interleaved", "pp_zbv"]
    for verdict in prove(run, 2, layouts, runner=runner_on(pool2)):
        assert failed(verdict) == {}, verdict.layout


@pytest.mark.slow
@pytest.mark.parametrize("lora", KINDS)
def test_layouts_in_four(tmp_path: Path, pool4: Pool, lora: dict[str, Any]) -> None:
    run = adapted(tmp_path, lora, global_batch_size=17, gradient_accumulation=4)
    layouts = ["fsdp_hybrid", "tp_fsdp", "tp_ddp", "pp_fsdp", "pp_ddp", "pp_tp", "cp_fsdp"]
    for verdict in prove(run, 4, layouts, runner=runner_on(pool4)):
        assert failed(verdict) == {}, verdict.layout


@pytest.mark.slow
def test_three_dimensions_on_eight(tmp_path: Path) -> None:
    run = adapted(tmp_path, DORA, global_batch_size=17, gradient_accumulation=4)
    with Pool(8, scratch=tmp_path) as pool8:
        (verdict,) = prove(run, 8, ["pp_tp_fsdp"], runner=runner_on(pool8))
    assert failed(verdict) == {}


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="the package deepspeed is not installed")
@pytest.mark.slow
@pytest.mark.parametrize("lora", KINDS)
def test_zero(tmp_path: Path, pool2: Pool, lora: dict[str, Any]) -> None:
    run = adapted(tmp_path, lora, global_batch_size=7, gradient_accumulation=2)
    for verdict in prove(run, 2, ["zero_1", "zero_2", "zero_3"], runner=runner_on(pool2)):
        assert failed(verdict) == {}, verdict.layout


@pytest.mark.slow
def test_a_stage_without_adapters_and_modules_that_are_trained_whole(tmp_path: Path, pool2: Pool) -> None:
    lora = {"r": 2, "target_modules": ["q_proj"], "layers_to_transform": [3]}
    run = adapted(tmp_path, lora, global_batch_size=7, gradient_accumulation=2)
    for verdict in prove(run, 2, ["pp", "pp_zbv"], steps=2, runner=runner_on(pool2, adamw=False)):
        assert failed(verdict) == {}, verdict.layout
    lora = {"r": 2, "target_modules": ["embed_tokens", "o_proj"], "modules_to_save": ["lm_head"]}
    run = adapted(tmp_path, lora, global_batch_size=7, gradient_accumulation=2)
    for verdict in prove(run, 2, ["tp", "fsdp"], steps=2, runner=runner_on(pool2, adamw=False)):
        assert failed(verdict).keys() <= {"parameter bytes", "matmul FLOPs"}, verdict.layout


def with_new_tokens(tmp_path: Path, lora: dict[str, Any] | None, tied: bool) -> Run:
    """Returns a run on a base that gets two more tokens; an odd number of tokens in all, which two ranks share."""
    base = save_base(tmp_path.parent, tied)
    tree = llama(tmp_path, global_batch_size=7, gradient_accumulation=2).tree()
    tree["model"] = {"name": str(base), "added_tokens": ["squared", " is "]}
    tree["dataset"]["tokenizer"] = str(base)
    return check_run({**tree, **({"lora": lora} if lora else {})})


ROWS = {"r": 2, "target_modules": ["q_proj"], "trainable_token_indices": "added"}


def test_new_tokens_in_two(tmp_path: Path, pool2: Pool) -> None:
    """All rows are trained; the vocabulary is split by tensor parallelism."""
    run = with_new_tokens(tmp_path, None, tied=True)
    for verdict in prove(run, 2, ["fsdp", "tp"], steps=2, runner=runner_on(pool2, adamw=False)):
        assert failed(verdict) == {}, verdict.layout


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("lora", [None, ROWS], ids=["all rows", "new rows"])
def test_new_tokens_in_all_layouts(tmp_path: Path, pool2: Pool, lora: dict[str, Any] | None, tied: bool) -> None:
    run = with_new_tokens(tmp_path, lora, tied)
    layouts = ["ddp", "fsdp", "fsdp_shard_grad_op", "tp", "cp", "zero_1", "zero_2", "zero_3", *([] if tied else ["pp"])]
    for verdict in prove(run, 2, layouts, steps=2, runner=runner_on(pool2, adamw=False)):
        wrong = failed(verdict)
        if lora is not None and verdict.layout == "tp":  # each rank has the whole embedding and head
            wrong = {key: why for key, why in wrong.items() if key not in ("parameter bytes", "matmul FLOPs")}
        assert wrong == {}, verdict.layout
        assert verdict.left_out == ""


@pytest.mark.slow
def test_experts_in_all_layouts(tmp_path: Path, pool2: Pool) -> None:
    folder = tmp_path / "mixtral"
    tree = llama(tmp_path, global_batch_size=7, gradient_accumulation=2).tree()
    sizes = {key: value for key, value in tree["model"]["config"].items() if key != "model_type"}
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
    transformers.MixtralForCausalLM(config).save_pretrained(folder)
    tree["model"] = {"name": str(folder)}
    tree["dataset"]["tokenizer"] = "bytes"
    lora = {"r": 2, "target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    run = check_run({**tree, "lora": lora})
    for verdict in prove(run, 2, ["ddp", "fsdp", "pp", "zero_2", "zero_3"], steps=2, runner=runner_on(pool2)):
        assert failed(verdict) == {}, verdict.layout
        assert verdict.left_out == ""
    with pytest.raises(UserError, match=r"does not split the adapters of lora.target_parameters"):
        check_layout(check_run({**run.tree(), "distributed": TP}).config, run.make_recipe(), 2, 2)
