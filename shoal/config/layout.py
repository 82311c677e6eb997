"""How a run is spread over its processes, as plain data: made from the config in one function, printed, compared.

`layout_of` holds every refusal that needs neither a model nor a device, so that a command can refuse a layout before
it starts a process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

from shoal.config.batch import accumulation, derive_batches
from shoal.config.deepspeed_json import fit_json, read_json
from shoal.config.deepspeed_keys import idle_keys
from shoal.config.importable import NOT_IMPORTABLE
from shoal.config.mesh import DIMENSIONS, check_cut, data_size, fill_mesh, micro_batches_needed, say_mesh
from shoal.config.schema import ActivationCheckpointingConfig, Config, TrainingConfig
from shoal.config.schema_distributed import (
    CompressionConfig,
    DDPConfig,
    DeepSpeedConfig,
    DistributedConfig,
    FSDPConfig,
    LocalSGDConfig,
)
from shoal.config.section import Section
from shoal.errors import UserError

Engine = Literal["plain", "ddp", "fully_shard", "deepspeed"]

_FULLY_SHARD_KEYS = (
    "sharding_strategy",
    "auto_wrap_policy",
    "min_num_params",
    "wrap_classes",
    "reduce_dtype",
    "reduce_every_micro_batch",
    "forward_prefetch",
)
"""The keys of `distributed.fsdp` that have no effect where the plain model computes."""


@dataclass(frozen=True)
class Layout:
    """How a run is spread: the sides of the mesh, the engine that computes, and what is done to the model."""

    strategy: str
    """single, ddp, fsdp, mesh or deepspeed."""
    engine: Engine
    """What exchanges gradients: nothing, DistributedDataParallel, fully_shard, or DeepSpeed."""
    mesh: Mapping[str, int]
    """The length of every side, outermost first: pp, dp_replicate, dp_shard, cp, tp."""
    ddp: DDPConfig = field(default_factory=DDPConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    zero: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    schedule: str = "1f1b"
    sequence_parallel: bool = False
    precision: str = "fp32"
    tf32: bool = False
    deterministic: bool = False
    compile: bool = False
    activation_checkpointing: ActivationCheckpointingConfig = field(default_factory=ActivationCheckpointingConfig)
    loss_chunks: int = 1
    sync_batch_norm: bool = False
    """True if BatchNorm takes its statistics over all data-parallel ranks."""
    not_in_force: Mapping[str, str] = field(default_factory=dict)
    """The keys that were set and have no effect in this layout, each with the reason."""
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    """How replicas compress gradients; the method is `none` if there is one replica."""
    local_sgd: LocalSGDConfig | None = None
    """How replicas exchange weights instead of gradients, if they do."""
    kernels: Literal["auto", "plain", "fused"] = "auto"
    """Whether modules that have a fused path use it; `auto` means on CUDA devices."""
    cuda_graphs: bool = False
    """Whether micro-batches are recorded in CUDA graphs."""
    weights_dtype: Literal["fp32", "bf16"] = "fp32"
    """The type of weights, gradients and optimizer state; with fp32, float64 parameters stay float64."""
    fp8_head: bool = False
    """Whether the head that computes the loss multiplies in fp8, too."""

    @property
    def world_size(self) -> int:
        return prod(self.mesh.values())

    @property
    def param_dtype(self) -> str:
        """The type in which fully_shard gathers parameters."""
        in_bf16 = self.precision == "pure_bf16" or self.weights_dtype == "bf16"
        return self.fsdp.param_dtype or ("bf16" if in_bf16 else "fp32")

    @property
    def is_sharded_family(self) -> bool:
        """True if parameters may be DTensors, so that norms and updates work on local parts."""
        return self.strategy in ("fsdp", "mesh")

    def as_dict(self) -> dict[str, Any]:
        """Returns what the manifest of a checkpoint says about the layout."""
        return {
            "strategy": self.strategy,
            "world_size": self.world_size,
            "data_size": data_size(self.mesh),
            "mesh": {side: size for side, size in self.mesh.items() if size > 1},
            **({"zero_stage": self.zero.stage} if self.strategy == "deepspeed" else {}),
        }


def layout_of(
    training: TrainingConfig, distributed: DistributedConfig, size: int, local_size: int, deterministic: bool = False
) -> Layout:
    """Returns the layout that a config means on `size` processes, `local_size` of them on each machine."""
    strategy = distributed.strategy
    if strategy == "auto":
        strategy = "ddp" if size > 1 else "single"
    elif strategy == "ddp_spawn":  # says how processes are started, and not what they do
        strategy = "ddp"
    zero, not_in_force = distributed.zero, dict[str, str]()
    if strategy == "deepspeed" and zero.config_file is not None:
        where = f"distributed.deepspeed.config_file {zero.config_file}"
        fitted = fit_json(read_json(zero.config_file), training, size, where)
        zero, not_in_force = DeepSpeedConfig(**fitted.options), fitted.idle
    elif strategy == "deepspeed":
        not_in_force = _changed("distributed.deepspeed", zero, idle_keys(zero.stage))
    sides = _sides(strategy, distributed, zero, size, local_size)
    layout = Layout(
        strategy,
        _engine(strategy, distributed.fsdp, training.mixed_precision, sides),
        {name: sides.get(name, 1) for name in DIMENSIONS},
        distributed.ddp,
        distributed.fsdp,
        zero,
        distributed.pipeline.schedule,
        strategy == "mesh" and distributed.tensor.sequence_parallel,
        training.mixed_precision,
        training.tf32,
        deterministic,
        training.compile,
        training.activation_checkpointing,
        training.loss_chunks,
        training.sync_batch_norm,
        not_in_force,
        distributed.compression,
        distributed.local_sgd,
        training.kernels,
        training.cuda_graphs,
        training.weights_dtype,
        training.fp8_head,
    )
    for contradictory, message in (
        *_contradictions(layout),
        *_optimizer_contradictions(training, layout),
        *_exchange_contradictions(layout),
        *_weights_contradictions(layout),
    ):
        if contradictory:
            raise UserError(message)
    layout = _without_idle_exchange(layout, not_in_force)
    if training.body and layout.mesh["pp"] > 1:
        raise UserError(
            f"distributed.mesh.pp = {layout.mesh['pp']}: a pipeline runs all micro-batches of a step at once, and "
            f"training.body = {training.body!r} computes one after another; use another layout, or the recipe's loss"
        )
    if training.body and layout.cuda_graphs:
        raise UserError(
            f"training.cuda_graphs = true records the recipe's forward and loss, and training.body = "
            f"{training.body!r} computes steps itself; leave one of them out"
        )
    if training.body and (key := _exchange_key(layout)):
        raise UserError(
            f"{key} is not for training.body = {training.body!r}, whose loop exchanges gradients in the backward; use "
            "the recipe's loss, or shoal.GradientCompressor in a loop on plain torch"
        )
    if layout.is_sharded_family and layout.engine == "plain":
        idle = dict.fromkeys(_FULLY_SHARD_KEYS, f"nothing is sharded on {say_mesh(layout.mesh)}")
        not_in_force |= _changed("distributed.fsdp", layout.fsdp, idle)
    if layout.sync_batch_norm and data_size(layout.mesh) * layout.mesh["cp"] == 1:
        not_in_force["training.sync_batch_norm"] = "there is one data-parallel rank"
    if strategy == "mesh" and layout.mesh["pp"] == 1 and layout.schedule != "1f1b":
        not_in_force["distributed.pipeline.schedule"] = "distributed.mesh.pp is 1"
    return layout


def check_layout(config: Config, recipe: Any, size: int, local_size: int) -> Layout:
    """Returns the layout of a run; refuses one that does not fit the processes, the model or the batches.

    It needs neither processes nor the model, so that a command can check before it starts anything.
    """
    layout = layout_of(config.training, config.distributed, size, local_size, config.experiment.deterministic)
    check_objectives(layout, recipe)
    names = [entry.get("name") if isinstance(entry, dict) else entry for entry in config.callbacks]
    averages = [name for name in names if name in ("ema", "swa")]
    if layout.local_sgd is not None and averages:
        raise UserError(
            f"{_exchange_key(layout)}: the callback {averages[0]} would average the weights of every rank apart; leave "
            "one of them out"
        )
    if config.training.body and (objectives := recipe.objectives()):
        raise UserError(
            f"training.body = {config.training.body.removeprefix(NOT_IMPORTABLE)!r}: the recipe has several objectives "
            f"({', '.join(objectives)}), which steps that you write yourself would not use; remove `objectives` from "
            "the recipe, or train it without a body"
        )
    if layout.loss_chunks > 1 and recipe.has_metrics:
        raise UserError(
            f"training.loss_chunks = {layout.loss_chunks}: the head gives the loss and no logits for "
            f"{type(recipe).__name__}.metrics; set it to 1, or remove metrics"
        )
    lora = getattr(recipe.config, "lora", None)
    if hasattr(lora, "target_modules"):  # a recipe of one's own may call something else so
        _check_adapters(layout, lora, getattr(recipe.config, "model", None))
    if layout.strategy == "mesh":
        check_cut(recipe, config.distributed, layout.mesh)
    data_ranks, stages, schedule = data_size(layout.mesh), layout.mesh["pp"], layout.schedule
    for phase in derive_batches(config.training, data_ranks):
        times, needed = accumulation(phase, data_ranks), micro_batches_needed(schedule, stages)
        if times < needed:
            raise UserError(
                f"distributed.mesh.pp = {stages} with schedule {schedule} needs {needed} micro-batches per step, but "
                f"training.global_batch_size {phase.global_batch_size} = batch_size {phase.batch_size} × {times} × "
                f"{data_ranks} data-parallel; lower batch_size, or use gpipe"
            )
    return layout


def _check_adapters(layout: Layout, lora: Any, model: Any) -> None:
    """Refuses what does not fit the sections `lora:` and `model:` of a recipe."""
    if layout.precision == "fp8":
        raise UserError("training.mixed_precision = fp8 replaces the layers that lora: adapts; use bf16")
    if layout.weights_dtype == "bf16":
        raise UserError(
            "training.weights_dtype = bf16 is for training all weights, and lora: trains few; leave it out, and set "
            "model.dtype: bf16 for the frozen weights"
        )
    if layout.compile and getattr(lora, "target_parameters", None):
        raise UserError(
            "training.compile = true: compiled blocks would keep every parameter of lora.target_parameters twice until "
            "their backward; leave one of them out"
        )
    dtype, trains_base = getattr(model, "dtype", None), getattr(lora, "modules_to_save", None) or lora.bias != "none"
    if layout.precision == "fp32" and dtype in ("bf16", "fp16") and trains_base:
        key = "modules_to_save" if lora.modules_to_save else f"bias = {lora.bias}"
        raise UserError(
            f"model.dtype = {dtype}: lora.{key} trains parameters in fp32 beside it, and torch multiplies the two in "
            "mixed precision alone; set training.mixed_precision: bf16, or leave model.dtype out"
        )


def check_objectives(layout: Layout, recipe: Any) -> None:
    """Refuses layouts in which a recipe's objectives cannot be taken in turn, and metrics of such a recipe."""
    names = ", ".join(recipe.objectives())
    if not names:
        return
    if recipe.has_metrics:
        raise UserError(
            f"recipe {type(recipe).__name__}: metrics is not called with several objectives ({names}), which have no "
            "one output; remove metrics, and log numbers by the hook after_step"
        )
    for is_set, setting, advice in (
        (layout.strategy in ("deepspeed", "mesh"), f"distributed.strategy = {layout.strategy}", "ddp or fsdp"),
        (layout.precision == "pure_bf16", "training.mixed_precision = pure_bf16", "bf16"),
        (layout.loss_chunks > 1, f"training.loss_chunks = {layout.loss_chunks}", "1"),
        (layout.cuda_graphs, "training.cuda_graphs = true", "false"),
        (layout.local_sgd is not None, _exchange_key(layout), "distributed.compression"),
    ):
        if is_set:
            raise UserError(
                f"{setting} is not for a recipe with several objectives ({names}), whose losses call the model as they "
                f"like; use {advice}"
            )


