"""Config files in Hugging Face's words are read as they are: every key is used, or refused by name."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import call_shoal

from shoal.config import Run, load_run
from shoal.config.foreign.guide import is_guide
from shoal.config.foreign.names import OPTIMIZERS, REFUSED_OPTIMIZERS, REFUSED_SCHEDULES, SCHEDULES
from shoal.config.foreign.words import WORDS
from shoal.config.from_python import run_from_python
from shoal.config.layout import check_layout
from shoal.config.schema_optimizers import Optimizer, Scheduler
from shoal.config.shipped import FOLDER
from shoal.config.validation import validate
from shoal.config.yaml import flatten, read_yaml
from shoal.errors import UserError

transformers = pytest.importorskip("transformers")

READY = FOLDER / "fsdp_qlora_llama7b.yaml"
GUIDE: dict[str, Any] = {
    "model": {"name_or_path": "some/model"},
    "training": {"num_train_epochs": 1, "per_device_train_batch_size": 2},
    "dataset": {"train_file": "a.jsonl"},
}


def guide(**sections: Any) -> dict[str, Any]:
    """Returns a small guide, with keys added to its sections."""
    tree = copy.deepcopy(GUIDE)
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section} if isinstance(section, dict) else section
    return tree


def load(folder: Path, tree: dict[str, Any], *overrides: str) -> Run:
    path = folder / "guide.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return load_run(path, overrides)


def refuse(folder: Path, tree: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(folder, tree, *overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def training(folder: Path, **words: Any) -> dict[str, Any]:
    return flatten(load(folder, guide(training=words)).tree()["training"])


# The ready file: for every key another value, and the keys of ours that change with it.
CHANGES: dict[str, tuple[Any, set[str] | str]] = {
    "model.name": ("other/model", {"model.name", "dataset.tokenizer"}),
    "model.load_in_4bit": (False, {"model.load_in_4bit"}),
    "model.bnb_4bit_quant_type": ("fp4", {"model.bnb_4bit_quant_type"}),
    "model.bnb_4bit_use_double_quant": (False, {"model.bnb_4bit_use_double_quant"}),
    "model.bnb_4bit_compute_dtype": ("float32", {"model.bnb_4bit_compute_dtype"}),
    "lora.r": (8, {"lora.r"}),
    "lora.lora_alpha": (32, {"lora.lora_alpha"}),
    "lora.lora_dropout": (0.1, {"lora.lora_dropout"}),
    "lora.target_modules": (["q_proj"], {"lora.target_modules"}),
    "lora.bias": ("all", {"lora.bias"}),
    "lora.task_type": ("SEQ_CLS", "lora.task_type"),
    "fsdp.enabled": (
        False,
        {
            "distributed.strategy",
            "distributed.fsdp.auto_wrap_policy",
            "distributed.fsdp.forward_prefetch",
            "training.activation_checkpointing.mode",
        },
    ),
    "fsdp.sharding_strategy": ("SHARD_GRAD_OP", {"distributed.fsdp.sharding_strategy"}),
    "fsdp.cpu_offload": (True, {"distributed.fsdp.cpu_offload"}),
    "fsdp.mixed_precision": ("fp16", "fsdp.mixed_precision"),
    "fsdp.auto_wrap_policy": ("size_based", {"distributed.fsdp.auto_wrap_policy"}),
    "fsdp.backward_prefetch": ("BACKWARD_POST", "fsdp.backward_prefetch"),
    "fsdp.forward_prefetch": (False, {"distributed.fsdp.forward_prefetch"}),
    "fsdp.limit_all_gathers": (False, "fsdp.limit_all_gathers"),
    "fsdp.activation_checkpointing": (False, {"training.activation_checkpointing.mode"}),
    "training.run_name": ("other", {"experiment.name"}),
    "training.output_dir": ("elsewhere", {"experiment.output_dir"}),
    "training.num_train_epochs": (2, {"training.num_epochs"}),
    "training.per_device_train_batch_size": (2, {"training.batch_size"}),
    "training.per_device_eval_batch_size": (2, {"training.eval_batch_size"}),
    "training.gradient_accumulation_steps": (2, {"training.gradient_accumulation"}),
    "training.learning_rate": (1e-4, {"training.learning_rate"}),
    "training.lr_scheduler_type": ("linear", {"training.lr_scheduler.name"}),
    "training.warmup_ratio": (0.1, {"training.warmup_ratio"}),
    "training.weight_decay": (0.0, {"training.weight_decay"}),
    "training.optim": ("adamw_torch", {"training.optimizer.name"}),
    "training.logging_steps": (5, {"logging.every"}),
    "training.save_steps": (50, {"checkpoint.every"}),
    "training.eval_strategy": ("epoch", {"training.eval_epochs", "training.eval_steps"}),
    "training.eval_steps": (50, {"training.eval_steps"}),
    "training.save_total_limit": (1, {"checkpoint.keep_last"}),
    "training.bf16": (False, "training.bf16"),
    "training.tf32": (False, {"training.tf32"}),
    "training.max_grad_norm": (0, {"training.max_grad_norm"}),
    "training.load_best_model_at_end": (False, {"checkpoint.load_best_model_at_end", "checkpoint.keep_best"}),
    "training.metric_for_best_model": ("accuracy", {"checkpoint.metric", "checkpoint.mode"}),
    "dataset.train_file": ("b.jsonl", {"dataset.train_file"}),
    "dataset.eval_file": ("c.jsonl", {"dataset.eval_file"}),
    "dataset.max_seq_length": (512, {"dataset.max_seq_length"}),
    "dataset.preprocessing_num_workers": (2, {"dataset.preprocessing_num_workers"}),
    "hardware.num_gpus": (2, {"launch.procs_per_node"}),
    "hardware.num_nodes": (2, {"launch.nodes"}),
    "hardware.master_addr": ("node0", {"launch.master_addr"}),
    "hardware.master_port": (29600, {"launch.master_port"}),
}


def test_the_ready_file_resolves_as_it_is() -> None:
    run = load_run(READY)
    layout = check_layout(run.config, run.make_recipe(), run.config.launch.processes, 4)
    assert (layout.strategy, layout.engine, layout.mesh["dp_shard"]) == ("fsdp", "fully_shard", 4)
    assert (layout.precision, layout.tf32, layout.activation_checkpointing.mode) == ("bf16", True, "full")
    assert run.config.recipe == "text_lora"
    assert run.config.training.optimizer.name == "paged_adamw_32bit"
    assert (run.recipe_config.lora.r, run.recipe_config.lora.lora_alpha) == (64, 16)
    assert not run.remarks


def test_every_key_of_the_ready_file_changes_the_run(tmp_path: Path) -> None:
    tree, _ = read_yaml(READY)
    assert {*CHANGES} == {*flatten(tree)}
    before = flatten(load(tmp_path, tree).tree())
    for key, (value, expected) in CHANGES.items():
        section, _, name = key.partition(".")
        assert tree[section][name] != value, key
        changed = {**tree, section: {**tree[section], name: value}}
        if isinstance(expected, str):  # refused, or said to have no effect
            try:
                said = load(tmp_path, changed).to_yaml().partition("# not in force: ")[2]
            except UserError as error:
                said = str(error)
            assert expected in said, key
        else:
            after = flatten(load(tmp_path, changed).tree())
            assert {one for one in before | after if before.get(one) != after.get(one)} == expected, key


def test_the_resolved_run_is_a_config_of_ours(tmp_path: Path) -> None:
    run = load_run(READY)
    (tmp_path / "resolved.yaml").write_text(run.to_yaml())
    assert not is_guide(read_yaml(tmp_path / "resolved.yaml")[0])
    assert load_run(tmp_path / "resolved.yaml").tree() == run.tree()


def test_it_may_be_extended(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"extends: {READY}\nmodel: {{name: mine}}\nhardware: {{num_gpus: 2}}\n")
    run = load_run(tmp_path / "mine.yaml", ["training.max_steps=5"])
    assert (run.recipe_config.model.name, run.config.launch.procs_per_node) == ("mine", 2)
    assert (run.config.training.max_steps, run.config.training.num_epochs) == (5, None)
    assert run.recipe_config.lora.r == 64


def test_python_takes_the_file_too(tmp_path: Path) -> None:
    run = run_from_python(READY, None, {"training.max_steps": 5}, "shoal.train")
    assert (run.config.recipe, run.config.training.max_steps, run.config.training.num_epochs) == ("text_lora", 5, None)


def test_a_base_of_ours_wins_over_their_defaults(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("recipe: causal_lm\ntraining: {weight_decay: 0.3, max_steps: 7}\n")
    text = "extends: base.yaml\nmodel: {name: x}\ndataset: {name: text, files: t}\nhardware: {num_gpus: 2}\n"
    (tmp_path / "mine.yaml").write_text(text)
    run = load_run(tmp_path / "mine.yaml")
    assert run.config.recipe == "causal_lm"
    assert (run.config.training.weight_decay, run.config.training.learning_rate) == (0.3, 5e-5)
    assert (run.config.training.max_steps, run.config.training.num_epochs) == (7, None)


# Which files they are


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.yaml")), ids=lambda path: path.stem)
def test_configs_of_ours_are_not_taken_for_theirs(path: Path) -> None:
    assert is_guide(read_yaml(path)[0]) == (path == READY)


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"training": {"per_device_train_batch_size": 2}}, True),
        ({"per_device_train_batch_size": 2}, True),
        ({"model": {"name_or_path": "x"}}, True),
        ({"hardware": {}, "recipe": "bdh"}, True),
        ({"recipe": "bdh", "training": {"per_device_train_batch_size": 2}}, False),
        ({"training": {"per_device_train_batch_size": 2}, "distributed": {}}, False),
        ({"training": {"max_steps": 2, "learning_rate": 1}}, False),
        ({"deepspeed": "ds.json"}, True),
        ({}, False),
    ],
)
def test_a_file_is_known_by_its_sections(tree: dict[str, Any], expected: bool) -> None:
    assert is_guide(tree) == expected


def test_words_may_stand_at_the_top(tmp_path: Path) -> None:
    flat = {"model_name_or_path": "x", "num_train_epochs": 2, "bf16": True, "dataset": {"train_file": "a"}, "seed": 7}
    run = load(tmp_path, flat)
    assert run.recipe_config.model.name == "x"
    assert (run.config.training.num_epochs, run.config.training.mixed_precision) == (2, "bf16")
    assert run.config.experiment.seed == 7
    assert load(tmp_path, {**flat, "deepspeed": "a.json"}).config.distributed.deepspeed.config_file == "a.json"
    assert "write it as a section fsdp" in refuse(tmp_path, {**flat, "fsdp": "full_shard"})


def test_what_a_file_leaves_out_has_their_default(tmp_path: Path) -> None:
    run = load(tmp_path, {"model_name_or_path": "x", "dataset": {"train_file": "a"}})
    theirs = transformers.TrainingArguments
    default = {field.name: field.default for field in dataclasses.fields(theirs)}
    ours = run.config.training
    assert ours.learning_rate == default["learning_rate"]
    assert ours.weight_decay == default["weight_decay"]
    assert ours.lr_scheduler.name == default["lr_scheduler_type"]
    assert ours.num_epochs == default["num_train_epochs"]
    assert ours.max_grad_norm == default["max_grad_norm"]
    assert ours.optimizer.betas == [default["adam_beta1"], default["adam_beta2"]]  # type: ignore[union-attr]
    assert run.sources["training.weight_decay"] == "Hugging Face's default"
    assert "weight_decay: 0.0" in run.to_yaml()


# Errors and overrides


def test_an_error_names_the_key_that_was_written(tmp_path: Path) -> None:
    message = refuse(tmp_path, guide(training={"per_device_train_batch_size": 0}))
    where = f"{tmp_path}/guide.yaml:5, written there as training.per_device_train_batch_size"
    assert message.startswith(f"training.batch_size ({where}) = 0: should be greater than or equal to 1")
    message = refuse(tmp_path, guide(training={"optim": "adamwx"}))
    assert "written there as training.optim) = 'adamwx' is not one of 'adamw'" in message
    message = refuse(tmp_path, guide(fsdp={"shardin_strategy": "x"}))
    assert "written there as fsdp.shardin_strategy) is not a key; did you mean distributed.fsdp.sharding" in message


def test_a_word_without_a_counterpart_is_refused_with_the_reason(tmp_path: Path) -> None:
    message = refuse(tmp_path, guide(training={"neftune_noise_alpha": 5, "label_smoothing_factor": 0.1}))
    assert message.startswith(f"training.neftune_noise_alpha ({tmp_path}/guide.yaml:6) = 5: shoal adds no noise")
    assert message.endswith(" (and 1 more)")


def test_two_spellings_must_agree(tmp_path: Path) -> None:
    assert training(tmp_path, train_batch_size=2)["batch_size"] == 2
    message = refuse(tmp_path, guide(training={"train_batch_size": 4}))
    assert message == (
        f"training.per_device_train_batch_size ({tmp_path}/guide.yaml:5) = 2 and training.train_batch_size "
        f"({tmp_path}/guide.yaml:6) = 4 both set training.batch_size; leave one of them out"
    )
    assert "both set training.mixed_precision" in refuse(tmp_path, guide(training={"bf16": True, "fp16": True}))
    both = guide(fsdp={"enabled": True}, deepspeed={"config_file": "x.json"})
    assert "both set distributed.strategy" in refuse(tmp_path, both)


def test_overrides_are_in_our_words_and_win(tmp_path: Path) -> None:
    run = load(tmp_path, guide(training={"warmup_ratio": 0.1}), "training.max_steps=5", "training.warmup_steps=3")
    training = run.config.training
    assert (training.max_steps, training.num_epochs) == (5, None)
    assert (training.warmup_steps, training.warmup_ratio) == (3, None)
    message = refuse(tmp_path, guide(), "training.num_train_epochs=2")
    assert message == "training.num_train_epochs (command line) is not a key; did you mean training.num_epochs?"
    message = refuse(tmp_path, guide(), "training.max_steps=5", "training.num_epochs=2")
    assert "both set the end of the run" in message


def test_keys_that_change_nothing_are_said(tmp_path: Path) -> None:
    run = load(tmp_path, guide(training={"do_train": True}))
    assert [remark.key for remark in run.remarks] == ["training.do_train"]
    assert "# not in force: training.do_train" in run.to_yaml()


def test_our_own_keys_may_be_among_theirs(tmp_path: Path) -> None:
    run = load(tmp_path, guide(training={"loss_chunks": 2}, logging={"console": "off"}, fsdp={"reduce_dtype": "bf16"}))
    assert (run.config.training.loss_chunks, run.config.logging.console) == (2, "off")
    assert run.config.distributed.fsdp.reduce_dtype == "bf16"


# The values of transformers


def test_every_training_argument_is_known() -> None:
    assert {field.name for field in dataclasses.fields(transformers.TrainingArguments)} <= {*WORDS}
    old = {"evaluation_strategy", "warmup_ratio", "group_by_length", "no_cuda", "save_safetensors", "logging_dir"}
    assert old <= {*WORDS}


def test_every_optimizer_of_transformers_is_mapped_or_refused(tmp_path: Path) -> None:
    from transformers.training_args import OptimizerNames

    for name in OptimizerNames:
        assert (name.value in OPTIMIZERS) != (name.value in REFUSED_OPTIMIZERS), name
    for theirs, ours in OPTIMIZERS.items():
        assert load(tmp_path, guide(training={"optim": theirs})).config.training.optimizer.name == ours
    for theirs, why in REFUSED_OPTIMIZERS.items():
        assert refuse(tmp_path, guide(training={"optim": theirs})).endswith(f"= {theirs!r}: {why}")
        assert ";" in why, "it says what to do"


def test_every_schedule_of_transformers_is_mapped_or_refused(tmp_path: Path) -> None:
    from transformers.trainer_utils import SchedulerType

    for name in SchedulerType:
        assert (name.value in SCHEDULES) != (name.value in REFUSED_SCHEDULES), name
    for theirs, ours in SCHEDULES.items():
        words = {"lr_scheduler_type": theirs, "warmup_ratio": 0.1, "eval_strategy": "epoch"}
        assert load(tmp_path, guide(training=words)).config.training.lr_scheduler.name == ours
    for theirs, why in REFUSED_SCHEDULES.items():
        assert refuse(tmp_path, guide(training={"lr_scheduler": theirs})).endswith(why)


def test_our_names_are_real() -> None:
    for name in {*OPTIMIZERS.values()}:
        validate(Optimizer, {"name": name}, {})
    for name in {*SCHEDULES.values()}:
        validate(Scheduler, {"name": name}, {})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}, {"min_ratio": 0.1}),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "learning_rate": 1e-3, "lr_scheduler_kwargs": {"min_lr": 1e-4}},
            {"min_ratio": 0.1},
        ),
        ({"lr_scheduler": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}}, {"power": 2.0}),
        ({"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 1}}, {"name": "cosine"}),
    ],
)
def test_options_of_schedules(tmp_path: Path, words: dict[str, Any], expected: dict[str, Any]) -> None:
    ours = training(tmp_path, **words)
    assert {key: ours[f"lr_scheduler.{key}"] for key in expected} == pytest.approx(expected)


def test_restarts_of_a_cosine_are_refused(tmp_path: Path) -> None:
    words = {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}}
    assert "lr_scheduler_kwargs.num_cycles of cosine_with_restarts" in refuse(tmp_path, guide(training=words))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"warmup_steps": 0.03}, {"warmup_ratio": 0.03, "warmup_steps": None}),
        ({"warmup_steps": 100}, {"warmup_ratio": None, "warmup_steps": 100}),
        ({"warmup_steps": 100.0, "warmup_ratio": 0}, {"warmup_ratio": None, "warmup_steps": 100}),
        ({"warmup_ratio": 0.1, "warmup_steps": 0}, {"warmup_ratio": 0.1, "warmup_steps": None}),
        ({"warmup_ratio": 0.1, "warmup_steps": 0.1}, {"warmup_ratio": 0.1, "warmup_steps": None}),
        ({"warmup_ratio": 0.1, "lr_scheduler": "constant"}, {"warmup_ratio": None}),
        ({"lr_warmup_steps": 500, "lr_scheduler": "constant"}, {"warmup_steps": None}),
        ({"max_steps": 10}, {"max_steps": 10, "num_epochs": None}),
        ({"max_steps": -1}, {"max_steps": None, "num_epochs": 1}),
        ({"eval_strategy": "epoch", "eval_steps": 5}, {"eval_steps": None, "eval_epochs": 1}),
        ({"evaluation_strategy": "steps", "eval_steps": 5}, {"eval_steps": 5, "eval_epochs": None}),
        ({"evaluation_strategy": "steps", "logging_steps": 7}, {"eval_steps": 7, "eval_epochs": None}),
        ({"eval_strategy": "no", "eval_steps": 5}, {"eval_steps": None, "eval_epochs": None}),
        ({"eval_steps": 5}, {"eval_steps": 5}),
        ({"validation_epochs": 2}, {"eval_epochs": 2}),
        ({"adam_beta2": 0.95, "adam_epsilon": 1e-6}, {"optimizer.betas": [0.9, 0.95], "optimizer.eps": 1e-6}),
        ({"optim": "sgd", "adam_beta1": 0.8}, {"optimizer.name": "sgd"}),
        ({"use_8bit_adam": True}, {"optimizer.name": "adamw_8bit"}),
        ({"max_grad_norm": 0.0}, {"max_grad_norm": None}),
        ({"mixed_precision": "no"}, {"mixed_precision": "fp32"}),
        ({"gradient_checkpointing": True}, {"activation_checkpointing.mode": "full"}),
        ({"adam_weight_decay": 0.5}, {"weight_decay": 0.5}),
        ({"use_cpu": True}, {"device": "cpu"}),
    ],
)
def test_values_become_ours(tmp_path: Path, words: dict[str, Any], expected: dict[str, Any]) -> None:
    ours = training(tmp_path, **words)
    assert {key: ours.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"save_strategy": "epoch", "save_steps": 5}, {"every": None, "every_epochs": 1}),
        ({"save_strategy": "no"}, {"every": None, "every_epochs": None}),
        ({"save_strategy": "best"}, {"every": None, "keep_best": 1}),
        ({"checkpointing_steps": 50, "checkpoints_total_limit": 2}, {"every": 50, "keep_last": 2}),
        ({"metric_for_best_model": "eval_accuracy"}, {"metric": "eval/accuracy", "mode": "max"}),
        ({"metric_for_best_model": "f1", "greater_is_better": False}, {"metric": "eval/f1", "mode": "min"}),
        ({"resume_from_checkpoint": "runs/a"}, {"resume": "runs/a"}),
    ],
)
def test_saving_becomes_ours(tmp_path: Path, words: dict[str, Any], expected: dict[str, Any]) -> None:
    ours = load(tmp_path, guide(training=words)).tree()["checkpoint"]
    assert {key: ours[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"warmup_ratio": 0.1, "warmup_steps": 10}, "warmup_steps = 10 sets the warmup, too"),
        ({"num_train_epochs": 0.5}, "a part of an epoch; give max_steps"),
        ({"logging_steps": 0.1}, "a share of all steps; give a number of steps"),
        ({"eval_strategy": "no", "evaluation_strategy": "epoch"}, "evaluation_strategy = epoch says otherwise"),
        ({"eval_strategy": "often"}, "should be no, steps or epoch"),
        ({"report_to": "comet_ml"}, "shoal has the loggers tensorboard, wandb, mlflow"),
        ({"push_to_hub": True}, "shoal checkpoint export --push"),
        ({"fsdp": "full_shard auto_wrap"}, "write it as a section fsdp"),
        ({"deepspeed": {"zero_optimization": {}}}, "write it into one, and give its path"),
    ],
)
def test_values_that_shoal_does_not_have(tmp_path: Path, words: dict[str, Any], message: str) -> None:
    assert message in refuse(tmp_path, guide(training=words))


def test_what_fully_shard_cannot_do_is_refused_with_the_reason(tmp_path: Path) -> None:
    post = refuse(tmp_path, guide(fsdp={"enabled": True, "backward_prefetch": "BACKWARD_POST"}))
    assert "as fsdp.backward_prefetch) = BACKWARD_POST: torch's fully_shard always gathers the next unit before" in post
    unlimited = refuse(tmp_path, guide(fsdp={"enabled": True, "limit_all_gathers": False}))
    assert "as fsdp.limit_all_gathers) = false: torch's fully_shard always frees a unit before" in unlimited


def test_other_spellings_of_sections(tmp_path: Path) -> None:
    run = load(
        tmp_path,
        guide(
            model={"quantization": {"load_in_4bit": True, "compute_dtype": "bf16"}, "torch_dtype": "torch.bfloat16"},
            lora={"rank": 4, "lora_alpha": 8, "dropout": 0.1, "enabled": True},
            fsdp={
                "sharding_strategy": 2,
                "transformer_layer_cls_to_wrap": "A, B",
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            },
            hardware={"gpus_per_node": "auto", "nnodes": 2},
            training={"device": "cpu"},
        ),
    )
    model, lora, fsdp = run.recipe_config.model, run.recipe_config.lora, run.config.distributed.fsdp
    assert (model.load_in_4bit, model.bnb_4bit_compute_dtype, model.dtype) == (True, "bfloat16", "bf16")
    assert (lora.r, lora.lora_alpha, lora.lora_dropout) == (4, 8, 0.1)
    assert (fsdp.sharding_strategy, fsdp.wrap_classes, fsdp.auto_wrap_policy) == ("SHARD_GRAD_OP", ["A", "B"], None)
    assert run.config.distributed.strategy == "fsdp"
    assert (run.config.launch.procs_per_node, run.config.launch.nodes) == (1, 2)


SDXL = """
model:
  pretrained_model_name_or_path: stabilityai/stable-diffusion-xl-base-1.0
  pretrained_vae_model_name_or_path: madebyollin/sdxl-vae-fp16-fix
