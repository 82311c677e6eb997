"""Recipe causal_lm: models from scratch, models from files, and its error messages."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shoal.checkpoint.export import export
from shoal.config.run import check_run, load_run
from shoal.errors import UserError
from shoal.recipes.causal_lm import CausalLMRecipe
from shoal.strategies import FSDPStrategy, SingleStrategy
from shoal.training import train
from shoal.transform.chunked_loss import ChunkedHead
from shoal.weights import build, materialise, parameters_on_meta

transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA = {"model_type": "llama", **TINY}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}
NEOX = {key: value for key, value in TINY.items() if key != "num_key_value_heads"}
OPT = {**NEOX, "word_embed_proj_dim": 32, "ffn_dim": 48}
del OPT["intermediate_size"]
KINDS: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "llama": (LLAMA, "model.layers", "lm_head"),
    "qwen2": ({"model_type": "qwen2", **TINY}, "model.layers", "lm_head"),
    "qwen3": ({"model_type": "qwen3", "head_dim": 8, **TINY}, "model.layers", "lm_head"),
    "mistral": ({"model_type": "mistral", **TINY}, "model.layers", "lm_head"),
    "mixtral": ({"model_type": "mixtral", "num_local_experts": 2, **TINY}, "model.layers", "lm_head"),
    "gpt2": (GPT2, "transformer.h", "lm_head"),
    "gpt_neox": ({"model_type": "gpt_neox", **NEOX}, "gpt_neox.layers", "lm_head"),
    "phi": ({"model_type": "phi", **TINY}, "model.layers", "lm_head"),
    "opt": ({"model_type": "opt", **OPT}, "model.decoder.layers", "lm_head"),
    # These change the logits after the head, so their plan has no head and the loss is not computed in chunks.
    "gemma2": ({"model_type": "gemma2", "head_dim": 8, **TINY}, "model.layers", None),
    "cohere": ({"model_type": "cohere", **TINY}, "model.layers", None),
    "granite": ({"model_type": "granite", **TINY}, "model.layers", None),
}


def make_recipe(
    config: dict[str, Any] | None = None, dataset: dict[str, Any] | None = None, **model: Any
) -> CausalLMRecipe:
    section = {"config": config, **model} if config is not None else model
    return CausalLMRecipe(CausalLMRecipe.Config.model_validate({"model": section, "dataset": dataset or {}}))


def start(recipe: CausalLMRecipe, seed: int = 0) -> Any:
    model, weights = build(recipe.build_model, recipe.weights(), seed)
    assert weights.kind == recipe.weights().kind, weights.reason
    materialise(model, CPU, seed, weights)
    return model.eval()


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def text(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "book.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    files = str(tmp_path / "book.txt")
    return {"name": "text", "files": files, "seq_length": 32, "cache_dir": str(tmp_path / "cache")}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns folders that transformers saved: one file, several files, bf16, tied weights, one without its head."""
    root = tmp_path_factory.mktemp("saved")
    torch.manual_seed(1)
    plain = transformers.AutoModelForCausalLM.from_config(make_recipe(LLAMA).transformers_config)
    tied_config = make_recipe({**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True}).transformers_config
    tied = transformers.AutoModelForCausalLM.from_config(tied_config)
    plain.save_pretrained(root / "one")
    plain.save_pretrained(root / "several", max_shard_size="20KB")
    plain.to(torch.bfloat16).save_pretrained(root / "bf16")
    tied.save_pretrained(root / "tied")
    plain.model.save_pretrained(root / "base")
    return {path.name: path for path in root.iterdir()}


def train_tiny(tmp_path: Path, model: dict[str, Any], dataset: dict[str, Any], **training: Any) -> Any:
    tree = {
        "recipe": "causal_lm",
        "model": model,
        "dataset": dataset,
        "training": {"max_steps": 30, "batch_size": 8, "learning_rate": 5e-3, "eval_batches": 1, **training},
        "experiment": {"output_dir": str(tmp_path / "out")},
        "logging": {"every": 1, "console": "plain", "tensorboard": False},
    }
    return train(check_run(tree))


def losses(tmp_path: Path) -> list[float]:
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


