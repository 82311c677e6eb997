"""DeepSpeed's own JSON, as people have it: what of it is ours, what has to agree with the run, what has no effect.

"auto"             is filled from the run
batch, clipping,   have to say what the run says; a contradiction is refused with both values
types, optimizer,
schedule
zero_optimization  becomes the keys of `distributed.deepspeed`
the rest           is about things that shoal does itself, and is reported as idle, or refused if it changes results
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal.config.batch import accumulation, derive_batches
from shoal.config.schema import SGD, AdamW, AioConfig, Decay, DeepSpeedConfig, TrainingConfig
from shoal.errors import UserError

AUTO = "auto"
ELSEWHERE = {
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
    "data_types": "gradients add up, and buffers stay, in fp32",
}
"""Top-level keys that change nothing, and who does what they are for."""

ZERO_ELSEWHERE = {
    "stage3_gather_16bit_weights_on_model_save": "checkpoints are neutral; `shoal checkpoint export` writes 16 bits",
    "stage3_gather_fp16_weights_on_model_save": "checkpoints are neutral; `shoal checkpoint export` writes 16 bits",
    "load_from_fp32_weights": "weights are always loaded in fp32",
    "elastic_checkpoint": "checkpoints open on any number of ranks",
    "allgather_partitions": "weights are always gathered so",
    "reduce_scatter": "gradients are always summed so",
    "ignore_unused_parameters": "a parameter without a gradient is refused",
    "round_robin_gradients": "it would only change who sums what",
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
}
OFFLOAD_ELSEWHERE = {
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
}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "prescale_gradients": (False, None),
    "gradient_predivide_factor": (1, None),
    "communication_data_type": ("fp32", None),
    "gradient_allreduce_op": ("mean", None),
    "sparse_gradients": (False, None),
    "amp": (False, None),
    "zero_hpz_partition_size": (1, None),
    "zero_quantized_weights": (False, None),
    "zero_quantized_nontrainable_weights": (False, None),
    "zero_quantized_gradients": (False, None),
    "zenflow": (None,),
    "elasticity": (False, None),
    "curriculum_learning": (False, None),
    "data_efficiency": (False, None),
    "compression_training": (None,),
    "sparse_attention": (None,),
    "progressive_layer_drop": (False, None),
    "eigenvalue": (False, None),
    "hybrid_engine": (False, None),
    "tensor_parallel": (None,),
    "expert_parallel": (None,),
    "pipeline": (None,),
    "compile": (None,),
    "weight_quantization": (None,),
    "torch_autocast": (False, None),
    "disable_python_gc": (False, None),
    "managed_gradient_accumulation": (True, None),
}
"""What would change the training in ways that shoal has no words for: these values alone are let pass."""

ONLY_STAGE_3 = {
    *(name for name in DeepSpeedConfig.model_fields if name.startswith("stage3_")),
    "sub_group_size",
}
ONLY_BELOW_3 = {"allgather_bucket_size"}

OPTIMIZERS = {"adamw": AdamW, "adam": AdamW, "sgd": SGD}
"""DeepSpeed's names for ours. Its Adam decays weights as AdamW does, unless told otherwise."""
SCHEDULES = {"warmuplr": "constant_with_warmup", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
HALF = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}


@dataclass
class Fitted:
    """What a JSON means for a run."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keys of `distributed.deepspeed`."""
    idle: dict[str, str] = field(default_factory=dict)
    """Keys that have no effect, and why."""


def idle_keys(stage: int) -> dict[str, str]:
    """The keys of `distributed.deepspeed` that a stage has no use for."""
    if stage == 3:
        return dict.fromkeys(ONLY_BELOW_3, "ZeRO stage 3 gathers weights when they are needed")
    return dict.fromkeys(ONLY_STAGE_3, f"it is for ZeRO stage 3, and the stage is {stage}")