lora: {rank: 32, alpha: 32, target_modules: [to_k, to_q, to_v, to_out.0]}
deepspeed: {config_file: configs/deepspeed_zero2_config.json}
training:
  output_dir: ./sdxl
  resolution: 1024
  train_batch_size: 4
  gradient_accumulation_steps: 4
  num_train_epochs: 10
  learning_rate: 1e-4
  lr_scheduler: constant_with_warmup
  warmup_steps: 100
  mixed_precision: fp16
  checkpointing_steps: 500
  validation_epochs: 1
  validation_prompts: [a cat]
  num_gpus: 4
"""


def test_a_file_about_images_resolves_as_far_as_its_recipe(tmp_path: Path) -> None:
    (tmp_path / "sdxl.yaml").write_text(SDXL)
    result = call_shoal(tmp_path, "config", "sdxl.yaml")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "recipe (the file is in Hugging Face's words) = 'diffusion_lora' is unknown; set it to" in result.stderr


# The DeepSpeed JSON beside a guide

ZERO_2 = json.loads((FOLDER / "deepspeed_zero2_config.json").read_text())
BESIDE = guide(
    deepspeed={"config_file": "ds.json"},
    training={
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "learning_rate": 1e-4,
        "lr_scheduler": "constant_with_warmup",
        "warmup_steps": 100,
        "weight_decay": 0.01,
        "mixed_precision": "fp16",
        "max_grad_norm": 1.0,
    },
    hardware={"num_gpus": 4},
)


def layout_with(folder: Path, monkeypatch: pytest.MonkeyPatch, document: dict[str, Any]) -> Any:
    monkeypatch.chdir(folder)
    (folder / "ds.json").write_text(json.dumps(document))
    run = load(folder, BESIDE)
    return check_layout(run.config, run.make_recipe(), 4, 4)


def test_the_ready_json_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_with(tmp_path, monkeypatch, ZERO_2)
    zero = layout.zero
    assert (layout.strategy, zero.stage, zero.offload_optimizer) == ("deepspeed", 2, "cpu")
    assert (zero.allgather_bucket_size, zero.reduce_bucket_size) == (500_000_000, 500_000_000)
    assert (zero.overlap_comm, zero.contiguous_gradients) == (True, True)
    assert "zero_optimization.gather_16bit_weights_on_model_save" in layout.not_in_force


def test_the_json_as_it_is_published_contradicts_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError) as batch:
        layout_with(tmp_path, monkeypatch, {**ZERO_2, "train_batch_size": 16})
    assert str(batch.value) == (
        "distributed.deepspeed.config_file ds.json: train_batch_size = 16 contradicts the run: batch_size 4 × "
        "gradient_accumulation 4 × 4 processes = 64; say auto, or make them agree"
    )
    schedule = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 100}}
    with pytest.raises(UserError, match=r'scheduler.type = "WarmupDecayLR" contradicts training.lr_scheduler = const'):
        layout_with(tmp_path, monkeypatch, {**ZERO_2, "scheduler": schedule})
    different = {"type": "AdamW", "params": {**ZERO_2["optimizer"]["params"], "lr": 3e-4}}
    with pytest.raises(UserError, match=r"optimizer.params.lr = 0.0003 contradicts training.learning_rate = 0.0001"):
        layout_with(tmp_path, monkeypatch, {**ZERO_2, "optimizer": different})


def extend(folder: Path, base: dict[str, Any], later: dict[str, Any]) -> Run:
    (folder / "base.yaml").write_text(yaml.safe_dump(base, sort_keys=False))
    return load(folder, {"extends": "base.yaml", **later})


@pytest.mark.parametrize(
    ("base", "later", "expected"),
    [
        ({"bf16": True}, {"bf16": False}, {"mixed_precision": "fp32"}),
        ({"fp16": True}, {"bf16": False}, {"mixed_precision": "fp16"}),
        ({"bf16": True}, {"mixed_precision": "fp16"}, {"mixed_precision": "fp16"}),
        (
            {"gradient_checkpointing": True},
            {"gradient_checkpointing": False},
            {"activation_checkpointing.mode": "none"},
        ),
        (
            {"optim": "adamw_8bit"},
            {"adam_beta2": 0.95},
            {"optimizer.name": "adamw_8bit", "optimizer.betas": [0.9, 0.95]},
        ),
        ({"optim": "adamw_8bit"}, {"optimizer": "sgd"}, {"optimizer.name": "sgd"}),
        (
            {"learning_rate": 1e-3},
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}},
            {"lr_scheduler.min_ratio": 0.01},
        ),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}},
            {"learning_rate": 1e-3},
            {"lr_scheduler.min_ratio": 0.01, "learning_rate": 1e-3},
        ),
        ({"warmup_ratio": 0.1}, {"warmup_ratio": None}, {"warmup_ratio": None}),
        ({"warmup_ratio": 0.1}, {"lr_warmup_steps": 5}, {"warmup_ratio": None, "warmup_steps": 5}),
        ({"max_steps": 100}, {"num_train_epochs": 3}, {"max_steps": None, "num_epochs": 3}),
        ({"max_grad_norm": 0.5}, {"max_grad_norm": None}, {"max_grad_norm": None}),
    ],
)
def test_a_later_file_undoes_and_completes_its_base(
    tmp_path: Path, base: dict[str, Any], later: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = flatten(extend(tmp_path, guide(training=base), {"training": later}).tree()["training"])
    assert {key: found[key] for key in expected} == expected
    at_top = (
        flatten(extend(tmp_path, guide(training=base), later).tree()["training"]) if "optimizer" not in later else found
    )
    assert at_top == found


def test_a_later_file_chooses_another_strategy(tmp_path: Path) -> None:
    base = guide(fsdp={"enabled": True})
    assert extend(tmp_path, base, {"fsdp": {"enabled": False}}).config.distributed.strategy != "fsdp"
    assert (
        extend(
            tmp_path, base, {"distributed": {"strategy": "ddp"}, "hardware": {"num_gpus": 2}}
        ).config.distributed.strategy
        == "ddp"
    )


@pytest.mark.parametrize("value", [None, 0])
def test_no_norm_means_no_clipping(tmp_path: Path, value: Any) -> None:
    assert training(tmp_path, max_grad_norm=value)["max_grad_norm"] is None
    assert load(tmp_path, guide() | {"max_grad_norm": value}).config.training.max_grad_norm is None


def test_words_at_the_top_and_in_training_are_read_together(tmp_path: Path) -> None:
    words = {
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": 1e-5},
        "eval_strategy": "steps",
    }
    found = flatten(
        load(tmp_path, guide(training=words) | {"learning_rate": 1e-3, "logging_steps": 7}).tree()["training"]
    )
    assert (found["lr_scheduler.min_ratio"], found["eval_steps"]) == (pytest.approx(0.01), 7)


def test_words_that_contradict_are_refused(tmp_path: Path) -> None:
    message = refuse(tmp_path, guide(training={"lr_scheduler": "cosine", "lr_scheduler_type": "linear"}))
    assert "lr_scheduler_type = linear and lr_scheduler = cosine contradict" in message
    assert "mixed_precision = bf16" in refuse(tmp_path, guide(training={"bf16": False, "mixed_precision": "bf16"}))


def test_a_typo_in_the_quantisation_is_named(tmp_path: Path) -> None:
    message = refuse(tmp_path, guide(model={"quantization_config": {"load_in_4bits": True}}))
    assert "model.quantization_config.load_in_4bits" in message
    assert "guide.yaml:" in message
    assert "did you mean model.quantization_config.load_in_4bit?" in message
    assert "the section model:" in refuse(tmp_path, guide(quantization_config={"load_in_4bit": True}))


def test_another_spelling_on_the_command_line_is_shown_at_the_key(tmp_path: Path) -> None:
    shown = load(tmp_path, guide(), "lora.rank=64", "lora.alpha=16").to_yaml()
    lines = {line.split(":")[0].strip(): line for line in shown.splitlines()}
    assert "64" in lines["r"]
    assert "command line" in lines["r"]
    assert "command line" in lines["lora_alpha"]
    assert not {"rank", "alpha", "dropout"} & {*yaml.safe_load(shown)["lora"]}