def test_training_from_scratch(
    tmp_path: Path, text: dict[str, Any], capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    outcome = train_tiny(tmp_path, {"config": LLAMA}, text, lr_scheduler={"name": "cosine", "min_ratio": 0.1})
    first, *_, last = losses(tmp_path)
    assert first == pytest.approx(math.log(256), abs=0.15)
    assert last < 2.5
    assert "the" in outcome.preview
    assert "[transformers]" not in "".join(capfd.readouterr())
    assert not [w for w in recwarn if "transformers" in w.filename]


def test_training_starts_from_a_folder(tmp_path: Path, text: dict[str, Any], saved: dict[str, Path]) -> None:
    dataset = {**text, "tokenizer": "bytes", "eval_fraction": 0}
    train_tiny(tmp_path, {"name": str(saved["several"])}, dataset, max_steps=1, learning_rate=1e-6)
    (file,) = (tmp_path / "out" / "checkpoints").glob("step_*/model.safetensors")
    start, end = load_file(saved["one"] / "model.safetensors"), load_file(file)
    assert start.keys() == end.keys()
    for name in start:
        assert 0 < (start[name] - end[name]).abs().max() < 2e-6, name


@pytest.mark.parametrize("kind", ["one", "several", "tied", "bf16"])
def test_weights_from_a_folder_are_those_transformers_loads(kind: str, saved: dict[str, Path]) -> None:
    ours = start(make_recipe(name=str(saved[kind]), dataset={"tokenizer": "bytes"}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(saved[kind], dtype=torch.float32)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert len(list(saved["several"].glob("*.safetensors"))) > 2
    assert (ours.lm_head.weight is ours.get_input_embeddings().weight) == (kind == "tied")
    with torch.no_grad():
        assert torch.equal(ours(tokens(2, 16)).logits, theirs(tokens(2, 16)).logits)


MIXTURES = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 3, **TINY},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 12, "moe_intermediate_size": 16, **TINY},
}


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns folders of mixtures of experts: transformers saves experts one by one, and joins them while it loads."""
    root = tmp_path_factory.mktemp("mixtures")
    torch.manual_seed(2)
    for kind, config in MIXTURES.items():
        model = transformers.AutoModelForCausalLM.from_config(make_recipe(config).transformers_config)
        model.save_pretrained(root / kind, max_shard_size="50KB")
        model.save_pretrained(root / f"{kind}_own", save_original_format=False)
    return {path.name: path for path in root.iterdir()}


def open_folder(layout: str, folder: Path) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the weights and the logits of the model in a folder, opened by a strategy."""
    recipe = make_recipe(name=str(folder), dataset={"tokenizer": "bytes"})
    with {"single": SingleStrategy, "fsdp": FSDPStrategy}[layout](device="cpu") as strategy:
        model, weights = build(recipe.build_model, recipe.weights(), 0)
        plan = recipe.parallel_plan(model)
        model, optimizer = strategy.prepare(model, lambda m: torch.optim.SGD(m.parameters()), plan, weights)
        assert layout == "single" or all(isinstance(p, DTensor) for p in model.parameters())
        state = strategy.state(model, optimizer).model
        whole = {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in state.items()}
        with torch.no_grad():
            return whole, model.eval()(tokens(2, 16)).logits


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_stored_one_by_one_open_on_every_layout(kind: str, mixtures: dict[str, Path], pool2: Pool) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(mixtures[kind], dtype=torch.float32)
    expected = theirs.state_dict()
    stored = {name for path in mixtures[kind].glob("*.safetensors") for name in load_file(path)}
    assert any(".experts.0." in name for name in stored)
    assert not any(".experts.0." in name for name in expected)
    with torch.no_grad():
        logits = theirs(tokens(2, 16)).logits
    for weights, ours in (
        open_folder("single", mixtures[kind]),
        open_folder("single", mixtures[f"{kind}_own"]),
        *pool2.run(open_folder, "fsdp", mixtures[kind], init=False),
    ):
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
        assert torch.equal(ours, logits)


