"""Files of other projects become configs of shoal: every key is translated or named, and the result is valid.

The files in `files/` were written for these tests; `keys.yaml` has the keys of public example files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import call_shoal
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.config import load_run
from shoal.config.foreign.project import Translation, leaves, resolve_references, translate_project
from shoal.config.foreign.projects import PROJECTS, find_project
from shoal.config.foreign.recognise import SIGNS
from shoal.config.foreign.render import render
from shoal.config.yaml import flatten, read_yaml
from shoal.errors import UserError

FILES = Path(__file__).parent / "files"
NAMES = sorted(path.name for path in FILES.glob("*.yaml"))
KEYS: dict[str, list[str]] = yaml.safe_load((FILES.parent / "keys.yaml").read_text())


def project_of(name: str) -> str:
    return next(project for project in PROJECTS if name.startswith(project))


def translation_of(name: str, *overrides: str) -> Translation:
    tree, sources = read_yaml(FILES / name)
    return translate_project(tree, sources, find_project(tree, name), overrides)


def ours(name: str, *overrides: str) -> dict[str, Any]:
    return flatten(translation_of(name, *overrides).tree)


@pytest.mark.parametrize("name", NAMES)
def test_the_printed_config_is_valid_and_says_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(FILES)  # the paths of DeepSpeed's files are relative
    printed = call_shoal(FILES, "translate", name)
    assert printed.returncode == 0, printed.stderr
    (tmp_path / "run.yaml").write_text(printed.stdout)
    checked = call_shoal(FILES, "config", str(tmp_path / "run.yaml"))
    assert checked.returncode == 0, checked.stderr
    assert read_yaml(tmp_path / "run.yaml")[0] == translation_of(name).tree
    assert printed.stderr.count("\n") == (1 if "PLACEHOLDER" in printed.stdout else 0)


EXPECTED: dict[str, dict[str, Any]] = {
    "accelerate_fsdp.yaml": {
        "distributed.strategy": "fsdp",
        "distributed.fsdp.sharding_strategy": "SHARD_GRAD_OP",
        "distributed.fsdp.wrap_classes": ["MyBlock", "OtherBlock"],
        "distributed.fsdp.cpu_offload": True,
        "training.activation_checkpointing": "full",
        "launch.nodes": 2,
        "launch.procs_per_node": 3,
        "launch.node_rank": 1,
        "launch.master_addr": "10.0.0.7",
        "launch.env.CUDA_VISIBLE_DEVICES": "0,1,2",
    },
    "accelerate_mesh.yaml": {
        "distributed.strategy": "mesh",
        "distributed.mesh.dp_shard": 2,
        "distributed.mesh.cp": 2,
        "distributed.mesh.tp": 2,
        "training.mixed_precision": "fp32",
        "training.compile": True,
    },
    "accelerate_zero.yaml": {"distributed.deepspeed.config_file": "zero.json", "training.mixed_precision": "fp16"},
    "axolotl_lora.yaml": {
        "recipe": "text_lora",
        "model.load_in_8bit": True,
        "model.dtype": "bf16",
        "lora.r": 4,
        "lora.target_modules": "all-linear",
        "dataset.train_file": ["my-org/questions", {"file": "my-org/tasks", "split": "train[:10%]"}],
        "dataset.chat_template": "alpaca",
        "dataset.eval_fraction": 0.1,
        "dataset.too_long": "drop",
        "dataset.packing": True,
        "training.batch_size": 5,
        "training.gradient_accumulation": 3,
        "training.optimizer.name": "adamw_8bit",
        "training.optimizer.betas": [0.9, 0.999],
        "training.weight_decay": 0.02,
        "training.eval_epochs": 1,
        "checkpoint.every": None,
        "checkpoint.every_epochs": 1,
        "logging.wandb.project": "mine",
        "experiment.seed": 42,
    },
    "axolotl_full.yaml": {
        "training.max_steps": 50,
        "training.loss_chunks": 8,
        "training.weight_decay": 0.0,
        "training.lr_scheduler": "linear",
        "dataset.format": "auto",
        "dataset.chat_template": "llama3",
        "distributed.strategy": "fsdp",
        "distributed.fsdp.wrap_classes": ["MyBlock"],
    },
    "axolotl_pretrain.yaml": {
        "dataset.format": "text",
        "dataset.too_long": "split",
        "dataset.train_file": [{"file": "my-org/texts", "config": "en"}],
        "distributed.strategy": "mesh",
        "distributed.mesh.dp_replicate": 2,
        "launch.procs_per_node": 4,
        "training.optimizer.betas": [0.9, 0.999],
    },
    "axolotl_qlora.yaml": {
        "model.bnb_4bit_use_double_quant": True,
        "lora.target_modules": ["q_proj", "v_proj"],
        "checkpoint.init_from": "adapter",
        "distributed.strategy": "deepspeed",
        "training.activation_checkpointing.offload": True,
    },
    "llama_factory_lora.yaml": {
        "model.load_in_4bit": True,
        "model.bnb_4bit_use_double_quant": False,
        "lora.r": 6,
        "lora.lora_alpha": 12,
        "lora.target_modules": "all-linear",
        "lora.lora_plus_ratio": 8.0,
        "dataset.train_file": ["my_data/first.json", "my_data/second.json"],
        "dataset.max_seq_length": 777,
        "training.num_epochs": 2,
        "training.weight_decay": 0.0,
        "training.activation_checkpointing": "full",
        "experiment.name": "mine",
        "launch.target": "ray",
        "launch.procs_per_node": 2,
        "distributed.timeout": 3600,
    },
    "llama_factory_full.yaml": {
        "dataset.format": "text",
        "dataset.packing": True,
        "training.mixed_precision": "fp8",
        "training.num_epochs": 3,
        "training.lr_scheduler": "linear",
        "distributed.fsdp.sharding_strategy": "FULL_SHARD",
    },
    "torchtune_lora.yaml": {
        "model.name": "weights",
        "model.load_in_4bit": True,
        "model.dtype": "bf16",
        "lora.target_modules": ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "dataset.train_file": [{"file": "yahma/alpaca-cleaned", "split": "train[:90%]"}],
        "dataset.eval_file": [{"file": "yahma/alpaca-cleaned", "split": "train[90%:]"}],
        "dataset.loss_on": "all",
        "training.max_steps": 80,
        "training.eval_batch_size": 6,
        "training.loss_chunks": 8,
        "training.warmup_steps": 12,
        "training.max_grad_norm": 2.0,
        "training.optimizer.betas": [0.9, 0.999],
        "logging.profile.start": 6,
        "logging.profile.steps": 4,
    },
    "torchtune_full.yaml": {
        "dataset.train_file": "mine.json",
        "dataset.format": "sharegpt",
        "dataset.max_seq_length": 999,
        "training.optimizer": "paged_adamw_32bit",
        "training.weight_decay": 0.01,
        "training.lr_scheduler": "constant",
        "training.max_grad_norm": None,
        "distributed.strategy": "fsdp",
        "distributed.fsdp.cpu_offload": True,
    },
    "lightning_ddp.yaml": {
        "experiment.seed": 11,
        "training.num_epochs": 7,
        "training.eval_epochs": 2,
        "training.eval_batches": 30,
        "training.batch_size": 12,
        "training.gradient_accumulation": 3,
        "training.optimizer.momentum": 0.9,
        "training.lr_scheduler": "cosine",
        "training.sync_batch_norm": True,
        "dataset.num_workers": 1,
        "distributed.ddp.find_unused_parameters": True,
        "checkpoint.metric": "eval/loss",
        "checkpoint.keep_best": 2,
        "callbacks": [
            {"name": "early_stopping", "metric": "eval/loss", "mode": "min", "patience": 4, "min_delta": 0.01}
        ],
    },
    "lightning_fsdp.yaml": {
        "launch.procs_per_node": 4,
        "distributed.fsdp.wrap_classes": ["Block"],
        "training.max_steps": 90,
        "training.max_grad_norm": None,
        "training.eval_epochs": 1,
        "logging.tensorboard": False,
    },
    "lightning_epochs.yaml": {"training.lr_scheduler": "constant", "training.weight_decay": 0.0},
    "lightning_plateau.yaml": {
        "training.learning_rate": 1e-3,
        "training.lr_scheduler.name": "plateau",
        "training.lr_scheduler.patience": 2,
    },
    "lightning_polynomial.yaml": {"training.lr_scheduler.power": 2.0, "training.optimizer.betas": [0.9, 0.999]},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_values_keep_their_meaning(name: str) -> None:
    found = ours(name)
    assert {key: found.get(key, "left out") for key in EXPECTED[name]} == EXPECTED[name]


@pytest.mark.parametrize("project", PROJECTS)
def test_at_least_four_fifths_of_the_keys_of_public_files_are_translated(project: str) -> None:
    """A key counts if it sets one of ours, or needs none because shoal does what its value asks for."""
    needed, without = set[str](), set[str]()
    for name in (name for name in NAMES if project_of(name) == project):
        translated = translation_of(name).translated
        needed |= {key for keys in translated.origins.values() for key in keys}
        needed |= {remark.key for remark in translated.idle}
        without |= {remark.key for remark in translated.refused}
        needed |= {*translation_of(name).unset}
    keys = {*KEYS[project]}
    assert keys <= needed | without, "the files have all keys of the list"
    assert len(keys & needed) >= 0.8 * len(keys), sorted(keys - needed)


def accounted(translation: Translation) -> set[str]:
    """Returns the foreign keys that a translation has something to say about."""
    translated = translation.translated
    names = {name for names in translated.origins.values() for name in names}
    for remark in (*translated.idle, *translated.refused):
        inside = leaves(remark.value) if isinstance(remark.value, dict) and remark.value else ()
        names |= {remark.key, *(f"{remark.key}.{key}" for key, _ in inside)}
    return names | {*translation.unset}


names_without_dots = st.text(st.characters(exclude_characters="."), max_size=4)  # dots separate the parts of a place
odd_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**9) | st.floats() | st.text(max_size=8) | st.just("${x}"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names_without_dots, inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_no_key_is_lost_whatever_its_value(data: st.DataObject) -> None:
    """Any value in any place is translated or named, or refused in one line."""
    name = data.draw(st.sampled_from(NAMES))
    tree, sources = read_yaml(FILES / name)
    project = PROJECTS[project_of(name)]
    for _ in range(data.draw(st.integers(1, 4))):
        places = [key for key, _ in leaves(tree)]
        *path, last = data.draw(st.sampled_from(places)).split(".")
        section = tree
        for part in path:
            section = section[part]
        value = data.draw(odd_values)
        section[data.draw(st.sampled_from([last, "something", "another"]))] = value
    try:
        translation = translate_project(tree, sources, project)
    except UserError as error:
        assert "\n" not in str(error)  # noqa: PT017, most values raise nothing
        return
    known = accounted(translation)
    for key, _ in leaves(project.prepare(resolve_references(tree))):
        parts = key.split(".")  # a section in the place of a value is passed on whole, and then refused by name
        assert any(".".join(parts[: end + 1]) in known for end in range(len(parts))), key
    text = render(translation, name, [])
    with contextlib.suppress(yaml.YAMLError):  # a text that YAML cannot hold is refused when the file is read
        assert isinstance(yaml.safe_load(text), dict)


def test_every_key_of_a_file_is_in_the_printed_config() -> None:
    for name in NAMES:
        tree, _ = read_yaml(FILES / name)
        text = render(translation_of(name), name, [])
        for key, _ in leaves(tree):
            assert key.rpartition(".")[2] in text, (name, key)


def test_each_line_names_the_foreign_key_and_differences_are_said() -> None:
    text = call_shoal(FILES, "translate", "axolotl_lora.yaml").stdout
    assert "  batch_size: 5 " in text
    assert text.split("  batch_size: 5 ")[1].splitlines()[0].strip() == "# micro_batch_size"
    assert "# axolotl evaluates 2 times in an epoch; here it is once." in text
    assert "too_long: drop                                  # axolotl's default of excess_length_strategy" in text
    assert "#   wandb_watch: gradients" in text
    assert "# Keys that are null or empty in the file: lora_model_dir, resume_from_checkpoint." in text


def test_the_command_line_wins_and_fills_in_what_is_missing(tmp_path: Path) -> None:
    found = ours("axolotl_lora.yaml", "training.max_steps=7", "training.optimizer=lion")
    assert (found["training.max_steps"], found["training.optimizer"]) == (7, "lion")
    assert "training.num_epochs" not in found
    remarks = {
        remark.key: remark.why for remark in translation_of("axolotl_lora.yaml", "training.max_steps=7").translated.idle
    }
    assert remarks["num_epochs"] == "the command line replaces training.num_epochs"
    printed = call_shoal(FILES, "translate", "accelerate_fsdp.yaml", "recipe=bdh", "training.num_epochs=2").stdout
    assert "PLACEHOLDER" not in printed
    assert "num_epochs: 2" in printed
    assert "# command line" in printed


def test_a_recipe_of_the_user_gets_the_arguments_of_a_module(tmp_path: Path) -> None:
    """Without a recipe they are comments, because the recipe has these keys."""
    assert "model.width" not in ours("lightning_ddp.yaml")
    found = ours("lightning_ddp.yaml", "recipe=mine:Recipe")
    assert (found["model.width"], found["dataset.root"], found["training.batch_size"]) == (8, "here", 12)


def one_line(folder: Path, *arguments: str) -> str:
    result = call_shoal(folder, *arguments)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1), result
    return result.stderr.strip().removeprefix("shoal: error: ")


WRONG: Mapping[str, tuple[str, str]] = {
    "a list": ("- 1", "f.yaml should hold `key: value` lines; found a list"),
    "unknown": (
        "a: 1",
        "f.yaml: not recognised as a file of accelerate, axolotl, llama_factory, torchtune, lightning; if it is one, "
        "say so with --from",
    ),
    "ours": ("recipe: bdh", "f.yaml: it has the key recipe, so it is a config of shoal; use it as it is"),
    "a guide": (
        "model: {name_or_path: x}\ntraining: {per_device_train_batch_size: 1}",
        "f.yaml: it is in Hugging Face's words, which shoal reads as they are; use it as it is",
    ),
    "two": (
        "trainer: {max_steps: 1}\ndistributed_type: NO",
        "f.yaml: it could be a file of accelerate or lightning; say which with --from",
    ),
    "preferences": (
        "model_name_or_path: x\nstage: dpo",
        "stage = 'dpo': shoal trains on texts and on prompts with answers, and not so",
    ),
    "a wrong type": (
        "base_model: x\ndatasets: [{path: d, type: alpaca}]\nlearning_rate: much",
        "training.learning_rate (f.yaml:3, written there as learning_rate) = 'much': should be a valid number",
    ),
    "an unknown value": (
        "distributed_type: SPIRAL",
        "distributed.strategy (f.yaml:1, written there as distributed_type) = 'SPIRAL': should be 'auto', 'single', "
        "'ddp', 'ddp_spawn', 'fsdp', 'deepspeed' or 'mesh'",
    ),
    "a contradiction": (
        "base_model: x\ndatasets: [{path: d, type: alpaca}]\nlearning_rate: 1\nbf16: true\nfp16: true",
        "bf16 (f.yaml:4) = True and fp16 (f.yaml:5) = True both set training.mixed_precision; leave one of them out",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_are_one_line(case: str, tmp_path: Path) -> None:
    text, message = WRONG[case]
    (tmp_path / "f.yaml").write_text(text)
    assert one_line(tmp_path, "translate", "f.yaml") == message


def test_more_mistakes_are_one_line(tmp_path: Path) -> None:
    assert one_line(tmp_path, "translate", "none.yaml").startswith("none.yaml cannot be read: no such file")
    (tmp_path / "f.yaml").write_text("a: 1")
    assert one_line(tmp_path, "translate", "f.yaml", "--from", "mine") == (
        "--from = 'mine': shoal translates files of accelerate, axolotl, llama_factory, torchtune, lightning; give "
        "one of these"
    )
    assert call_shoal(tmp_path, "translate", "f.yaml", "--from", "accelerate").returncode == 0


def test_commands_that_train_say_what_the_file_is(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("base_model: x\nmicro_batch_size: 1")
    message = "f.yaml: it is a file of axolotl, not of shoal; write it as one: shoal translate f.yaml > run.yaml"
    assert one_line(tmp_path, "config", "f.yaml") == message
    with pytest.raises(UserError, match="it is a file of axolotl"):
        load_run(tmp_path / "f.yaml")


def test_every_project_is_recognised_by_signs() -> None:
    assert [*SIGNS] == [*PROJECTS]
