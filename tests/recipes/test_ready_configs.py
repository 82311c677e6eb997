"""The ready configs for fine-tuning: they fit the published models and the GPUs that they name, and they train."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import call_shoal
from pool import Pool
from recipes.memory_arithmetic import (
    CONFIGS,
    GIB,
    METHODS,
    MODELS,
    PUBLISHED,
    build,
    card_gb,
    load_ready,
    memory_of,
    model_of,
    table_row,
)

from shoal.config.shipped import shipped_configs
from shoal.training import train

sys.path.append(str(Path(__file__).parents[1] / "data"))
from chat_tokenizers import save_tokenizer, write_lines

transformers = pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes")

TOKENIZERS = {"gemma2_9b": "gemma", "llama31_8b": "llama31", "mistral_7b": "mistral", "qwen3_8b": "qwen3"}
PARAMETERS = {"gemma2_9b": 9_241_705_984, "llama31_8b": 8_030_261_248, "mistral_7b": 7_248_023_552}
PARAMETERS |= {"qwen3_8b": 8_190_735_360}
"""The numbers of parameters that the models are published with."""
NARROW = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
CHEAP = ["llama31_8b_qlora"]


def only_some(cheap: list[str]) -> list[Any]:
    """Returns all ready configs; all but the cheap ones are for the slow tier."""
    return [pytest.param(name, marks=() if name in cheap else pytest.mark.slow) for name in CONFIGS]


def test_there_is_a_config_for_every_model_and_method() -> None:
    assert {*CONFIGS} <= shipped_configs().keys()
    assert {*TOKENIZERS} == {*PARAMETERS} == {*MODELS}
    assert METHODS == ("lora", "qlora", "qlora_fsdp", "full")


@pytest.mark.parametrize("config", only_some(CHEAP))
def test_the_published_model_fits_the_gpu(config: str) -> None:
    """By arithmetic. Also compares the model that is built on meta with the published number of parameters."""
    run = load_ready(config)
    model = build(run)
    adapters = [name for name, _ in model.named_parameters() if ".lora_" in name]
    assert bool(adapters) == (not config.endswith("full"))
    sizes = [getattr(p, "logical_numel", p.numel()) for name, p in model.named_parameters() if ".lora_" not in name]
    assert sum(sizes) == PARAMETERS[model_of(config)]
    assert memory_of(run, model).total / GIB < 0.95 * card_gb(config)
    page = (Path(__file__).parents[2] / "docs" / "finetune.md").read_text()
    assert table_row(config, run, model) in page, "run python tests/test_docs.py --write"


@pytest.mark.slow
def test_sizes_on_meta_are_those_of_a_real_model(tmp_path: Path) -> None:
    """The bytes of frozen weights that the arithmetic adds up, compared with those of a model that was read."""
    from recipes.test_causal_lm import start

    base = save_cut(tmp_path, "llama31_8b")
    for method in ("lora", "qlora"):
        run = load_ready(f"llama31_8b_{method}", base, f"dataset.cache_dir={tmp_path}/cache")
        model = start(run.make_recipe())
        real = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
        assert real == memory_of(run, build(run)).frozen


def save_cut(folder: Path, model: str) -> Path:
    """Saves a published model with two narrow layers and random weights, and a small tokenizer with its template."""
    base = Path(save_tokenizer(folder, TOKENIZERS[model]))
    published = json.loads((PUBLISHED / model / "config.json").read_text())
    vocabulary = len(transformers.AutoTokenizer.from_pretrained(base))
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    cut = {**published, **NARROW, **tokens, "num_hidden_layers": 2, "vocab_size": vocabulary}
    config = transformers.AutoConfig.for_model(**cut)
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(base)
    return base


def train_cut(config: str, base: Path, folder: Path, overrides: list[str]) -> dict[str, float]:
    smaller = ["dataset.max_seq_length=128", "training.max_steps=1", "training.num_epochs=null", "training.device=cpu"]
    smaller += ["training.global_batch_size=4", "dataset.eval_fraction=0.2", f"dataset.cache_dir={folder}/cache"]
    smaller += [f"dataset.train_file={folder}/train.jsonl", f"experiment.output_dir={folder}/{config}"]
    return train(load_ready(config, base, *smaller, "logging.console=off", *overrides)).metrics


@pytest.mark.parametrize("config", only_some(CHEAP))
def test_a_cut_of_the_model_trains_a_step(config: str, tmp_path: Path, pool2: Pool) -> None:
    base = save_cut(tmp_path, model_of(config))
    write_lines(tmp_path / "train.jsonl", [{"instruction": f"Say {i}", "output": f"It is {i}."} for i in range(24)])
    if not config.endswith(("_fsdp", "_full")):
        losses = [train_cut(config, base, tmp_path, [])["train/loss"]]
    else:
        ranks = pool2.run(train_cut, config, base, tmp_path, ["launch.procs_per_node=2"], init=False)
        losses = [metrics["train/loss"] for metrics in ranks]
    assert all(4 < loss < 8 for loss in losses), losses  # about log(340): random weights
    report = (tmp_path / config / "report.txt").read_text()
    assert ("nf4 with quantised scales" in report) == ("qlora" in config)


KINDS = {"cp", "data", "train", "chat", "ls", "export"}
"""The commands that the guide has to show."""
GUIDE = Path(__file__).parents[2] / "docs" / "finetune_24gb.md"


@pytest.mark.parametrize("last", ["data", pytest.param("export", marks=pytest.mark.slow)])
def test_the_commands_of_the_guide_run(last: str, tmp_path: Path) -> None:
    """With a cut of the model, on the CPU, up to the last command of a kind."""
    base = save_cut(tmp_path, "qwen3_8b")
    write_lines(tmp_path / "train.jsonl", [{"prompt": f"Say {i}", "completion": f"It is {i}."} for i in range(150)])
    blocks = re.findall(r"^```bash\n(.*?)^```", GUIDE.read_text(), re.M | re.S)
    commands = [line for block in blocks for line in block.splitlines() if line.startswith("shoal ")]
    kinds = [next(word for word in reversed(line.split()[:3]) if word in KINDS) for line in commands]
    assert {*kinds} == KINDS
    smaller = [f"model.name={base}", f"dataset.cache_dir={tmp_path}/cache", "dataset.max_seq_length=128"]
    for line in commands[: len(kinds) - kinds[::-1].index(last)]:
        words = shlex.split(line)[1:]
        if words[0] in ("data", "train"):
            words += [*smaller, "training.device=cpu"]
        if words[0] == "chat":
            words = [*words[:2], "--device", "cpu", "--prompt", "Say 1", "--max-new-tokens", "4"]
        if "export" in words:
            (step,) = (tmp_path / "runs" / "qwen3_8b_qlora" / "checkpoints").glob("step_*")
            words[2] = re.sub(r"step_\d+", step.name, words[2])
        result = call_shoal(tmp_path, *words)
        assert result.returncode == 0, f"{line}: {result.stderr}"
    if last == "export":
        assert {"adapter_config.json", "tokenizer.json"} <= {path.name for path in (tmp_path / "my_adapter").iterdir()}
        assert (tmp_path / "my_model" / "config.json").exists()