def test_an_exported_mixture_has_the_stored_form(
    tmp_path: Path, text: dict[str, Any], mixtures: dict[str, Path]
) -> None:
    """Both transformers and shoal open the exported folder, with the trained weights."""
    dataset = {**text, "tokenizer": "bytes", "eval_fraction": 0}
    trained = train_tiny(tmp_path, {"name": str(mixtures["mixtral"])}, dataset, max_steps=1).model.state_dict()
    (step_dir,) = (tmp_path / "out" / "checkpoints").glob("step_*")
    export(step_dir, tmp_path / "hf", "hf")
    stored = load_file(tmp_path / "hf" / "model.safetensors").keys()
    assert stored == {name for path in mixtures["mixtral"].glob("*.safetensors") for name in load_file(path)}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).state_dict()
    ours = start(make_recipe(name=str(tmp_path / "hf"), dataset={"tokenizer": "bytes"})).state_dict()
    assert trained.keys() == theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], t) and torch.equal(ours[name], t) for name, t in trained.items())


def test_a_damaged_mixture_is_refused(tmp_path: Path, mixtures: dict[str, Path]) -> None:
    def damaged(name: str, **changes: Tensor | None) -> CausalLMRecipe:
        shutil.copytree(mixtures["mixtral"], tmp_path / name)
        for path in (tmp_path / name).glob("*.safetensors"):
            stored = {key: t for key, t in load_file(path).items() if key not in changes}
            save_file(stored | {key: t for key, t in changes.items() if t is not None}, path)
        return make_recipe(name=str(tmp_path / name), dataset={"tokenizer": "bytes"})

    expert = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    fewer = damaged("fewer", **{expert: None})
    assert_refused(r"layers.1.mlp.experts.down_proj has shape \[2, 32, 48\], but \[3, ", lambda: start(fewer))
    larger = damaged("larger", **{expert: torch.zeros(33, 48)})
    assert_refused(
        "model.name.*layers.1.mlp.experts.down_proj cannot be made from .*experts.0.w2.weight", larger.weights
    )


@pytest.mark.parametrize("kind", KINDS)
def test_first_weights_are_distributed_as_in_transformers(kind: str) -> None:
    """Checks that a start by name repeats, and has the same distributions as the constructors of transformers."""
    recipe = make_recipe(KINDS[kind][0])
    ours, again, other = start(recipe), start(recipe), start(recipe, seed=1)
    torch.manual_seed(3)
    theirs = recipe.build_model()
    for (name, a), b in zip(ours.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    drawn = 0
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (a.std() == 0) == (b.std() == 0), name
        assert a.mean() == b.mean() if a.std() == 0 else a.std().item() == pytest.approx(b.std().item(), rel=0.15), name
        drawn += not torch.equal(a, other.get_parameter(name))
        assert (a.std() == 0) == torch.equal(a, other.get_parameter(name)), name
    assert drawn > 10
    for (name, a), b in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        assert torch.equal(a, b), name


def test_first_weights_depend_only_on_names() -> None:
    """Checks that a layer of a deeper model starts with the same weights. GPT-2 scales some of them by its depth."""
    for config, depth, layer in ((LLAMA, "num_hidden_layers", "model.layers.1"), (GPT2, "n_layer", "transformer.h.1")):
        small, deep = start(make_recipe(config)), start(make_recipe({**config, depth: 5}))
        for name, parameter in small.get_submodule(layer).named_parameters():
            scale = math.sqrt(3 / 5) if name.endswith("c_proj.weight") else 1
            assert torch.allclose(parameter * scale, deep.get_submodule(layer).get_parameter(name)), name
    attention = start(make_recipe(GPT2)).transformer.h[0].attn
    assert attention.c_proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(6), rel=0.1)
    assert attention.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_a_model_of_eight_billion_parameters_is_built_without_memory() -> None:
    recipe = make_recipe(
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        }
    )
    with parameters_on_meta():
        model = recipe.build_model()
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())


