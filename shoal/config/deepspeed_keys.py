"""What happens with each key of a DeepSpeed JSON: one table, which `shoal.config.deepspeed_json` walks.

The entry of a key is one of

a text      the key has no effect, because of what the text says
Accept(…)   the value is checked, or passed on as a key of `distributed.deepspeed`, or both
a table     the value is an object with these keys; "*" stands for any key

Functions make the entries that depend on the run, on the ZeRO stage or on other keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from shoal.config.batch import accumulation, derive_batches
from shoal.config.schema import TrainingConfig
from shoal.config.schema_distributed import AioConfig, DeepSpeedConfig
from shoal.config.schema_optimizers import Decay

AUTO = "auto"


def whole(value: Any) -> Any:
    """Returns 500000000 for 5e8, which JSON reads as a float, and every other value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclass(frozen=True)
class Accept:
    """Checks a value, and passes it on if it has an `option`."""

    values: tuple[Any, ...] | None = None
    """The accepted values, texts in lower case; None accepts every value."""
    why: str = "would change the training, and shoal cannot do it; leave it out"
    """Why any other value is refused."""
    option: str = ""
    """The key of `distributed.deepspeed` that gets the value, such as `aio.block_size`."""
    convert: Callable[[Any], Any] = whole
    """Returns the option's value for the JSON's value, or None to leave the option as it is."""
    switches: tuple[str, ...] = ()
    """If the value is an object: the keys that turn it on or off. The first one that it has is checked in its place."""


Entry: TypeAlias = "str | Accept | Mapping[str, Entry]"
Table: TypeAlias = "Mapping[str, Entry]"

OFF = Accept((False,))
OFF_SECTION = Accept((False, {}), switches=("enabled",))
FP32 = Accept(("fp32", "float32", "float", "torch.float32"))

TOP: Table = {
    "steps_per_print": "logging.every sets how often the log is written",
    "wall_clock_breakdown": "logging.profile records where time goes",
    "memory_breakdown": "logging.profile records where memory goes",
    "dump_state": "the report at step 1 shows what is in force",
    "flops_profiler": "the log shows FLOPs and MFU",
    "comms_logger": "`shoal verify` counts the collectives",
    "tensorboard": "use logging.tensorboard",
    "wandb": "use logging.wandb",
    "csv_monitor": "use logging.jsonl",
    "comet": "shoal does not log to Comet; see logging for other services",
    "checkpoint": "shoal writes its own checkpoints, which open in every layout",
    "autotuning": "shoal does not tune settings",
    "zero_allow_untested_optimizer": "shoal's optimizers are tested",
    "zero_force_ds_cpu_optimizer": "torch's optimizers also step on the CPU",
    "disable_allgather": "newer versions of DeepSpeed do not have it",
    "dataloader_drop_last": "shoal drops no sample",
    "seed": "use experiment.seed",
    "log_level": "the report at step 1 shows what matters",
    "timers": "logging.profile records where time goes",
    "data_types": {
        "grad_accum_dtype": FP32,
        "param_dtype": FP32,
        "buffer_dtype": FP32,
        "keep_in_fp32_modules": "buffers stay in fp32",
    },
    "activation_checkpointing": {
        "cpu_checkpointing": Accept(option="cpu_checkpointing"),
        "partition_activations": "it is for model parallelism, which ZeRO is not",
        **dict.fromkeys(
            (
                "contiguous_memory_optimization",
                "number_checkpoints",
                "profile",
                "synchronize_checkpoint_boundary",
            ),
            "use training.activation_checkpointing",
        ),
    },
    "aio": {
        **{key: Accept(option=f"aio.{key}") for key in AioConfig.model_fields},
        "thread_count": Accept(option="aio.intra_op_parallelism"),
        "use_gds": Accept((False,), "needs GPUDirect Storage, which shoal does not use; leave it out"),
    },
    **dict.fromkeys(
        (
            "amp",
            "torch_autocast",
            "elasticity",
            "curriculum_learning",
            "data_efficiency",
            "compression_training",
            "quantize_training",
            "weight_quantization",
            "sparse_attention",
            "progressive_layer_drop",
            "eigenvalue",
            "hybrid_engine",
            "expert_parallel",
            "pipeline",
            "nebula",
        ),
        OFF_SECTION,
    ),
    "compile": Accept((False, {}), switches=("enabled", "deepcompile")),
    "tensor_parallel": Accept((0, 1, {}), switches=("autotp_size",)),
    **dict.fromkeys(
        (
            "prescale_gradients",
            "sparse_gradients",
            "use_data_before_expert_parallelism",
            "disable_python_gc",
            "graph_harvesting",
        ),
        OFF,
    ),
    "communication_data_type": FP32,
    "seq_parallel_communication_data_type": FP32,
    "sequence_parallel_size": Accept((1,)),
    "gradient_predivide_factor": Accept((1,)),
    "gradient_allreduce_op": Accept(("mean",)),
    "managed_gradient_accumulation": Accept((True,)),
}