def read_json(path: str) -> dict[str, Any]:
    try:
        told = json.loads(Path(path).expanduser().read_text())
    except OSError as error:
        raise UserError(f"distributed.deepspeed.config_file = {path!r} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"distributed.deepspeed.config_file = {path!r} is no valid JSON: {error}") from None
    if not isinstance(told, dict):
        raise UserError(f"distributed.deepspeed.config_file = {path!r} holds a {type(told).__name__}, not an object")
    return told


def fit_json(told: dict[str, Any], training: TrainingConfig | None, processes: int, where: str) -> Fitted:
    """Compares a JSON with the run, and takes ZeRO's options from it. Without a run, only `auto` agrees with it."""
    return _Fit(training, processes, where)(told)


class _Fit:
    def __init__(self, training: TrainingConfig | None, processes: int, where: str):
        self.training, self.processes, self.where = training, processes, where
        self.fitted = Fitted()
        self.sections: dict[str, Callable[[Any], None]] = {
            "zero_optimization": self._zero,
            "optimizer": self._optimizer,
            "scheduler": self._scheduler,
            "fp16": self._half,
            "bf16": self._half,
            "bfloat16": self._half,
            "activation_checkpointing": self._recomputation,
            "aio": self._aio,
        }

    def __call__(self, told: dict[str, Any]) -> Fitted:
        agreed = {*dict(self._agreed())}
        for key, value in told.items():
            if value == AUTO or key in agreed:
                continue
            if key in self.sections:
                section = value if isinstance(value, dict) else self._refuse(key, value, "should be an object")
                self._half(section, key) if key in HALF else self.sections[key](section)
            elif key in NEUTRAL:
                self._neutral(key, value)
            elif key in ELSEWHERE:
                self.fitted.idle[key] = ELSEWHERE[key]
            else:
                known = [*agreed, *self.sections, *NEUTRAL, *ELSEWHERE]
                self._unknown(key, known)
        for key, (value, how) in self._agreed():
            self._same(key, told.get(key, AUTO), value, how)
        if "zero_optimization" not in told:
            raise UserError(f"{self.where} has no zero_optimization; without ZeRO use distributed.strategy: ddp")
        return self.fitted

    def _agreed(self) -> Iterator[tuple[str, tuple[Any, str]]]:
        """Top-level numbers: what the run says, and how it comes to that."""
        batch: Any = None
        times: Any = None
        micro = clip = None
        sums = ""
        if self.training is not None:
            phases = derive_batches(self.training, self.processes)
            (first, *_) = phases
            micro, times, batch = first.batch_size, accumulation(first, self.processes), first.global_batch_size
            sums = f"batch_size {micro} × gradient_accumulation {times} × {self.processes} processes"
            sums += f" = {micro * times * self.processes}" + (
                "" if micro * times * self.processes == batch else f", cut to {batch}"
            )
            clip = self.training.max_grad_norm or 0.0
            if len(phases) > 1:
                times = batch = f"a schedule, {self.training.gradient_accumulation}"
        yield "train_batch_size", (batch, f"the run has {sums}")
        yield "train_micro_batch_size_per_gpu", (micro, f"the run has {sums}")
        yield "gradient_accumulation_steps", (times, f"the run has {sums}")
        yield "gradient_clipping", (clip, f"training.max_grad_norm is {clip or None}")

    def _same(self, key: str, told: Any, value: Any, how: str) -> None:
        """A value has to be the run's; numbers by their size."""
        if told == AUTO or told is None:
            return
        if self.training is None:
            self._refuse(key, told, "is for a run of the trainer; in a loop of your own leave it out, or say auto")
        number = isinstance(told, int | float) and isinstance(value, int | float)
        if abs(told - value) > 1e-9 * abs(value) if number else told != value:
            self._refuse(key, told, f"contradicts the run: {how}; say auto, or make them agree")

    def _neutral(self, key: str, value: Any) -> None:
        if isinstance(value, dict):
            value = value.get("enabled", None if not value else True)
        if value != AUTO and value not in NEUTRAL[key]:
            self._refuse(key, value, "would change the training, and shoal has no such thing; leave it out")

    def _half(self, section: dict[str, Any], key: str = "") -> None:
        enabled = section.get("enabled", AUTO if section else False)
        precision = self.training.mixed_precision if self.training else None
        if enabled not in (True, False, AUTO):
            self._refuse(f"{key}.enabled", enabled, "should be true, false or auto")
        if enabled is True and precision != HALF[key] and self.training is not None:
            self._refuse(
                f"{key}.enabled",
                True,
                f"contradicts the run: training.mixed_precision is {precision}; set that to {HALF[key]}",
            )
        if enabled is False and precision == HALF[key]:
            self._refuse(
                f"{key}.enabled",
                False,
                f"contradicts the run: training.mixed_precision is {precision}; set that to fp32",
            )
        for inner in section.keys() - {"enabled"}:
            scale = "the loss is scaled by shoal, from 2**16, halved by an overflow and doubled after 2000 good steps"
            self.fitted.idle[f"{key}.{inner}"] = scale if key == "fp16" else "weights stay fp32 and products are bf16"

    def _optimizer(self, section: dict[str, Any]) -> None:
        for key in section.keys() - {"type", "params", "legacy_fusion"}:
            self._unknown(f"optimizer.{key}", ["optimizer.type", "optimizer.params"])
        kind, params = section.get("type", AUTO), section.get("params", {})
        chosen = self.training.optimizer if self.training else None
        if kind != AUTO:
            ours: Any = OPTIMIZERS.get(str(kind).lower())
            if ours is None:
                self._refuse("optimizer.type", kind, "is not one that shoal has; use AdamW or SGD, or leave it out")
            if chosen is None or not isinstance(chosen, ours):
                name = chosen.name if chosen else "your own"
                self._refuse("optimizer.type", kind, f"contradicts the run: training.optimizer is {name}")
        for key, value in (params if isinstance(params, dict) else {}).items():
            if value == AUTO:
                continue
            known = {"lr": "training.learning_rate", "weight_decay": "training.weight_decay"}
            own = {"betas": "betas", "eps": "eps", "momentum": "momentum", "nesterov": "nesterov"}
            if key in known and self.training is not None:
                ours = getattr(self.training, known[key].partition(".")[2])
                self._same(f"optimizer.params.{key}", value, ours, f"{known[key]} is {ours}")
            elif key in own and chosen is not None and hasattr(chosen, own[key]):
                ours = getattr(chosen, own[key])
                self._same(f"optimizer.params.{key}", value, ours, f"training.optimizer.{key} is {ours}")
            elif key == "adam_w_mode" and value is False:
                self._refuse("optimizer.params.adam_w_mode", value, "is Adam with decay in the gradient, not AdamW")
            elif key in ("torch_adam", "adam_w_mode", "bias_correction", "fused", "freeze_step", "cuda_aware"):
                self.fitted.idle[f"optimizer.params.{key}"] = "the optimizer is torch's, fused"
            else:
                self._unknown(f"optimizer.params.{key}", [f"optimizer.params.{k}" for k in (*known, *own)])

    def _scheduler(self, section: dict[str, Any]) -> None:
        for key in section.keys() - {"type", "params"}:
            self._unknown(f"scheduler.{key}", ["scheduler.type", "scheduler.params"])
        kind, params = section.get("type", AUTO), section.get("params", {})
        training = self.training
        chosen = training.lr_scheduler if training else None
        if kind != AUTO:
            ours = SCHEDULES.get(str(kind).lower())
            if ours is None:
                self._refuse(
                    "scheduler.type",
                    kind,
                    f"is not one that shoal has; it knows {', '.join(['WarmupLR', 'WarmupDecayLR', 'WarmupCosineLR'])}",
                )
            if chosen is None or chosen.name.replace("constant_with_warmup", "constant") != str(ours).replace(
                "constant_with_warmup", "constant"
            ):
                name = chosen.name if chosen else "your own"
                self._refuse(
                    "scheduler.type", kind, f"is {ours}, which contradicts the run: training.lr_scheduler is {name}"
                )
        if training is None:
            return
        warmup = training.warmup_steps
        if warmup is None and training.max_steps is not None:
            warmup = round((training.warmup_ratio or 0.0) * training.max_steps)
        floor = chosen.min_ratio if isinstance(chosen, Decay) else 0.0
        says: dict[str, tuple[Any, str]] = {
            "warmup_max_lr": (training.learning_rate, f"training.learning_rate is {training.learning_rate:g}"),
            "warmup_num_steps": (warmup, f"the run warms up for {warmup} steps"),
            "total_num_steps": (training.max_steps, f"training.max_steps is {training.max_steps}"),
            "warmup_type": ("linear", "warmup is linear"),
            "warmup_min_lr": (0, "warmup begins at 0"),
            "warmup_min_ratio": (0, "warmup begins at 0"),
            "cos_min_ratio": (floor, f"training.lr_scheduler.min_ratio is {floor}"),
        }
        for key, value in (params if isinstance(params, dict) else {}).items():
            if key not in says:
                self._unknown(f"scheduler.params.{key}", [f"scheduler.params.{known}" for known in says])
            self._same(f"scheduler.params.{key}", value, *says[key])

    def _recomputation(self, section: dict[str, Any]) -> None:
        for key, value in section.items():
            if key == "cpu_checkpointing":
                if value is True:
                    self.fitted.options["cpu_checkpointing"] = True
            elif key == "partition_activations" and value is True:
                self._refuse(f"activation_checkpointing.{key}", value, "needs model parallelism, which ZeRO is not")
            elif key in ("partition_activations", "contiguous_memory_optimization", "number_checkpoints", "profile",
                         "synchronize_checkpoint_boundary"):  # fmt: skip
                self.fitted.idle[f"activation_checkpointing.{key}"] = "training.activation_checkpointing is for that"
            else:
                self._unknown(f"activation_checkpointing.{key}", ["activation_checkpointing.cpu_checkpointing"])

    def _zero(self, section: dict[str, Any]) -> None:
        options = self.fitted.options
        stage = section.get("stage", 0)
        if stage == AUTO or stage not in (1, 2, 3):
            advice = "use distributed.strategy: ddp" if stage == 0 else "use 1, 2 or 3"
            self._refuse("zero_optimization.stage", stage, f"is no stage that splits anything; {advice}")
        options["zero_stage"] = stage
        idle = idle_keys(stage)
        fields = DeepSpeedConfig.model_fields
        for key, value in section.items():
            name = f"zero_optimization.{key}"
            if key == "stage":
                continue
            if key in ("offload_optimizer", "offload_param"):
                self._offload(key, value, stage)
            elif key in ("cpu_offload", "cpu_offload_params", "cpu_offload_param"):
                if value is True:
                    long = "offload_optimizer" if key == "cpu_offload" else "offload_param"
                    self._offload(long, {"device": "cpu"}, stage)
            elif key in idle:
                self.fitted.idle[name] = idle[key]
            elif key in ZERO_ELSEWHERE:
                self.fitted.idle[name] = ZERO_ELSEWHERE[key]
            elif key in NEUTRAL:
                self._neutral(key, value)
            elif key in fields and key not in ("zero_stage", "offload_parameters", "config_file", "cpu_checkpointing"):
                if value != AUTO:
                    whole = isinstance(value, float) and value.is_integer()
                    options[key] = int(value) if whole else value  # people write 5e8
            else:
                known = [*fields, *ZERO_ELSEWHERE, "offload_param", "stage"]
                self._unknown(name, [f"zero_optimization.{k}" for k in known])
        try:
            DeepSpeedConfig(**options)
        except ValidationError as error:
            first = error.errors()[0]
            self._refuse(f"zero_optimization.{first['loc'][0]}", first["input"], first["msg"].lower())

    def _offload(self, key: str, section: Any, stage: int) -> None:
        name = f"zero_optimization.{key}"
        if not isinstance(section, dict):
            self._refuse(name, section, "should be an object with a device")
        device = section.get("device", "none")
        if device in ("none", None, AUTO):
            return
        if device not in ("cpu", "nvme"):
            self._refuse(f"{name}.device", device, "should be cpu, nvme or none")
        if device == "nvme" and not isinstance(section.get("nvme_path"), str):
            self._refuse(f"{name}.device", device, "needs nvme_path, a folder on a local disk")
        if key == "offload_param" and stage < 3:
            self._refuse(
                f"{name}.device",
                device,
                f"is for stage 3: stage {stage} keeps all weights on every device; raise the stage",
            )
        if device == "nvme" and stage < 3:
            self._refuse(f"{name}.device", device, f"is for stage 3, and the stage is {stage}; use cpu")
        for inner in section.keys() - ({"device", "nvme_path"} if device == "nvme" else {"device"}):
            if inner == "ratio" and section[inner] != 1:
                self._refuse(f"{name}.ratio", section[inner], "needs DeepSpeed's own optimizers; leave it out")
            if inner not in (*OFFLOAD_ELSEWHERE, "ratio"):
                self._unknown(f"{name}.{inner}", [f"{name}.{k}" for k in ("device", *OFFLOAD_ELSEWHERE)])
            if inner in OFFLOAD_ELSEWHERE:
                self.fitted.idle[f"{name}.{inner}"] = OFFLOAD_ELSEWHERE[inner]
        place = str(Path(section["nvme_path"]).expanduser().absolute()) if device == "nvme" else "cpu"
        self.fitted.options["offload_optimizer" if key == "offload_optimizer" else "offload_parameters"] = place

    def _aio(self, section: dict[str, Any]) -> None:
        known = AioConfig.model_fields
        for key, value in section.items():
            if key == "use_gds" and value is not False:
                self._refuse("aio.use_gds", value, "needs GPUDirect Storage, which shoal does not use; leave it out")
            elif key not in (*known, "use_gds", "thread_count"):
                self._unknown(f"aio.{key}", [f"aio.{k}" for k in known])
        told = {"intra_op_parallelism" if key == "thread_count" else key: value for key, value in section.items()}
        try:
            self.fitted.options["aio"] = AioConfig(**{key: told[key] for key in known if key in told})
        except ValidationError as error:
            first = error.errors()[0]
            self._refuse(f"aio.{first['loc'][0]}", first["input"], first["msg"].lower())

    def _refuse(self, key: str, value: Any, why: str) -> Any:
        raise UserError(f"{self.where}: {key} = {json.dumps(value, default=str)} {why}")

    def _unknown(self, key: str, known: list[str]) -> None:
        nearest = get_close_matches(key, known, n=1, cutoff=0.5)
        hint = f"; did you mean {nearest[0]}?" if nearest else "; leave it out"
        raise UserError(f"{self.where}: {key} is not a key of DeepSpeed's that shoal knows{hint}")
