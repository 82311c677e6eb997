"""QLoRA: adapters beside a base in 4 bits, from the first step to an export that transformers and PEFT open."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from quantised.test_reading import Q_PROJ, SIZES, folder, text, train_norms
from recipes.test_causal_lm import make_recipe, start, tokens
from recipes.test_text_lora import tree
from safetensors.torch import load_file
from training.test_moves import bits
from verify.runs import failed, on_text, runner_on

import shoal
from shoal.checkpoint import open_checkpoint
from shoal.checkpoint.export import export
from shoal.checkpoint.trained_model import same_bits
from shoal.config import check_run
from shoal.errors import UserError
from shoal.quantised import quantised_layers
from shoal.recipes.causal_lm import CausalLMRecipe
from shoal.training import train
from shoal.verify import prove

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
folder, text = folder, text

ALL_SPLIT = {"stage3_param_persistence_threshold": 0}
LORA = {"r": 4, "lora_alpha": 32, "target_modules": ["q_proj", "down_proj"]}


def train_qlora(tmp_path: Path, folder: Path, text: dict[str, Any], steps: int, **keys: Any) -> Path:
    model = {"name": str(folder), "load_in_4bit": True, "bnb_4bit_use_double_quant": True, **keys.pop("model", {})}
    training = {"learning_rate": 0.05, **keys.pop("training", {})}
    lora = {**LORA, **keys.pop("lora", {})}
    dataset = {**text, "tokenizer": "bytes"}
    return train_norms(tmp_path, model, dataset, steps, recipe="causal_lm", lora=lora, training=training, **keys)


@pytest.mark.parametrize(
    "keys",
    [{"load_in_8bit": True}, {"load_in_4bit": True}, {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}],
    ids=str,
)
def test_a_loaded_model_has_the_bits_of_its_base(
    tmp_path: Path, folder: Path, text: dict[str, Any], keys: dict[str, Any]
) -> None:
    """Frozen weights in bf16 are of that dtype; packed weights and their statistics are not touched."""
    off = {"load_in_4bit": False, "bnb_4bit_use_double_quant": None}
    step = train_qlora(tmp_path, folder, text, 1, model={**off, **keys, "dtype": "bf16"})
    base = start(make_recipe(name=str(folder), **keys))
    layers, expected = (quantised_layers(model) for model in (shoal.load(step), base))
    assert len(layers) == 14
    for name, layer in layers.items():
        assert same_bits(layer.weight, expected[name].weight)
        assert same_bits(layer.statistics, expected[name].statistics)
        assert layer.weight.logical_numel == expected[name].weight.logical_numel


def test_a_run_and_its_exports(tmp_path: Path, folder: Path, text: dict[str, Any]) -> None:
    step = train_qlora(tmp_path, folder, text, 3, model={"dtype": "bf16"})
    checkpoint = open_checkpoint(step)
    stored = [name for name in checkpoint.tensors if name.startswith("model/")]
    assert len(stored) == 8
    assert all(".lora_" in name for name in stored)
    trained = shoal.load(step).eval()
    assert trained.get_submodule(Q_PROJ).scheme.bits == 4
    expected = trained(tokens(1, 12)).logits
    export(step, tmp_path / "dequantised", "hf", merge_into="dequantised")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dequantised", dtype=torch.float32)
    torch.testing.assert_close(merged(tokens(1, 12)).logits, expected.float(), rtol=1e-3, atol=0.02)
    notes = " ".join(export(step, tmp_path / "original", "hf", merge_into="original")["notes"])
    assert "logits differ from those of the trained model, whose base is quantised, by" in notes
    original = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "original", dtype=torch.float32)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    untouched = "model.layers.0.self_attn.k_proj.weight"
    assert torch.equal(original.get_parameter(untouched), base.get_parameter(untouched))
    assert not torch.equal(merged.get_parameter(untouched), base.get_parameter(untouched))
    report = (tmp_path / "out" / "report.txt").read_text()
    weights = sum(parameter.numel() for parameter in base.parameters())
    added = sum(tensor.numel() for tensor in trained.parameters() if tensor.requires_grad)
    assert f"{added:,} of {weights + added:,} parameters are trained" in report
    done = export(step, tmp_path / "third", "hf", merge_into="dequantised")
    assert done["tensors"] == len(load_file(tmp_path / "third" / "model.safetensors")) == len(base.state_dict())
    assert re.search(
        r"by \S+% of the largest logit with --merge-into original and by \S+% .* with --merge-into dequantised",
        str(done),
    )
    notes = " ".join(export(step, tmp_path / "adapter", "peft")["notes"])
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder.absolute())
    assert "opened by PEFT, its logits equal those of the checkpoint's model" in notes
    (call,) = re.findall(r"load the base with (BitsAndBytesConfig\(.*\))", notes)
    loaded = eval(call, {"BitsAndBytesConfig": transformers.BitsAndBytesConfig, "torch": torch})
    assert loaded.quantization_method() == "nf4"
    assert loaded.bnb_4bit_use_double_quant


@pytest.mark.parametrize(
    "keys",
    [
        {"load_in_8bit": True},
        {"load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16"},
        pytest.param({"load_in_8bit": True, "dtype": "bf16"}, marks=pytest.mark.slow),
        pytest.param({"load_in_4bit": True, "bnb_4bit_compute_dtype": "float16"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_exports_of_a_base_that_computes_in_less(
    tmp_path: Path, folder: Path, text: dict[str, Any], keys: dict[str, Any]
) -> None:
    """Exported models have the base dequantised and compute in their own dtype, as what they are compared with."""
    off = {"load_in_4bit": False, "bnb_4bit_use_double_quant": None}
    step = train_qlora(tmp_path, folder, text, 2, model={**off, **keys})
    notes = " ".join(export(step, tmp_path / "adapter", "peft")["notes"])
    assert "its logits equal those of the checkpoint's model with its base dequantised" in notes
    notes = " ".join(export(step, tmp_path / "merged", "hf", merge_into="dequantised")["notes"])
    assert "its logits equal those of the checkpoint's model with its base dequantised" in notes
    assert "logits differ from those of the trained model, whose base is quantised, by" in notes


@pytest.mark.slow
def test_it_resumes_to_the_bit(tmp_path: Path, folder: Path, text: dict[str, Any]) -> None:
    train_qlora(tmp_path, folder, text, 2)
    resumed = train_qlora(tmp_path, folder, text, 4)
    whole = train_qlora(tmp_path, folder, text, 4, output="whole")
    assert bits(open_checkpoint(resumed).read()) == bits(open_checkpoint(whole).read())


@pytest.mark.slow
def test_dora_begins_with_the_lengths_of_the_dequantised_rows(folder: Path) -> None:
    values = {"model": {"name": str(folder), "load_in_4bit": True}, "lora": {**LORA, "use_dora": True}, "dataset": {}}
    model = start(CausalLMRecipe(CausalLMRecipe.Config.model_validate(values)))
    layer = model.get_submodule(Q_PROJ)
    torch.testing.assert_close(layer.lora_magnitude_vector["default"].weight, layer.dequantise().norm(dim=1))
    plain = start(make_recipe(name=str(folder), load_in_4bit=True))
    torch.testing.assert_close(model(tokens(1, 8)).logits, plain(tokens(1, 8)).logits)


@pytest.mark.slow
def test_a_base_without_originals_is_merged_into_what_it_is(tmp_path: Path, text: dict[str, Any]) -> None:
    model = {"config": {**SIZES, "vocab_size": 256}, "load_in_4bit": True}
    keys = {"recipe": "causal_lm", "lora": LORA}
    step = train_norms(tmp_path, model, {**text, "tokenizer": "bytes"}, 1, **keys)
    with pytest.raises(UserError, match=r"--merge-into original: the weights .* are not known; use dequantised"):
        export(step, tmp_path / "out_hf", "hf", merge_into="original")
    export(step, tmp_path / "out_hf", "hf", merge_into="dequantised")
    notes = " ".join(export(step, tmp_path / "out_peft", "peft")["notes"])
    assert "adapter_config.json names no base" in notes


@pytest.mark.slow
@pytest.mark.parametrize("use_dora", [False, True])
def test_layouts(pool2: Pool, tmp_path: Path, folder: Path, use_dora: bool) -> None:
    model = {"name": str(folder), "load_in_4bit": True, "bnb_4bit_use_double_quant": True}
    tree = on_text(tmp_path, "causal_lm", model, {"deepspeed": ALL_SPLIT}, global_batch_size=6).tree()
    tree["dataset"]["tokenizer"] = "bytes"
    run = check_run({**tree, "lora": {**LORA, "use_dora": use_dora, "init_lora_weights": use_dora}})
    for verdict in prove(
        run, 2, ["ddp", "fsdp", "fsdp_shard_grad_op", "zero_1", "zero_2", "zero_3"], runner=runner_on(pool2)
    ):
        assert failed(verdict) == {}, verdict.layout
        assert verdict.left_out == ""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_resume_to_the_bit(
    pool2: Pool, tmp_path: Path, folder: Path, text: dict[str, Any], strategy: str
) -> None:
    keys = {"distributed": {"strategy": strategy}}
    for steps, output in ((2, "out"), (4, "out"), (4, "whole")):
        pool2.run(train_qlora, tmp_path, folder, text, steps, init=False, output=output, **keys)
    resumed, whole = (open_checkpoint(tmp_path / o / "checkpoints" / "step_00000004") for o in ("out", "whole"))
    assert bits(resumed.read()) == bits(whole.read())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "training"),
    [({}, {"global_batch_size": 8}), ({"pad_to_max": True}, {"global_batch_size": 10})],
    ids=["sequences of several lengths", "micro-batches of several sizes"],
)
def test_a_compiled_run_resumes_to_the_bit(tmp_path: Path, dataset: dict[str, Any], training: dict[str, Any]) -> None:
    """Graphs for one size and for all sizes round differently, so the batch alone must decide which one computes it."""
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 128}
    words = ["the", "cat", "sat", "on", "a", "mat", "while", "blue", "fish", "swam", "in", "deep", "cold", "water"]
    records = [
        {"prompt": " ".join(words[: 1 + i % 5]), "completion": " ".join(words[i % 3 :][: 1 + i % 11])}
        for i in range(60)
    ]
    (tmp_path / "facts.jsonl").write_text("\n".join(map(json.dumps, records)))
    keys = tree(
        tmp_path,
        {"config": {**SIZES, **sizes}, "load_in_4bit": True, "bnb_4bit_use_double_quant": True, "dtype": "bf16"},
        dataset={"tokenizer": "bytes", "max_seq_length": 96, **dataset},
        training={"mixed_precision": "bf16", "compile": True, "learning_rate": 0.01, **training},
    )
    keys["lora"] = {"r": 8, "target_modules": "all-linear", "lora_dropout": 0.1, "lora_alpha": 16}
    saved = {}
    for output, stops in (("whole", [12]), ("resumed", [7, 12])):
        for steps in stops:
            keys["training"] |= {"max_steps": steps, "lr_scheduler": "constant"}
            keys["experiment"] = {"output_dir": str(tmp_path / output)}
            train(check_run(keys))
        saved[output] = open_checkpoint(tmp_path / output / "checkpoints" / "step_00000012").read().model
    for name, tensor in saved["whole"].items():
        assert same_bits(saved["resumed"][name], tensor), name