@pytest.mark.parametrize("kind", KINDS)
def test_plan_blocks_head_and_groups(kind: str) -> None:
    config, blocks, head = KINDS[kind]
    recipe = make_recipe(config)
    with parameters_on_meta():
        model: Any = recipe.build_model()
    plan = recipe.parallel_plan(model)
    assert plan.blocks == tuple(f"{blocks}.{i}" for i in range(3))
    assert plan.head == head
    if head:
        assert model.get_submodule(head) is model.get_output_embeddings()
    decayed, flat = recipe.param_groups(model)
    embeddings = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    assert {id(p) for p in flat["params"]} == {
        id(p) for p in model.parameters() if p.ndim < 2 or contains(embeddings, p)
    }
    assert flat["weight_decay"] == 0
    assert len(decayed["params"]) + len(flat["params"]) == len(list(model.parameters()))
    assert contains(flat["params"], model.get_output_embeddings().weight) == model.config.tie_word_embeddings


def contains(parameters: list[Any], parameter: Any) -> bool:
    return any(parameter is other for other in parameters)


def test_vocabulary_and_special_tokens_are_those_of_the_tokenizer() -> None:
    """Checks OPT, whose padding token is 1 by default. In a vocabulary of bytes this is a token to be learnt."""
    config = make_recipe(KINDS["opt"][0]).transformers_config
    assert (config.vocab_size, config.pad_token_id, config.eos_token_id) == (256, None, 0)
    chosen = make_recipe({**LLAMA, "vocab_size": 300, "eos_token_id": 7}).transformers_config
    assert (chosen.vocab_size, chosen.eos_token_id) == (300, 7)


def test_a_preview_has_a_fixed_length_and_follows_the_generator(
    text: dict[str, Any],
) -> None:
    """Checks that an end-of-text token does not end a preview: ranks have to call a model equally often."""
    recipe = make_recipe({**LLAMA, "vocab_size": 300, "max_position_embeddings": 128}, dataset=text)
    recipe.prepare_data()
    model = start(recipe)
    with torch.no_grad():
        model.lm_head.weight[0] = 0
        model.lm_head.weight[256:] = 0
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    model.register_forward_hook(count)

    def preview(seed: int) -> str:
        torch.manual_seed(seed)
        return recipe.preview(model)

    first = preview(0)
    assert calls == 128 - 32
    assert first.startswith("the quick brown fox jumps over t")
    assert preview(0) == first != preview(1)


def start_and_preview_shards(section: dict[str, Any], dataset: dict[str, Any]) -> tuple[list[Tensor], str]:
    """Returns the weights and a preview of a model that is sharded over the ranks."""
    recipe = make_recipe(dataset=dataset, **section)
    model, weights = build(recipe.build_model, recipe.weights(), 0)
    mesh = init_device_mesh("cpu", (2,))
    for name in recipe.parallel_plan(model).blocks:
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    materialise(model, CPU, 0, weights)
    torch.manual_seed(0)
    preview = recipe.preview(model.eval())
    model.reshard()  # type: ignore[operator]
    return [parameter.full_tensor().detach() for parameter in model.parameters()], preview  # type: ignore[attr-defined]


