"""A DeepSpeed JSON is accepted or refused as docs/deepspeed.md says, and so are the keys of `distributed.deepspeed`."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import ToyRun

from shoal.config import load_run
from shoal.config.deepspeed_json import fit_json, read_json
from shoal.config.schema import TrainingConfig
from shoal.config.schema_distributed import DeepSpeedConfig
from shoal.errors import UserError
from shoal.strategies import DeepSpeedStrategy

AUTO = "auto"
ZERO_2 = {"stage": 2}
BATCH = {"global_batch_size": 32, "batch_size": 4, "gradient_accumulation": 4}


def run(**training: Any) -> TrainingConfig:
    return TrainingConfig(**{"max_steps": 100, "learning_rate": 3e-4, **BATCH, **training})


HUGGING_FACE = {
    "fp16": {"enabled": AUTO, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2},
    "bf16": {"enabled": AUTO},
    "optimizer": {"type": "AdamW", "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO, "total_num_steps": AUTO},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": AUTO,
        "stage3_prefetch_bucket_size": AUTO,
        "stage3_param_persistence_threshold": AUTO,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
    "steps_per_print": 2000,
    "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO,
    "wall_clock_breakdown": False,
}
"""The JSON in the documentation of transformers."""

ACCEPTED: dict[str, tuple[dict[str, Any], TrainingConfig, dict[str, Any], set[str]]] = {
    # name: the JSON, the run, the options that come out of it, the keys that are reported as idle
    "NVMe": (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/local", "buffer_count": 4, "fast_init": False},
                "offload_param": {"device": "nvme", "nvme_path": "/fast", "buffer_size": 1e8, "max_in_cpu": 1e9},
            },
            "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 2, "single_submit": False},
        },
        run(),
        {
            "zero_stage": 3,
            "offload_optimizer": "/local",
            "offload_parameters": "/fast",
            "aio": {"block_size": 262144, "queue_depth": 32, "intra_op_parallelism": 2, "single_submit": False},
        },
        {f"zero_optimization.offload_optimizer.{key}" for key in ("buffer_count", "fast_init")}
        | {f"zero_optimization.offload_param.{key}" for key in ("buffer_size", "max_in_cpu")},
    ),
    "auto everywhere, stage 3 with offload": (
        HUGGING_FACE,
        run(lr_scheduler={"name": "linear"}, mixed_precision="bf16"),
        {
            "zero_stage": 3,
            "offload_optimizer": "cpu",
            "offload_parameters": "cpu",
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 10**9,
            "stage3_max_live_parameters": 10**9,
            "stage3_max_reuse_distance": 10**9,
        },
        {
            "steps_per_print",
            "wall_clock_breakdown",
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            "zero_optimization.offload_optimizer.pin_memory",
            "zero_optimization.offload_param.pin_memory",
            *(f"fp16.{key}" for key in ("loss_scale", "loss_scale_window", "initial_scale_power", "hysteresis")),
        },
    ),
    "only a stage": ({"zero_optimization": {"stage": 1}}, run(), {"zero_stage": 1}, set()),
    "numbers such as 2e8": (
        {
            "zero_optimization": {
                "stage": 2,
                "allgather_partitions": True,
                "allgather_bucket_size": 2e8,
                "overlap_comm": True,
                "reduce_scatter": True,
                "reduce_bucket_size": 2e8,
                "contiguous_gradients": True,
            },
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 4,
            "train_batch_size": 32,
        },
        run(),
        {
            "zero_stage": 2,
            "allgather_bucket_size": 2 * 10**8,
            "reduce_bucket_size": 2 * 10**8,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
        {"zero_optimization.reduce_scatter", "zero_optimization.allgather_partitions"},
    ),
    "fp16 on": (
        {"fp16": {"enabled": True, "loss_scale": 0, "min_loss_scale": 1}, "zero_optimization": ZERO_2},
        run(mixed_precision="fp16"),
        {"zero_stage": 2},
        {"fp16.loss_scale", "fp16.min_loss_scale"},
    ),
    "fp16 off, bf16 on": (
        {"fp16": {"enabled": False}, "bfloat16": {"enabled": True}, "zero_optimization": ZERO_2},
        run(mixed_precision="bf16"),
        {"zero_stage": 2},
        set(),
    ),
    "optimizer and schedule as in the run": (
        {
            "optimizer": {
                "type": "Adam",
                "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": True},
            },
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {
                    "total_num_steps": 100,
                    "warmup_num_steps": 10,
                    "cos_min_ratio": 0.0,
                    "warmup_type": "linear",
                },
            },
            "gradient_clipping": 1.0,
            "zero_optimization": ZERO_2,
        },
        run(warmup_steps=10),
        {"zero_stage": 2},
        {"optimizer.params.torch_adam"},
    ),
    "a constant schedule": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-4}}, "zero_optimization": ZERO_2},
        run(lr_scheduler={"name": "constant_with_warmup"}, warmup_steps=3),
        {"zero_stage": 2},
        {"scheduler.params.warmup_type", "scheduler.params.warmup_num_steps"},
    ),
    "a schedule of epochs, all auto": (
        {
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {"warmup_num_steps": AUTO, "warmup_type": AUTO, "total_num_steps": AUTO},
            },
            "zero_optimization": ZERO_2,
        },
        run(max_steps=None, num_epochs=2, warmup_ratio=0.1),
        {"zero_stage": 2},
        {"scheduler.params.cos_min_ratio"},
    ),
    "no warmup, so its type does not matter": (
        {
            "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 0, "last_batch_iteration": -1}},
            "zero_optimization": ZERO_2,
        },
        run(lr_scheduler="linear"),
        {"zero_stage": 2},
        set(),
    ),
    "cpu_offload, the older key": (
        {"zero_optimization": {"stage": 2, "cpu_offload": True}},
        run(),
        {"zero_stage": 2, "offload_optimizer": "cpu"},
        set(),
    ),
    "offload to none": (
        {
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "none"},
                "offload_param": {"device": "none", "nvme_path": "/local"},
            }
        },
        run(),
        {"zero_stage": 2},
        {"zero_optimization.offload_param.nvme_path"},
    ),
    "keys of stage 3 at stage 2": (
        {"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 1e9, "sub_group_size": 1e9}},
        run(),
        {"zero_stage": 2},
        {"zero_optimization.stage3_max_live_parameters", "zero_optimization.sub_group_size"},
    ),
    "keys of stage 2 at stage 3": (
        {"zero_optimization": {"stage": 3, "allgather_bucket_size": 5e8}},
        run(),
        {"zero_stage": 3},
        {"zero_optimization.allgather_bucket_size"},
    ),
    "activation checkpointing": (
        {
            "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True, "profile": False},
            "zero_optimization": ZERO_2,
        },
        run(),
        {"zero_stage": 2, "cpu_checkpointing": True},
        {"activation_checkpointing.profile", "activation_checkpointing.partition_activations"},
    ),
    "logging and profiling": (
        {
            "tensorboard": {"enabled": True, "output_path": "x"},
            "wandb": {"enabled": False},
            "flops_profiler": {"enabled": False},
            "zero_allow_untested_optimizer": True,
            "communication_data_type": "fp32",
            "prescale_gradients": False,
            "zero_optimization": ZERO_2,
        },
        run(),
        {"zero_stage": 2},
        {"tensorboard", "wandb", "flops_profiler", "zero_allow_untested_optimizer"},
    ),
    "null has no effect": (
        {
            **dict.fromkeys(("fp16", "optimizer", "scheduler", "aio", "amp", "tensorboard", "gradient_clipping")),
            "zero_optimization": {"stage": 2, "offload_optimizer": None, "overlap_comm": None},
        },
        run(),
        {"zero_stage": 2},
        set(),
    ),
    "features that are turned off": (
        {
            "compile": {"enabled": False},
            "tensor_parallel": {"autotp_size": 1},
            "nebula": {"enabled": False},
            "graph_harvesting": False,
            "pipeline": {},
            "data_types": {"grad_accum_dtype": "fp32"},
            "fp16": {"fp16_master_weights_and_grads": False},
            "optimizer": {"params": {"amsgrad": False, "bias_correction": True, "adam_w_mode": True}},
            "zero_optimization": {"stage": 3.0, "mics_shard_size": -1, "cpu_offload": False},
        },
        run(),
        {"zero_stage": 3},
        set(),
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_json(name: str) -> None:
    document, training, options, idle = ACCEPTED[name]
    fitted = fit_json(json.loads(json.dumps(document)), training, processes=2, where="ds.json")
    assert fitted.options == options
    assert fitted.idle.keys() == idle
    DeepSpeedConfig(**fitted.options)
    assert all(fitted.idle.values())


REFUSED: dict[str, tuple[dict[str, Any], TrainingConfig, str]] = {
    "another batch": (
        {"train_batch_size": 64},
        run(),
        "64 contradicts the run: batch_size 4 × gradient_accumulation 4 × 2 processes = 32; say auto",
    ),
    "another micro-batch": ({"train_micro_batch_size_per_gpu": 8}, run(), "= 8 contradicts the run: batch_size 4"),
    "another accumulation": ({"gradient_accumulation_steps": 1}, run(), "gradient_accumulation 4 × 2 processes = 32"),
    "accumulation against a schedule": (
        {"gradient_accumulation_steps": 4},
        run(global_batch_size=None, gradient_accumulation={0: 4, 2: 2}),
        "4 contradicts the run: training.gradient_accumulation is a schedule, {0: 4, 2: 2}",
    ),
    "another clipping": ({"gradient_clipping": 0.3}, run(), "0.3 contradicts training.max_grad_norm = 1.0"),
    "clipping where the run has none": (
        {"gradient_clipping": 1.0},
        run(max_grad_norm=None),
        "training.max_grad_norm = None",
    ),
    "fp16 against bf16": (
        {"fp16": {"enabled": True}},
        run(mixed_precision="bf16"),
        "fp16.enabled = true contradicts training.mixed_precision = bf16; say auto, or make them agree",
    ),
    "bf16 off against bf16": ({"bf16": {"enabled": False}}, run(mixed_precision="bf16"), "mixed_precision = bf16"),
    "another optimizer": (
        {"optimizer": {"type": "SGD", "params": {}}},
        run(),
        'optimizer.type = "SGD" contradicts training.optimizer = adamw; shoal reads Adam as adamw',
    ),
    "an optimizer that shoal does not have": ({"optimizer": {"type": "Lamb"}}, run(), "SGD as sgd"),
    "a learning rate": (
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}},
        run(),
        "optimizer.params.lr = 1e-05 contradicts training.learning_rate = 0.0003",
    ),
    "Adam with decay in the gradient": (
        {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
        run(),
        "not AdamW",
    ),
    "another schedule": ({"scheduler": {"type": "WarmupDecayLR"}}, run(), "training.lr_scheduler = cosine"),
    "a schedule that shoal does not have": (
        {"scheduler": {"type": "OneCycle"}},
        run(),
        "shoal reads WarmupLR as constant",
    ),
    "another warmup": (
        {"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 7}}},
        run(warmup_steps=5),
        "warmup_num_steps = 7 contradicts the run's 5 warmup steps",
    ),
    "stage 0": ({"zero_optimization": {"stage": 0}}, run(), "use 1, 2 or 3, or distributed.strategy: ddp"),
    "no stage": ({"zero_optimization": {}}, run(), "zero_optimization.stage = null is not a stage"),
    "null for zero_optimization": ({"zero_optimization": None}, run(), "zero_optimization = null should be an object"),
    "offloaded weights at stage 2": (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        run(),
        "offload_param = cpu: ZeRO stage 2 keeps all weights on every device; use stage: 3",
    ),
    "NVMe at stage 2": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/local"}}},
        run(),
        "offload_optimizer = /local: ZeRO stage 2 offloads to host memory only; use cpu, or stage: 3",
    ),
    "NVMe without a path": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        run(),
        'offload_param.device = "nvme" should be none, cpu, or nvme with nvme_path, a folder on a local disk',
    ),
    "GPUDirect Storage": ({"aio": {"use_gds": True}}, run(), "aio.use_gds = true needs GPUDirect Storage"),
    "an unknown key of aio": (
        {"aio": {"queue_deep": 8}},
        run(),
        "aio.queue_deep is not a DeepSpeed key that shoal knows; did you mean queue_depth?",
    ),
    "a text for a number of aio": (
        {"aio": {"block_size": "big"}},
        run(),
        "aio.block_size (ds.json: aio.block_size) = 'big': should be a valid integer",
    ),
    "a typo in a key of ZeRO": (
        {"zero_optimization": {"stage": 2, "overlap_com": True}},
        run(),
        "did you mean overlap_comm?",
    ),
    "a typo in a top-level key": ({"gradient_cliping": 1.0}, run(), "did you mean gradient_clipping?"),
    "fp16 communication": ({"communication_data_type": "fp16"}, run(), "would change the training"),
    "quantised weights": ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, run(), "leave it out"),
    "text for a number": (
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": "big"}},
        run(),
        "reduce_bucket_size (ds.json: zero_optimization.reduce_bucket_size) = 'big': should be a valid integer",
    ),
    "Apex": ({"amp": {"enabled": True, "opt_level": "O1"}}, run(), "amp.enabled = true would change the training"),
    "a number for enabled": (
        {"fp16": {"enabled": 1}},
        run(),
        "fp16.enabled = 1 contradicts training.mixed_precision = fp32",
    ),
    "a typo in a key of fp16": ({"fp16": {"enable": True}}, run(), "did you mean enabled?"),
    "an unknown key of fp16": ({"fp16": {"banana": 1}}, run(), "fp16.banana is not a DeepSpeed key"),
    "an unknown key with auto": ({"banana": AUTO}, run(), "banana is not a DeepSpeed key"),
    "fp16 weights": (
        {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
        run(mixed_precision="fp16"),
        "fp16.fp16_master_weights_and_grads = true would change the training",
    ),
    "gradients summed in bf16": (
        {"data_types": {"grad_accum_dtype": "bf16"}},
        run(),
        'data_types.grad_accum_dtype = "bf16" would change the training',
    ),
    "Adam without bias correction": ({"optimizer": {"params": {"bias_correction": False}}}, run(), "is another Adam"),
    "a list for the optimizer's params": (
        {"optimizer": {"params": [1]}},
        run(),
        "optimizer.params = [1] should be an object",
    ),
    "a decay to 0 where the run decays to 0.5": (
        {"scheduler": {"type": "WarmupDecayLR"}},
        run(lr_scheduler={"name": "linear", "min_ratio": 0.5}),
        "training.lr_scheduler = linear to 0.5; shoal reads WarmupLR as constant, WarmupDecayLR as linear to 0",
    ),
    "a number of steps where the run has epochs": (
        {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 1000}}},
        run(max_steps=None, num_epochs=2),
        "total_num_steps = 1000 contradicts training.num_epochs = 2: the run counts epochs, not steps; say auto",
    ),
    "another type of warmup": (
        {"scheduler": {"params": {"warmup_type": "log"}}},
        run(warmup_steps=5),
        'warmup_type = "log" contradicts the run, whose warmup is linear',
    ),
    "auto for zero_optimization": (
        {"zero_optimization": AUTO},
        run(),
        'zero_optimization = "auto" should be an object',
    ),
    "true for a stage": (
        {"zero_optimization": {"stage": True}},
        run(),
        "zero_optimization.stage = true is not a stage",
    ),
    "a text for cpu_offload": (
        {"zero_optimization": {"stage": 2, "cpu_offload": "yes"}},
        run(),
        'cpu_offload = "yes" should be true or false',
    ),
    "an unknown key of offload_optimizer": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none", "banana": 1}}},
        run(),
        "offload_optimizer.banana is not a DeepSpeed key",
    ),
    "a number for cpu_checkpointing": (
        {"activation_checkpointing": {"cpu_checkpointing": 1}},
        run(),
        "cpu_checkpointing (ds.json: activation_checkpointing.cpu_checkpointing) = 1: should be true or false",
    ),
    "NaN for clipping": ({"gradient_clipping": math.nan}, run(), "NaN contradicts training.max_grad_norm"),
    "true for clipping": ({"gradient_clipping": True}, run(), "= true contradicts training.max_grad_norm"),
    "an object for clipping": ({"gradient_clipping": {}}, run(), "= {} contradicts training.max_grad_norm"),
    "compilation": ({"compile": {"deepcompile": True}}, run(), "compile.deepcompile = true would change the training"),
    "tensor parallelism": ({"tensor_parallel": {"autotp_size": 4}}, run(), "tensor_parallel.autotp_size = 4 would"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_json(name: str) -> None:
    document, training, words = REFUSED[name]
    with pytest.raises(UserError) as caught:
        fit_json({"zero_optimization": ZERO_2, **document}, training, processes=2, where="ds.json")
    assert words in str(caught.value)
    assert "ds.json: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_defaults_that_contradict_the_run_are_reported() -> None:
    document = {"zero_optimization": ZERO_2, "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 5}}}
    fitted = fit_json(document, run(warmup_steps=5), 2, "ds.json")
    assert fitted.idle == {
        "scheduler.params.warmup_type": (
            "DeepSpeed's default, log, contradicts the run, whose warmup is linear; say auto, or make them agree"
        ),
        "scheduler.params.cos_min_ratio": (
            "DeepSpeed's default, 0.0001, contradicts training.lr_scheduler.min_ratio = 0.0; say auto, or make them "
            "agree"
        ),
    }


@pytest.mark.parametrize(
    ("document", "precision", "words"),
    [
        ({"bf16": {"enabled": True}}, "fp32", "bf16.enabled = true contradicts mixed_precision = fp32"),
        ({"fp16": {"enabled": True}}, "bf16", "fp16.enabled = true contradicts mixed_precision = bf16"),
        ({"bf16": {"enabled": False}}, "bf16", "bf16.enabled = false contradicts mixed_precision = bf16"),
        ({"train_batch_size": 8}, "fp32", "is for `shoal train`; in a loop of your own leave it out"),
        ({"optimizer": {"params": [1]}}, "fp32", "optimizer.params = [1] should be an object"),
        ({"optimizer": {"kind": "AdamW"}}, "fp32", "optimizer.kind is not a DeepSpeed key"),
    ],
)
def test_a_hand_written_loop_compares_the_precision_only(document: dict[str, Any], precision: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        fit_json({"zero_optimization": ZERO_2, **document}, None, 1, "ds.json", precision)
    assert words in str(caught.value)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="the package deepspeed is not installed")
def test_a_deepspeed_strategy_takes_a_json_from_python() -> None:
    """A hand-written loop has its own optimizer and schedule; the precision is the strategy's."""
    path = Path(__file__).parents[2] / "configs" / "zero3.json"
    for config in (path, str(path), json.loads(path.read_text())):
        strategy = DeepSpeedStrategy(device="cpu", config=config)
        assert strategy.layout.zero.stage == 3
        idle = strategy.layout.not_in_force
        assert "your own loop decides it" == idle["optimizer.type"] == idle["scheduler.type"]
        assert "optimizer.params.lr" not in idle
    half = {"zero_optimization": ZERO_2, "bf16": {"enabled": True}}
    assert DeepSpeedStrategy(device="cpu", config=half, mixed_precision="bf16").layout.precision == "bf16"
    with pytest.raises(UserError, match=r"bf16.enabled = true contradicts mixed_precision = fp32"):
        DeepSpeedStrategy(device="cpu", config=half)