ZERO: Table = {
    **{
        key: Accept(option=key)
        for key in DeepSpeedConfig.model_fields
        if key.startswith("stage3_") or key.endswith("_size") or key in ("overlap_comm", "contiguous_gradients")
    },
    "stage": Accept(option="zero_stage"),
    **dict.fromkeys(
        (
            "gather_16bit_weights_on_model_save",
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
        ),
        "checkpoints open in every layout, and `shoal checkpoint export` writes 16 bits",
    ),
    "load_from_fp32_weights": "weights are always loaded in fp32",
    "elastic_checkpoint": "checkpoints open on any number of ranks",
    "allgather_partitions": "weights are always gathered this way",
    "reduce_scatter": "gradients are always summed this way",
    "ignore_unused_parameters": "a parameter without a gradient is refused",
    "round_robin_gradients": "it only changes which rank sums what",
    "use_multi_rank_bucket_allreduce": "it only changes which rank sums what",
    "parameter_alignment": "it only changes where parameters lie in memory",
    "cpu_offload_use_pin_memory": "memory is pinned if there is a GPU",
    "memory_efficient_linear": "it is always on under stage 3",
    "pipeline_loading_checkpoint": "shoal loads its own checkpoints",
    "override_module_apply": "shoal draws weights by name",
    "log_trace_cache_warnings": "the report at step 1 shows what matters",
    "enable_sanity_checks": "use `shoal verify`",
    "legacy_stage1": "newer versions of DeepSpeed do not have it",
    "stage3_model_persistence_threshold": "stage3_param_persistence_threshold alone decides",
    "stage3_module_granularity_threshold": "modules are gathered one by one",
    "stage3_use_all_reduce_for_fetch_params": "weights are always gathered by all-gather",
    "stage3_allgather_sequential": "weights are always gathered by all-gather",
    "cpu_offload": Accept((True, False), "should be true or false", "offload_optimizer", {True: "cpu"}.get),
    **dict.fromkeys(
        ("cpu_offload_param", "cpu_offload_params"),
        Accept((True, False), "should be true or false", "offload_parameters", {True: "cpu"}.get),
    ),
    **dict.fromkeys(
        (
            "zero_quantized_weights",
            "zero_quantized_nontrainable_weights",
            "zero_quantized_gradients",
            "mics_hierarchical_params_gather",
            "save_muon_momentum_buffer_in_memory",
        ),
        OFF,
    ),
    "zenflow": OFF_SECTION,
    "zero_hpz_partition_size": Accept((1,)),
    "mics_shard_size": Accept((-1,)),
    "compute_grad_norm": Accept((True,)),
}

OFFLOAD: Table = {
    "pin_memory": "memory is pinned if there is a GPU",
    "buffer_count": "shoal makes as many buffers as the model needs",
    "buffer_size": "shoal makes buffers as large as the model needs",
    "max_in_cpu": "everything that is offloaded to a disk stays there",
    **dict.fromkeys(
        ("pipeline", "pipeline_read", "pipeline_write"), "reads and writes do not overlap with optimizer steps"
    ),
    "fast_init": "weights are drawn or read before they are offloaded",
    "cpuadam_cores_perc": "the optimizer is torch's",
    "ratio": Accept((1,), "needs DeepSpeed's own optimizers; leave it out"),
    "super_offload": Accept((False,), "needs DeepSpeed's own optimizers; leave it out"),
}