def test_a_sharded_model_has_the_same_weights_and_preview(
    pool2: Pool, text: dict[str, Any], saved: dict[str, Path]
) -> None:
    dataset = {**text, "tokenizer": "bytes"}
    for section in ({"config": GPT2}, {"name": str(saved["several"])}):
        recipe = make_recipe(dataset=dataset, **section)
        recipe.prepare_data()
        whole = start(recipe)
        torch.manual_seed(0)
        preview = recipe.preview(whole)
        for weights, sample in pool2.run(start_and_preview_shards, section, dataset):
            assert sample == preview
            for a, b in zip(weights, whole.parameters(), strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("kind", [kind for kind, (_, _, head) in KINDS.items() if head])
def test_the_chunked_loss_is_the_loss(kind: str) -> None:
    recipe = make_recipe(KINDS[kind][0])
    model = start(recipe)
    batch = {"input_ids": tokens(2, 9), "labels": tokens(2, 9, seed=1)}
    whole = recipe.loss(model(**recipe.inputs(batch)), batch)
    head = ChunkedHead(model, recipe.parallel_plan(model), 4)
    with head.scoring(batch["labels"]):
        chunked = recipe.loss(model(**recipe.inputs(batch)), batch)
    assert head.num_scored == 1
    assert chunked.item() == pytest.approx(whole.item(), rel=1e-6)


def test_attention_can_be_chosen() -> None:
    eager, sdpa = (start(make_recipe(LLAMA, attn_implementation=kind)) for kind in ("eager", "sdpa"))
    assert (eager.config._attn_implementation, sdpa.config._attn_implementation) == ("eager", "sdpa")
    assert torch.allclose(eager(tokens(2, 9)).logits, sdpa(tokens(2, 9)).logits, atol=1e-6)


def test_the_default_tokenizer_is_that_of_the_weights() -> None:
    assert make_recipe(name="org/some-model").config.dataset.tokenizer == "org/some-model"
    assert make_recipe(name="org/some-model", dataset={"tokenizer": "bytes"}).config.dataset.tokenizer == "bytes"
    assert make_recipe(LLAMA).config.dataset.tokenizer == "bytes"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({}, "model.name and model.config: both are missing; give a name"),
        ({"name": "a", "config": LLAMA}, "model.name and model.config: both are given"),
        ({"config": {"hidden_size": 8}}, "model.config.model_type: missing; give a kind"),
        ({"config": {"model_type": "lama"}}, "model.config.model_type = 'lama': .*did you mean llama"),
        ({"config": {"model_type": "vit"}}, "'vit': transformers has no such causal language model"),
        ({"config": {**LLAMA, "hiden_size": 8}}, "model.config.hiden_size .*did you mean model.config.hidden_size"),
        ({"config": {**LLAMA, "n_layer": 8}}, "model.config.n_layer is not a key of a llama"),
        ({"config": {**LLAMA, "dtype": "bfloat16"}}, "model.config.dtype is not a key"),
        ({"config": {**LLAMA, "use_cache": False}}, "model.config.use_cache: no effect"),
        ({"config": {**LLAMA, "hidden_size": "8"}}, "model.config: Field 'hidden_size' expected int, got str"),
        ({"config": {**LLAMA, "hidden_size": 33}}, r"model.config: The hidden size \(33\) is not a multiple"),
        ({"config": LLAMA, "trust_remote_code": True}, "model.trust_remote_code = True: no effect with model.config"),
        ({"config": LLAMA, "revision": "main"}, "model.revision = 'main': no effect with model.config"),
        ({"config": LLAMA, "attn_implementation": "flash"}, "model.attn_implementation = 'flash'.*'eager' or 'sdpa'"),
        ({"nam": "a"}, "model.nam is not a key; did you mean model.name"),
    ],
)
def test_a_mistake_in_the_config_is_one_line(model: dict[str, Any], message: str) -> None:
    assert_refused(message, lambda: check_run({"recipe": "causal_lm", "model": model, "training": {"max_steps": 1}}))


def assert_refused(message: str, action: Any) -> None:
    with pytest.raises(UserError) as caught:
        action()
    assert "\n" not in str(caught.value)
    assert re.search(message, str(caught.value)), caught.value


