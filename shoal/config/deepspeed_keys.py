"""What each key of a DeepSpeed JSON is to shoal. `shoal.config.deepspeed_json` reads a JSON by these tables.

a text         it changes nothing here; this says who does what it is for
Only(values)   any other value would change the training, and is refused
Take(place)    it is that key of `distributed.deepspeed`
a table        it is an object with keys of its own
a function     compares it with the run
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from shoal.config.schema import AioConfig, DeepSpeedConfig


@dataclass(frozen=True)
class Only:
    values: tuple[Any, ...]
    why: str = "would change the training, and shoal has no such thing; leave it out"
    switches: tuple[str, ...] = ()
    """For an object: the key, or one of those, that is meant. An empty object is off."""


@dataclass(frozen=True)
class Take:
    place: tuple[str, ...]


Rule: TypeAlias = "str | Only | Take | Mapping[str, Rule] | Callable[[str, Any], None]"
Rules: TypeAlias = "Mapping[str, Rule]"

OFF = Only((False,))
FP32 = Only(("fp32", "float32", "float", "torch.float32"))
OFF_OBJECT = Only((False,), switches=("enabled",))

TOP: Rules = {
    "steps_per_print": "logging.every says how often the log is written",
    "wall_clock_breakdown": "logging.profile records where time goes",
    "memory_breakdown": "logging.profile records where memory goes",
    "dump_state": "the report at step 1 says what is in force",
    "flops_profiler": "the log has FLOPs and MFU",
    "comms_logger": "shoal verify counts what is exchanged",
    "tensorboard": "logging.tensorboard is for that",
    "wandb": "logging.wandb is for that",
    "csv_monitor": "logging.jsonl is for that",
    "comet": "logging has other services",
    "checkpoint": "checkpoints are shoal's own, and open in any layout",
    "autotuning": "nothing is tuned",
    "zero_allow_untested_optimizer": "shoal's optimizers are tested",
    "zero_force_ds_cpu_optimizer": "torch's optimizers step on the CPU, too",
    "disable_allgather": "DeepSpeed does not know it any more",
    "dataloader_drop_last": "no sample is dropped",
    "seed": "experiment.seed is for that",
    "log_level": "what matters is in the report",
    "timers": "logging.profile records where time goes",
    "data_types": {
        "grad_accum_dtype": FP32,
        "param_dtype": FP32,
        "buffer_dtype": FP32,
        "keep_in_fp32_modules": "buffers stay in fp32",
    },
    "activation_checkpointing": {
        "cpu_checkpointing": Take(("cpu_checkpointing",)),
        "partition_activations": "it is for model parallelism, which ZeRO is not",
        **dict.fromkeys(
            (
                "contiguous_memory_optimization",
                "number_checkpoints",
                "profile",
                "synchronize_checkpoint_boundary",
            ),
            "training.activation_checkpointing is for that",
        ),
    },
    "aio": {
        **{key: Take(("aio", key)) for key in AioConfig.model_fields},
        "thread_count": Take(("aio", "intra_op_parallelism")),
        "use_gds": Only((False,), "needs GPUDirect Storage, which shoal does not use; leave it out"),
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
        OFF_OBJECT,
    ),
    "compile": Only((False,), switches=("enabled", "deepcompile")),
    "tensor_parallel": Only((0, 1), switches=("autotp_size",)),
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
    "sequence_parallel_size": Only((1,)),
    "gradient_predivide_factor": Only((1,)),
    "gradient_allreduce_op": Only(("mean",)),
    "managed_gradient_accumulation": Only((True,)),
}

ZERO: Rules = {
    **{
        key: Take((key,))
        for key in DeepSpeedConfig.model_fields
        if key.startswith("stage3_") or key.endswith("_size") or key in ("overlap_comm", "contiguous_gradients")
    },
    "stage": Take(("zero_stage",)),
    "stage3_gather_16bit_weights_on_model_save": "checkpoints are neutral; `shoal checkpoint export` writes 16 bits",
    "stage3_gather_fp16_weights_on_model_save": "checkpoints are neutral; `shoal checkpoint export` writes 16 bits",
    "load_from_fp32_weights": "weights are always loaded in fp32",
    "elastic_checkpoint": "checkpoints open on any number of ranks",
    "allgather_partitions": "weights are always gathered so",
    "reduce_scatter": "gradients are always summed so",
    "ignore_unused_parameters": "a parameter without a gradient is refused",
    "round_robin_gradients": "it would only change who sums what",
    "use_multi_rank_bucket_allreduce": "it would only change who sums what",
    "parameter_alignment": "it would only change where parameters lie",
    "cpu_offload_use_pin_memory": "memory is pinned where there is a GPU",
    "memory_efficient_linear": "it always is under stage 3",
    "pipeline_loading_checkpoint": "checkpoints are shoal's own",
    "override_module_apply": "weights are drawn by name",
    "log_trace_cache_warnings": "what matters is in the report",
    "enable_sanity_checks": "shoal verify is for that",
    "legacy_stage1": "DeepSpeed does not know it any more",
    "stage3_model_persistence_threshold": "stage3_param_persistence_threshold alone decides",
    "stage3_module_granularity_threshold": "modules are gathered one by one",
    "stage3_use_all_reduce_for_fetch_params": "weights are always gathered so",
    "stage3_allgather_sequential": "weights are always gathered so",
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
    "zenflow": OFF_OBJECT,
    "zero_hpz_partition_size": Only((1,)),
    "mics_shard_size": Only((-1,)),
    "compute_grad_norm": Only((True,)),
}

OFFLOAD: Rules = {
    "device": Only(("none", "cpu", "nvme"), "should be cpu, nvme or none"),
    "pin_memory": "memory is pinned where there is a GPU",
    "buffer_count": "shoal makes as many buffers as the model needs",
    "buffer_size": "shoal makes buffers as large as the model needs",
    "max_in_cpu": "all that is offloaded to a disk is there",
    "nvme_path": "nothing of it is kept on NVMe",
    "pipeline": "reads and writes do not overlap with steps",
    "pipeline_read": "reads and writes do not overlap with steps",
    "pipeline_write": "reads and writes do not overlap with steps",
    "fast_init": "weights are drawn, or read, before they are offloaded",
    "cpuadam_cores_perc": "torch's own optimizer steps",
    "ratio": Only((1,), "needs DeepSpeed's own optimizers; leave it out"),
    "super_offload": Only((False,), "needs DeepSpeed's own optimizers; leave it out"),
}
OLD_OFFLOAD = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
}

HALF_BLOCKS = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
HALF: dict[str, Rules] = {
    "fp16": {
        "enabled": Only((True, False), "should be true, false or auto"),
        "auto_cast": "what products are of is cast by shoal",
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
            "the loss is scaled by shoal, from 2**16, halved by an overflow and doubled after 2000 good steps",
        ),
    },
    "bf16": {
        "enabled": Only((True, False), "should be true, false or auto"),
        "immediate_grad_update": "gradients add up in fp32",
        "check_grad_overflow": "an update whose gradient is not finite is always skipped",
        "bf16_master_weights_and_grads": OFF,
        "bf16_optimizer_states": OFF,
    },
}

OPTIMIZERS = {"Adam": "adamw", "AdamW": "adamw", "SGD": "sgd"}
"""DeepSpeed's names for ours. Its Adam decays weights as AdamW does, unless told otherwise."""
OPTIMIZER_PARAMS: Rules = {
    "adam_w_mode": Only((True,), "is Adam with decay in the gradient, not AdamW"),
    "bias_correction": Only((True,), "is another Adam, and shoal has no such thing; leave it out"),
    "amsgrad": OFF,
    "torch_adam": "the optimizer is torch's, fused",
    "fused": "the optimizer is torch's, fused",
    "foreach": "the optimizer is torch's, fused",
    "fp32_optimizer_states": "they always are",
}

SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear to 0", "WarmupCosineLR": "cosine"}
SCHEDULE_DEFAULTS = {"warmup_type": "log", "warmup_num_steps": 1000, "cos_min_ratio": 0.0001}
"""What DeepSpeed does where a schedule does not say."""