HALF_PRECISION: dict[str, Table] = {
    "fp16": {
        "auto_cast": "shoal casts the inputs of matrix products itself",
        "fp16_master_weights_and_grads": OFF,
        **dict.fromkeys(
            (
                "loss_scale",
                "initial_scale_power",
                "loss_scale_window",
                "hysteresis",
                "consecutive_hysteresis",
                "min_loss_scale",
            ),
            "shoal scales the loss itself under fp16: 2**16 at first, half after an overflow, double after 2000 steps",
        ),
    },
    "bf16": {
        "immediate_grad_update": "gradients are summed in fp32",
        "check_grad_overflow": "an update whose gradient is not finite is always skipped",
        "bf16_master_weights_and_grads": OFF,
        "bf16_optimizer_states": OFF,
    },
}

OPTIMIZERS = {"Adam": "adamw", "AdamW": "adamw", "SGD": "sgd"}
"""shoal's names of DeepSpeed's optimizers. Its Adam decays weights as AdamW does, unless `adam_w_mode` is false."""
OPTIMIZER_PARAMS: Table = {
    "adam_w_mode": Accept((True,), "is Adam with the weight decay in the gradient, not AdamW"),
    "bias_correction": Accept((True,), "is another Adam, which shoal does not have; leave it out"),
    "amsgrad": OFF,
    **dict.fromkeys(("torch_adam", "fused", "foreach"), "the optimizer is torch's, fused"),
    "fp32_optimizer_states": "optimizer states are always fp32",
}

SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear to 0", "WarmupCosineLR": "cosine"}
"""shoal's names of DeepSpeed's schedules."""
SCHEDULE_DEFAULTS = {"warmup_type": "log", "warmup_num_steps": 1000, "cos_min_ratio": 0.0001}
"""The values that DeepSpeed takes for keys that a schedule leaves out."""


def idle_keys(stage: int) -> dict[str, str]:
    """Returns the keys of `distributed.deepspeed` that have no effect at a ZeRO stage, and why."""
    if stage == 3:
        return {"allgather_bucket_size": "ZeRO stage 3 gathers weights when they are needed"}
    only_stage_3 = [key for key in DeepSpeedConfig.model_fields if key.startswith("stage3_") or key == "sub_group_size"]
    return dict.fromkeys(only_stage_3, f"it is for ZeRO stage 3, and the stage is {stage}")


def keys_of_offload(section: Any, option: str) -> Table:
    """Returns the entries of `offload_optimizer` or `offload_param`, whose device and path are one key of shoal's."""
    path = section.get("nvme_path") if isinstance(section, dict) and section.get("device") == "nvme" else None
    devices = ("nvme",) if isinstance(path, str) and path != AUTO else ("none", "cpu")
    why = "should be none, cpu, or nvme with nvme_path, a folder on a local disk"
    folder = Accept(option=option, convert=lambda path: str(Path(path).expanduser().absolute()))
    return {
        **OFFLOAD,
        "device": Accept(devices, why, option, {"cpu": "cpu"}.get),
        "nvme_path": "the device is not nvme" if path is None else folder,
    }


def keys_of_half_precision(key: str, precision: str) -> Table:
    """Returns the entries of `fp16` and `bf16`, which have to agree with the run's key for the precision."""
    return {
        block: {"enabled": same_as(f"{key} = {precision}", half == precision), **HALF_PRECISION[half]}
        for block, half in (("fp16", "fp16"), ("bf16", "bf16"), ("bfloat16", "bf16"))
    }


def keys_of_loop(mixed_precision: str) -> Table:
    """Returns the entries of keys that a hand-written loop decides: batches, optimizer, schedule."""
    loop = "your own loop decides it"
    refused = Accept((), "is for `shoal train`; in a loop of your own leave it out, or say auto")
    return {
        "train_batch_size": refused,
        "gradient_accumulation_steps": refused,
        "train_micro_batch_size_per_gpu": refused,
        "gradient_clipping": refused,
        "optimizer": {"type": loop, "params": {"*": loop}, "legacy_fusion": loop},
        "scheduler": {"type": loop, "params": {"*": loop}},
        **keys_of_half_precision("mixed_precision", mixed_precision),
    }