def _changed(name: str, section: Section, idle: Mapping[str, str]) -> dict[str, str]:
    """Returns those of the idle keys of a section that have another value than their default, with the reasons."""
    changed = section.model_dump(exclude_defaults=True)
    return {f"{name}.{key}": reason for key, reason in idle.items() if key in changed}


def _sides(
    strategy: str, distributed: DistributedConfig, zero: DeepSpeedConfig, size: int, local_size: int
) -> Mapping[str, int]:
    if strategy == "single" and size > 1:
        raise UserError(f"distributed.strategy = single: {size} processes were started; use ddp, or start one process")
    wanted = distributed.mesh.model_dump() if distributed.mesh else None
    if strategy == "mesh":
        if wanted is None:
            raise UserError("distributed.strategy = mesh needs distributed.mesh, such as {pp: 2, dp_shard: -1, tp: 2}")
        return fill_mesh(wanted, size)
    if strategy == "fsdp":
        return _fsdp_sides(distributed.fsdp.sharding_strategy, wanted, size, local_size)
    return {"dp_shard" if strategy == "deepspeed" and zero.stage == 3 else "dp_replicate": size}


def _fsdp_sides(sharding: str, wanted: Mapping[str, int] | None, size: int, local_size: int) -> Mapping[str, int]:
    given = dict(wanted or {})
    for side in ("pp", "cp", "tp"):
        if (length := given.pop(side, 1)) != 1:
            raise UserError(f"distributed.mesh.{side} = {length} is not for strategy fsdp; use mesh")
    if sharding == "HYBRID_SHARD":
        # As FSDP has always meant it: shards within a machine, replicas over machines.
        sides = fill_mesh(given or {"dp_replicate": size // local_size, "dp_shard": local_size}, size)
        if min(sides.values()) < 2 and size > 1:
            raise UserError(
                f"distributed.fsdp.sharding_strategy = HYBRID_SHARD on {sides['dp_replicate']} replicas × "
                f"{sides['dp_shard']} shards is not hybrid; set distributed.mesh, such as {{dp_replicate: 2, "
                "dp_shard: -1}, or use FULL_SHARD or NO_SHARD"
            )
        return sides
    implied = {"dp_replicate": size, "dp_shard": 1} if sharding == "NO_SHARD" else {"dp_replicate": 1, "dp_shard": size}
    if given and fill_mesh(given, size) != implied:
        raise UserError(
            f"distributed.mesh = {given} is not what sharding_strategy {sharding} means on {size} processes; use "
            "HYBRID_SHARD, or leave the mesh out"
        )
    return implied


def _engine(strategy: str, fsdp: FSDPConfig, precision: str, sides: Mapping[str, int]) -> Engine:
    """Chooses the engine. With one data-parallel rank it is plain, because fully_shard would only add copies."""
    if strategy == "deepspeed":
        return "deepspeed"
    ranks = prod(sides.get(side, 1) for side in ("dp_replicate", "dp_shard", "cp"))
    if strategy in ("fsdp", "mesh"):
        in_fp32 = (fsdp.param_dtype or "fp32") == "fp32" and precision != "pure_bf16"
        return "plain" if ranks == 1 and in_fp32 and not fsdp.cpu_offload else "fully_shard"
    return "ddp" if ranks > 1 else "plain"


def _optimizer_contradictions(training: TrainingConfig, layout: Layout) -> Sequence[tuple[bool, str]]:
    """Returns pairs (condition, message) about optimizers that a layout does not support.

    Other optimizers are tried out when they are built.
    """
    name, mesh = training.optimizer.name, layout.mesh
    splits = layout.is_sharded_family and mesh["dp_shard"] * mesh["cp"] * mesh["tp"] > 1
    where = f"training.optimizer = {name} is not for distributed.strategy = {layout.strategy}"
    reasons = {
        "adagrad": "DeepSpeed takes no optimizer that has state before its first step",
        "adafactor": "DeepSpeed steps flat parts of parameters, and it looks at whole tensors",
        "muon": "DeepSpeed steps flat parts of parameters, and it looks at whole matrices",
        **dict.fromkeys(
            ("adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion_8bit"),
            "DeepSpeed takes state that is tensors alone, and bitsandbytes counts steps in a number",
        ),
    }
    return (
        (
            layout.strategy == "deepspeed" and name in reasons,
            f"{where}: {reasons.get(name)}; use another optimizer, or strategy ddp{' or fsdp' * name.endswith('bit')}",
        ),
        (
            splits and name == "adafactor",
            f"{where}, which splits parameters: it looks at whole tensors; use another optimizer, strategy ddp, or "
            "sharding_strategy NO_SHARD",
        ),
    )


def _exchange_contradictions(layout: Layout) -> Sequence[tuple[bool, str]]:
    """Returns pairs (condition, message) about compression and local_sgd in layouts that cannot have them."""
    strategy, mesh, local_sgd = layout.strategy, layout.mesh, layout.local_sgd
    several, sharding = layout.world_size > 1, layout.fsdp.sharding_strategy
    compression = f"distributed.compression = {layout.compression.method}"
    local = f"distributed.local_sgd.sync_every = {local_sgd.sync_every if local_sgd else 0}"
    is_deepspeed, compresses = strategy == "deepspeed", layout.compression.method != "none"
    return (
        (
            compresses and is_deepspeed,
            f"{compression}: DeepSpeed exchanges gradients itself, and shoal keeps its own option for that, "
            "communication_data_type, at fp32; use distributed.strategy: ddp",
        ),
        (
            compresses and layout.is_sharded_family and several and mesh["dp_replicate"] == 1,
            f"{compression}: {strategy} {sharding if strategy == 'fsdp' else ''}".rstrip()
            + " has no replicas here, and fully_shard exchanges shards; set distributed.fsdp.reduce_dtype: bf16, "
            "use HYBRID_SHARD or distributed.mesh.dp_replicate, or distributed.strategy: ddp",
        ),
        (
            compresses and mesh["pp"] > 1,
            f"{compression}: a pipeline (distributed.mesh.pp = {mesh['pp']}) exchanges gradients itself; use a mesh "
            "without pp, or leave it out",
        ),
        (
            compresses and layout.is_sharded_family and layout.fsdp.cpu_offload,
            f"{compression}: distributed.fsdp.cpu_offload = true keeps gradients in host memory; leave one of them out",
        ),
        (
            compresses and local_sgd is not None,
            f"{compression}: distributed.local_sgd exchanges weights, and no gradients; leave one of them out",
        ),
        (
            local_sgd is not None and several and strategy != "ddp",
            f"{local}: every rank trains a whole model alone, which {strategy} does not have; use "
            "distributed.strategy: ddp",
        ),
        (
            local_sgd is not None and several and layout.sync_batch_norm,
            f"{local}: training.sync_batch_norm = true exchanges statistics in every step; leave one of them out",
        ),
        (
            local_sgd is not None and several and layout.precision == "fp16",
            f"{local}: every rank would have a loss scale of its own; use training.mixed_precision: bf16",
        ),
    )


def _weights_contradictions(layout: Layout) -> Sequence[tuple[bool, str]]:
    """Returns pairs (condition, message) about layouts that cannot train weights in bf16."""
    is_bf16, where = layout.weights_dtype == "bf16", "training.weights_dtype = bf16"
    return (
        (
            is_bf16 and layout.strategy == "deepspeed",
            f"{where} is not for strategy deepspeed, which keeps fp32 weights; use ddp or fsdp",
        ),
        (
            is_bf16 and layout.is_sharded_family and layout.fsdp.param_dtype == "fp32",
            f"{where}, but distributed.fsdp.param_dtype = fp32 would gather them in fp32; leave that out",
        ),
        (
            is_bf16 and layout.world_size > 1 and bool(_exchange_key(layout)),
            f"{where} is not for {_exchange_key(layout)}, which adds small differences to weights or gradients without "
            "stochastic rounding; leave one of them out",
        ),
    )


def _exchange_key(layout: Layout) -> str:
    """Returns the key that changes how replicas exchange, with its value, or an empty text."""
    if layout.local_sgd is not None:
        return f"distributed.local_sgd.sync_every = {layout.local_sgd.sync_every}"
    method = layout.compression.method
    return f"distributed.compression = {method}" if method != "none" else ""


def _without_idle_exchange(layout: Layout, not_in_force: dict[str, str]) -> Layout:
    """Returns the layout without compression and local_sgd if there is one replica; notes the keys without effect."""
    alone = "there is one replica, which exchanges nothing"
    if layout.mesh["dp_replicate"] == 1:
        if layout.compression.method != "none":
            not_in_force["distributed.compression"] = alone
        if layout.local_sgd is not None:
            not_in_force["distributed.local_sgd"] = alone
        return replace(layout, compression=CompressionConfig(), local_sgd=None)
    not_in_force |= _changed("distributed.compression", layout.compression, layout.compression.idle_keys())
    return layout


def _contradictions(layout: Layout) -> Sequence[tuple[bool, str]]:
    """Returns pairs (condition, message), as a section does. The message of the first condition that is true is raised.

    Only strategy `mesh` has pipeline stages and tensor parallelism, so that conditions on them do not name it.
    """
    strategy, precision, fsdp, zero, mesh = layout.strategy, layout.precision, layout.fsdp, layout.zero, layout.mesh
    half = {"pure_bf16": "bf16", "fp8": "bf16"}.get(precision, precision)
    has_stages, is_deepspeed = mesh["pp"] > 1, strategy == "deepspeed"
    makes_all_gradients_at_once = {
        "training.compile = true": layout.compile,
        f"training.loss_chunks = {layout.loss_chunks}": layout.loss_chunks > 1,
        f"distributed.mesh.tp = {mesh['tp']}": mesh["tp"] > 1,
    }
    return (
        (
            precision == "pure_bf16" and strategy in ("single", "ddp"),
            f"training.mixed_precision = pure_bf16 needs fp32 weights beside the bf16 ones, and {strategy} does "
            "not keep them; use distributed.strategy: fsdp (on one process too; NO_SHARD is ddp's layout), or bf16",
        ),
        (
            layout.is_sharded_family and layout.param_dtype not in ("fp32", half),
            f"distributed.fsdp.param_dtype = {layout.param_dtype}, but training.mixed_precision = {precision} "
            f"computes in {half}; leave it out or make them agree",
        ),
        (
            layout.is_sharded_family and precision == "pure_bf16" and layout.param_dtype == "fp32",
            "training.mixed_precision = pure_bf16 gathers parameters in bf16, but distributed.fsdp.param_dtype = "
            "fp32; leave that out, or use mixed_precision: bf16",
        ),
        (
            strategy == "mesh" and fsdp.sharding_strategy not in ("FULL_SHARD", "SHARD_GRAD_OP"),
            f"distributed.fsdp.sharding_strategy = {fsdp.sharding_strategy}: under strategy mesh the mesh says "
            "which ranks shard and which replicate; set dp_replicate and dp_shard, and leave it out",
        ),
        *(
            (
                has_stages and layout.schedule == "zbv" and is_set,
                f"distributed.pipeline.schedule = zbv runs a backward in two halves, but {setting} makes all "
                "gradients at once; use interleaved",
            )
            for setting, is_set in makes_all_gradients_at_once.items()
        ),
        (
            has_stages and fsdp.reduce_every_micro_batch,
            "distributed.fsdp.reduce_every_micro_batch = true: a pipeline sums gradients over ranks after its last "
            "micro-batch; leave it out",
        ),
        (
            layout.sequence_parallel and mesh["tp"] == 1,
            "distributed.tensor.sequence_parallel = true is a way of tensor parallelism, but distributed.mesh.tp = 1; "
            "leave it out",
        ),
        *(
            (
                layout.sync_batch_norm and is_set,
                f"training.sync_batch_norm = true is not for {setting}; use ddp or fsdp, or leave it out",
            )
            for setting, is_set in {
                f"pipelines (distributed.mesh.pp = {mesh['pp']})": has_stages,
                "distributed.tensor.sequence_parallel = true": layout.sequence_parallel,
                "strategy deepspeed": is_deepspeed,
            }.items()
        ),
        (
            layout.cuda_graphs and (layout.engine != "plain" or layout.world_size > 1),
            f"training.cuda_graphs = true records steps of one process by itself, and this is strategy {strategy}"
            f"{f' on {layout.world_size} processes' * (layout.world_size > 1)}; use single on one, or leave it out",
        ),
        (
            layout.cuda_graphs and layout.activation_checkpointing.offload,
            "training.activation_checkpointing.offload = true copies to host memory, which training.cuda_graphs = true "
            "cannot record; leave one of them out",
        ),
        (
            is_deepspeed and precision not in ("fp32", "bf16", "fp16"),
            f"training.mixed_precision = {precision} is not for strategy deepspeed; use bf16, or strategy fsdp",
        ),
        (
            is_deepspeed and zero.cpu_checkpointing and layout.activation_checkpointing.mode == "none",
            "distributed.deepspeed.cpu_checkpointing = true keeps the inputs of recomputed blocks on the host, but "
            "training.activation_checkpointing = none recomputes nothing; use full",
        ),
        (
            layout.activation_checkpointing.offload and is_deepspeed and zero.cpu_checkpointing,
            "training.activation_checkpointing.offload = true and distributed.deepspeed.cpu_checkpointing = true move "
            "the same tensors; leave one of them out",
        ),
        (
            is_deepspeed and zero.cpu_checkpointing and layout.compile,
            "distributed.deepspeed.cpu_checkpointing = true cannot reach into compiled blocks; set training.compile to "
            "false",
        ),
    )