def test_a_json_without_zero_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"ds.json: zero_optimization = null should be an object with a stage; without ZeRO use"
    ):
        fit_json({}, run(), 2, "ds.json")


TWICE = ('{"zero_optimization": {"stage": 2, "stage": 3}}', "not valid JSON: stage is given 2 times, as 2 and as 3")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not valid JSON"),
        ("[]", "holds a list; it should hold an object"),
        ('{"stage" 3}', "not valid JSON"),
        TWICE,
    ],
)
def test_a_file_that_is_not_json(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(UserError, match=words):
        read_json(str(tmp_path / "ds.json"))


@pytest.mark.skipif(find_spec("hjson") is None, reason="the package hjson, which DeepSpeed brings, is not installed")
def test_comments_and_trailing_commas(tmp_path: Path) -> None:
    """DeepSpeed accepts them too."""
    (tmp_path / "ds.json").write_text('{\n  // which of them\n  "zero_optimization": {"stage": 3,},  # all\n}')
    assert read_json(tmp_path / "ds.json") == {"zero_optimization": {"stage": 3}}
    (tmp_path / "ds.json").write_text('{"a": 1, "a": 2,}')
    with pytest.raises(UserError, match="not valid JSON"):
        read_json(tmp_path / "ds.json")


DEEPSPEED = "distributed.strategy=deepspeed"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["distributed.zero_stage=0"], r"distributed.zero_stage \(command line\): stage 0 of ZeRO shards nothing"),
        (["distributed.deepspeed.zero_stage=4"], "distributed.deepspeed.zero_stage"),
        (
            ["distributed.zero_stage=3", "distributed.deepspeed.zero_stage=1"],
            r"deepspeed.zero_stage \(command line\) = 1, but its short",
        ),
        (["distributed.offload=all"], "ZeRO stage 2 keeps all weights on every device; use zero_stage: 3"),
        (["distributed.zero_stage=3", "distributed.deepspeed.config_file=x.json"], "put it into the JSON"),
        (
            ["distributed.deepspeed.overlap_comm=true", "distributed.deepspeed.config_file=x.json"],
            "put it into the JSON",
        ),
        (["distributed.deepspeed.zero_stages=2"], "did you mean distributed.deepspeed.zero_stage?"),
    ],
)
def test_keys_that_contradict_each_other(toy: ToyRun, keys: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_run(toy.config, [DEEPSPEED, *keys])


def test_short_forms_are_the_long_ones(toy: ToyRun) -> None:
    short = load_run(toy.config, [DEEPSPEED, "distributed.zero_stage=3", "distributed.offload=all"])
    section = "{zero_stage: 3, offload_optimizer: cpu, offload_parameters: cpu}"
    long = load_run(toy.config, [DEEPSPEED, f"distributed.deepspeed={section}"])
    assert short.config.distributed.zero == long.config.distributed.zero
    # Keys of another strategy may stay in a config.
    assert (
        load_run(toy.config, ["distributed.strategy=ddp", "distributed.offload=all"]).config.distributed.offload
        == "all"
    )


def test_a_resolved_run_loads_again(toy: ToyRun) -> None:
    for keys in (["distributed.zero_stage=3"], ["distributed.deepspeed.config_file=ds.json"]):
        resolved = toy.folder / "resolved.yaml"
        resolved.write_text(load_run(toy.config, [DEEPSPEED, *keys]).to_yaml())
        assert load_run(resolved).config.distributed == load_run(toy.config, [DEEPSPEED, *keys]).config.distributed


@pytest.mark.parametrize(("name", "stage"), [("zero2", 2), ("zero3_offload", 3), ("zero3_json", 3)])
def test_the_shipped_configs_fit(monkeypatch: pytest.MonkeyPatch, name: str, stage: int) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    config = load_run(root / "configs" / f"{name}.yaml").config
    zero = config.distributed.zero
    if zero.config_file:
        fitted = fit_json(read_json(zero.config_file), config.training, 2, zero.config_file)
        assert fitted.idle.keys() == {"zero_optimization.offload_optimizer.pin_memory"}
        zero = DeepSpeedConfig(**fitted.options)
    assert zero.stage == stage
    assert zero.offload_optimizer == ("none" if stage == 2 else "cpu")