def test_the_configs_and_the_examples_in_the_docs_are_valid(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    examples = re.findall(r"^```yaml\n(recipe: causal_lm.*?)^```", (root / "docs/recipes.md").read_text(), re.M | re.S)
    assert len(examples) == 2
    for number, example in enumerate(examples):
        (tmp_path / f"{number}.yaml").write_text(example)
    for path in (*sorted(tmp_path.glob("*.yaml")), root / "configs/llama_stdlib.yaml"):
        loaded = load_run(path)
        resolved = tmp_path / f"resolved_{path.name}"
        resolved.write_text(loaded.to_yaml())
        assert load_run(resolved).recipe_config == loaded.recipe_config


def test_settings_that_do_not_fit_together_are_refused(text: dict[str, Any], saved: dict[str, Path]) -> None:
    assert_refused(
        "model.config.vocab_size = 100, but dataset.tokenizer = 'bytes' has 256 tokens",
        make_recipe({**LLAMA, "vocab_size": 100}, dataset=text).prepare_data,
    )
    long = make_recipe(LLAMA, dataset={**text, "seq_length": 65})
    for call in (long.prepare_data, lambda: long.view_data(1)):
        assert_refused("dataset.seq_length = 65: the model has max_position_embeddings = 64", call)
    assert_refused(
        "model.revision = 'main': no effect with the folder",
        lambda: make_recipe(name=str(saved["one"]), revision="main"),
    )
    assert_refused("is_decoder", make_recipe({"model_type": "bert", **NEOX}).build_model)


def test_unusable_folders_are_refused(tmp_path: Path, text: dict[str, Any], saved: dict[str, Path]) -> None:
    def folder(name: str, *drop: str, **write: Any) -> CausalLMRecipe:
        shutil.copytree(saved["several"], tmp_path / name)
        for pattern in drop:
            for path in (tmp_path / name).glob(pattern):
                path.unlink()
        for stem, content in write.items():
            (tmp_path / name / stem.replace("__", ".")).write_text(content)
        return make_recipe(name=str(tmp_path / name), dataset={**text, "tokenizer": "bytes"})

    assert_refused(
        "only pickles", folder("pickles", "*.safetensors", "*.index.json", pytorch_model__bin="").prepare_data
    )
    assert_refused("has no weights", folder("empty", "*.safetensors", "*.index.json").prepare_data)
    assert_refused("names 'model-00001-of-.*', which is not in", folder("gone", "model-00001*").prepare_data)
    assert_refused("model.name = .*: it cannot be loaded: .*config", folder("blank", "config.json").prepare_data)
    config = json.loads((saved["one"] / "config.json").read_text())
    quantised = json.dumps({**config, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    assert_refused("are quantised .gptq.", folder("quantised", config__json=quantised).prepare_data)
    small = json.dumps({**config, "vocab_size": 100})
    assert_refused("the vocabulary of model.name '.*' = 100", folder("small", config__json=small).prepare_data)
    escaping = json.dumps({"weight_map": {"a": "../several/model.safetensors"}})
    assert_refused("which is not in", folder("escaping", **{"model__safetensors__index__json": escaping}).prepare_data)
    base = make_recipe(name=str(saved["base"]), dataset={**text, "tokenizer": "bytes"})
    assert_refused("model.name = .*: its files have no tensor 'lm_head.weight'.*save_pretrained", base.weights)
    damaged = folder("damaged")
    for path in (tmp_path / "damaged").glob("*.safetensors"):
        path.write_bytes(b"x" * 50)
    assert_refused("cannot be read as safetensors", damaged.weights)
    for path, near in (("a/deep/path", ""), (str(tmp_path / "damagd"), r" \(did you mean .*damaged\?\)")):
        recipe = make_recipe(name=path, dataset={**text, "tokenizer": "bytes"})
        assert_refused(f"model.name = '{path}': there is no such file or folder{near}; corr", recipe.prepare_data)


def test_an_unreachable_hub_is_reported(text: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # put back afterwards
    monkeypatch.setattr("shoal.data.hub._hub_answers", lambda url: False)
    recipe = make_recipe(name="nobody/nothing", dataset={**text, "tokenizer": "bytes"})
    assert_refused(
        "model.name = 'nobody/nothing': no such folder is here, and the Hugging Face Hub cannot be reached; run "
        "`hf download nobody/nothing --local-dir FOLDER` on a machine that reaches it, copy the folder, and give its ",
        recipe.prepare_data,
    )


REMOTE_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path("{mark}").touch()


class Mine(LlamaConfig):
    model_type = "mine"


class MineLM(LlamaForCausalLM):
    config_class = Mine
"""


def test_code_beside_weights_runs_only_if_trusted(
    tmp_path: Path, text: dict[str, Any], saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(saved["one"], tmp_path / "code")
    config = json.loads((saved["one"] / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.MineLM"}}
    (tmp_path / "code" / "config.json").write_text(json.dumps(config))
    (tmp_path / "code" / "mine.py").write_text(REMOTE_CODE.format(mark=tmp_path / "ran"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    dataset = {**text, "tokenizer": "bytes"}
    assert_refused(
        "model.trust_remote_code: true", make_recipe(name=str(tmp_path / "code"), dataset=dataset).prepare_data
    )
    assert not (tmp_path / "ran").exists()
    trusted = make_recipe(name=str(tmp_path / "code"), dataset=dataset, trust_remote_code=True)
    trusted.prepare_data()
    assert type(start(trusted)).__name__ == "MineLM"
    assert (tmp_path / "ran").exists()
