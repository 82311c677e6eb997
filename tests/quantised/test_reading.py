"""A quantised base from files: the numbers of transformers, each rank its shard, and checkpoints that refer to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from recipes.test_causal_lm import LLAMA, make_recipe, start, text, tokens
from safetensors.torch import load_file, save_file
from training.test_moves import bits

from shoal.checkpoint import open_checkpoint
from shoal.config import check_run
from shoal.errors import UserError
from shoal.quantised import FourBit, quantised_layers
from shoal.quantised.sources import Quantisation, QuantisedSource
from shoal.recipes.causal_lm import CausalLMRecipe
from shoal.training import train
from shoal.weights.conversion import FileTensor, open_files

pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")
text = text

SIZES = {**LLAMA, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a small Llama in bf16."""
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(make_recipe(SIZES).transformers_config)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def by_transformers(folder: Path, **options: Any) -> Any:
    config = transformers.BitsAndBytesConfig(**options)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)


CASES = [
    {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": "bfloat16"},
    {"load_in_8bit": True},
    {"load_in_4bit": True, "llm_int8_skip_modules": ["lm_head", r"model\.layers\.\d+\.mlp", "v_proj"]},
]


@pytest.mark.parametrize("options", CASES)
def test_a_base_from_files_is_that_of_transformers(folder: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    theirs = by_transformers(folder, **options).train()
    expected = theirs(tokens(2, 16)).logits
    if "llm_int8_skip_modules" not in options:
        ours = start(make_recipe(name=str(folder), **options)).train()
        assert torch.equal(ours(tokens(2, 16)).logits, expected)
    theirs.save_pretrained(tmp_path)  # quantised on disk
    recipe = make_recipe(name=str(tmp_path))
    again = start(recipe).train()
    assert torch.equal(again(tokens(2, 16)).logits, expected)
    assert again.get_submodule(Q_PROJ).scheme.bits == (8 if "load_in_8bit" in options else 4)
    assert not hasattr(recipe.transformers_config, "quantization_config")


def test_layers_that_are_quantised_in_no_file_are_refused(folder: Path, tmp_path: Path) -> None:
    """It would be another base than the one that was stored."""
    theirs = by_transformers(folder, load_in_4bit=True, llm_int8_skip_modules=["lm_head", "q_proj"])
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["llm_int8_skip_modules"] = None
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=rf"model.name: the files have {Q_PROJ} without quantisation, and other layers"):
        start(make_recipe(name=str(tmp_path)))


def test_a_fresh_model_is_drawn_by_name_and_quantised() -> None:
    plain, quantised = (start(make_recipe(SIZES, **options)) for options in ({}, {"load_in_4bit": True}))
    assert torch.equal(plain.lm_head.weight, quantised.lm_head.weight)
    layers = quantised_layers(quantised)
    assert len(layers) == 14
    for name, layer in layers.items():
        weight = plain.get_submodule(name).weight
        assert torch.equal(layer.weight, FourBit().quantise("weight", weight))
        assert 0 < (layer.dequantise() - weight).abs().max() < weight.abs().max() / 6


@pytest.mark.parametrize("storage", ["uint8", "float32"])
def test_a_rank_reads_its_shard_wherever_it_is_cut(tmp_path: Path, storage: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("shoal.quantised.sources._STRETCH", 128)
    matrix, scheme = torch.randn(12, 48), FourBit(double=True, storage=storage)
    save_file({"w": matrix}, tmp_path / "w.safetensors")
    files = open_files([tmp_path / "w.safetensors"])
    for part in ("weight", "statistics"):
        whole = scheme.quantise(part, matrix)  # type: ignore[arg-type]
        source = QuantisedSource((FileTensor("w"),), Quantisation(scheme, part, (12, 48)))  # type: ignore[arg-type]
        assert source.meta(files).shape == whole.shape
        for start_, stop in ((0, len(whole)), (0, 1), (5, 23), (len(whole) - 3, len(whole))):
            out = torch.empty_like(whole[start_:stop])
            source.fill(out, [slice(start_, stop), *(slice(0, 1) for _ in range(whole.ndim - 1))], files)
            assert torch.equal(out.view(torch.uint8), whole[start_:stop].contiguous().view(torch.uint8))


class TrainedNorms(CausalLMRecipe):
    """Trains the norms of a quantised model."""

    def build_model(self) -> Any:
        model = super().build_model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
        return model


def train_norms(tmp_path: Path, model: dict[str, Any], dataset: dict[str, Any], steps: int, **keys: Any) -> Path:
    output = tmp_path / keys.pop("output", "out")
    training = {"max_steps": steps, "global_batch_size": 4, "lr_scheduler": "constant", "device": "cpu"}
    tree = {
        "recipe": "quantised.test_reading:TrainedNorms",
        "model": model,
        "dataset": dataset,
        "training": {**training, **keys.pop("training", {})},
        "experiment": {"output_dir": str(output)},
        "logging": {"every": 1, "console": "off", "tensorboard": False},
        "checkpoint": {"every": 2},
        **keys,
    }
    train(check_run(tree))
    return output / "checkpoints" / f"step_{steps:08d}"


def test_a_checkpoint_refers_to_the_base_and_resumes(tmp_path: Path, folder: Path, text: dict[str, Any]) -> None:
    model = {"name": str(folder), "load_in_4bit": True, "bnb_4bit_use_double_quant": True}
    dataset = {**text, "tokenizer": "bytes"}
    train_norms(tmp_path, model, dataset, 2)
    resumed = open_checkpoint(train_norms(tmp_path, model, dataset, 4))
    whole = open_checkpoint(train_norms(tmp_path, model, dataset, 4, output="whole"))
    assert bits(resumed.read()) == bits(whole.read())
    assert {name for name in resumed.tensors if name.startswith("model/") and "norm" not in name} == set()
    assert resumed.manifest["format"] == 3
    entry = resumed.manifest["base"]["tensors"][f"{Q_PROJ}.statistics"]
    assert entry["quantised"]["scheme"] == {"bits": 4, "quant_type": "nf4", "double": True, "storage": "uint8"}
    assert entry["from"][0]["key"] == f"{Q_PROJ}.weight"
    read = resumed.read().model
    matrix = load_file(folder / "model.safetensors")[f"{Q_PROJ}.weight"].float()
    assert torch.equal(read[f"{Q_PROJ}.weight"], FourBit(double=True).quantise("weight", matrix))
    report = (tmp_path / "out" / "report.txt").read_text()
    assert "14 linear layers in 4 bits: nf4 with quantised scales, kept as uint8" in report


@pytest.mark.slow
def test_another_base_is_refused(tmp_path: Path, folder: Path, text: dict[str, Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    model, dataset = {"name": str(copy), "load_in_4bit": True}, {**text, "tokenizer": "bytes"}
    train_norms(tmp_path, model, dataset, 2)
    tensors[f"{Q_PROJ}.weight"][0, 0] += 1
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=rf"is not the base that .* was trained on: {Q_PROJ}.weight differs"):
        train_norms(tmp_path, model, dataset, 4)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_go_on_as_if_they_had_not_stopped(
    tmp_path: Path, folder: Path, text: dict[str, Any], pool2: Pool, strategy: str
) -> None:
    model = {"name": str(folder), "load_in_4bit": True, "bnb_4bit_use_double_quant": True}
    keys = {"distributed": {"strategy": strategy}}
    for steps, output in ((2, "out"), (4, "out"), (4, "whole")):
        dataset = {**text, "tokenizer": "bytes"}
        pool2.run(train_norms, tmp_path, model, dataset, steps, init=False, output=output, **keys)
    resumed, whole = (open_checkpoint(tmp_path / o / "checkpoints" / "step_00000004") for o in ("out", "whole"))
    assert bits(resumed.read()) == bits(whole.read())
    train_norms(tmp_path, model, {**text, "tokenizer": "bytes"}, 6)  # on one process
    assert json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 6


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"load_in_4bit": True, "load_in_8bit": True}, "model.load_in_4bit and model.load_in_8bit are both true"),
        ({"bnb_4bit_quant_type": "nf4"}, "model.bnb_4bit_quant_type = nf4: no effect without model.load_in_4bit"),
        ({"load_in_8bit": True, "bnb_4bit_use_double_quant": True}, "no effect without model.load_in_4bit"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "nf4"),
    ],
)
def test_contradictory_and_idle_keys_are_refused(model: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_run({"recipe": "causal_lm", "model": {"config": SIZES, **model}, "training": {"max_steps": 1}})


def test_a_base_that_nobody_trains_is_refused(tmp_path: Path, text: dict[str, Any]) -> None:
    keys = {"recipe": "causal_lm", "training": {"device": "cpu"}}
    with pytest.raises(
        UserError, match="parameters of the model are frozen, and nothing is trained; add a section lora"
    ):
        train_norms(tmp_path, {"config": SIZES, "load_in_4bit": True}, text, 1, **keys)


def test_tensor_parallelism_is_refused(text: dict[str, Any]) -> None:
    recipe = make_recipe(SIZES, text, load_in_4bit=True)
    with pytest.raises(UserError, match=r"distributed.mesh.tp = 2: tensor parallelism does not split quantised layers"):
        recipe.check_mesh({"tp": 2})


def test_stored_bits_and_keys_must_agree(folder: Path, tmp_path: Path) -> None:
    by_transformers(folder, load_in_4bit=True, bnb_4bit_quant_type="nf4").save_pretrained(tmp_path)
    for options, words in (
        ({"load_in_8bit": True}, "model.load_in_8bit = true: the weights of model.name are stored in 4 bits"),
        ({"bnb_4bit_quant_type": "fp4"}, "model.bnb_4bit_quant_type = fp4: the weights are stored with nf4"),
    ):
        with pytest.raises(UserError, match=words):
            make_recipe(name=str(tmp_path), **options).build_model()