def keys_of_run(training: TrainingConfig, processes: int) -> Table:
    """Returns the entries of keys that have to agree with the run."""
    first, *later = derive_batches(training, processes)
    size, total, times = first.batch_size, first.global_batch_size, accumulation(first, processes)
    product, clip, chosen = size * times * processes, training.max_grad_norm, training.optimizer
    batch = f"the run: batch_size {size} × gradient_accumulation {times} × {processes} processes = {product}"
    batch += "" if product == total else f", cut to {total}"
    schedule = same_as(f"the run: training.gradient_accumulation is a schedule, {training.gradient_accumulation}")
    return {
        "train_batch_size": schedule if later else same_as(batch, total),
        "gradient_accumulation_steps": schedule if later else same_as(batch, times),
        "train_micro_batch_size_per_gpu": same_as(batch, size),
        "gradient_clipping": same_as(f"training.max_grad_norm = {clip}", clip or 0.0),
        "optimizer": {
            "type": same_kind("training.optimizer", chosen.name, OPTIMIZERS),
            "params": {
                "lr": same_as(f"training.learning_rate = {training.learning_rate}", training.learning_rate),
                "weight_decay": same_as(f"training.weight_decay = {training.weight_decay}", training.weight_decay),
                **{
                    key: same_as(f"training.optimizer.{key} = {value}", value) for key, value in chosen if key != "name"
                },
                **OPTIMIZER_PARAMS,
            },
            "legacy_fusion": "the optimizer is torch's, fused",
        },
        "scheduler": keys_of_schedule(training),
        **keys_of_half_precision("training.mixed_precision", training.mixed_precision),
    }


def keys_of_schedule(training: TrainingConfig) -> Table:
    """Returns the entries of `scheduler`."""
    chosen, peak, total = training.lr_scheduler, training.learning_rate, training.max_steps
    floor = chosen.min_ratio if isinstance(chosen, Decay) else None
    kind = f"linear to {floor:g}" if chosen.name == "linear" else chosen.name.removesuffix("_with_warmup")
    epochs = same_as(f"training.num_epochs = {training.num_epochs}: the run counts epochs, not steps")
    warmup = training.warmup_steps
    if warmup is None and (total is not None or not training.warmup_ratio):
        warmup = round((training.warmup_ratio or 0.0) * (total or 0))
    cosine = {"cos_min_ratio": same_as(f"training.lr_scheduler.min_ratio = {floor}", floor)}
    return {
        "type": same_kind("training.lr_scheduler", kind, SCHEDULES),
        "params": {
            "warmup_max_lr": same_as(f"training.learning_rate = {peak:g}", peak),
            "warmup_num_steps": epochs if warmup is None else same_as(f"the run's {warmup} warmup steps", warmup),
            "total_num_steps": epochs if total is None else same_as(f"training.max_steps = {total}", total),
            "warmup_type": same_as("the run, whose warmup is linear", "linear", *(["log"] if warmup == 0 else [])),
            "warmup_min_lr": same_as("the run, whose warmup begins at 0", 0),
            "warmup_min_ratio": same_as("the run, whose warmup begins at 0", 0),
            "last_batch_iteration": same_as("the run, which resumes from checkpoints", -1),
            **(cosine if chosen.name == "cosine" else {}),
        },
    }


def same_as(other: str, *values: Any) -> Accept:
    """Accepts the values that agree with `other`, which names a key of the run and its value."""
    return Accept(values, f"contradicts {other}; say auto, or make them agree")


def same_kind(key: str, kind: str, names: Mapping[str, str]) -> Accept:
    """Accepts those of DeepSpeed's names that mean what the run has; `names` has shoal's name for each."""
    read_as = ", ".join(f"{theirs} as {ours}" for theirs, ours in names.items())
    values = tuple(theirs.lower() for theirs, ours in names.items() if ours == kind)
    return Accept(values, f"contradicts {key} = {kind}; shoal reads {read_as}")
