"""The keys of `distributed:`, which say how a run is spread over processes. `shoal.config.schema` has all others."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from shoal.config.section import NonNegative, Positive, Seconds, Section, refuse_if, short_for

MeshSize = Annotated[
    int,
    Field(ge=-1),
    refuse_if(
        lambda side: side == 0, "no rank is left; use 1, or -1 for all processes that the other dimensions leave"
    ),
]
FloatType = Literal["fp32", "bf16", "fp16"]


class DDPConfig(Section):
    find_unused_parameters: bool = False
    """Allow parameters that get no gradient in a step."""
    gradient_as_bucket_view: bool = True
    """Let gradients be views of the all-reduce buckets, which saves a copy."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order."""
    bucket_cap_mb: Positive | None = None
    """Megabytes of gradients in one all-reduce. Default: 25, or a twentieth of all gradients if that is more."""
    broadcast_buffers: bool = True
    """Copy persistent buffers from rank 0 to the other ranks before each step."""


class FSDPConfig(Section):
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"] = "FULL_SHARD"
    """`FULL_SHARD` gathers the parameters of a unit for its forward and again for its backward. `SHARD_GRAD_OP` gathers
    them once and keeps them until the backward. `NO_SHARD` keeps a full replica on every rank. `HYBRID_SHARD` shards
    within groups of ranks and replicates over the groups (`distributed.mesh`)."""
    auto_wrap_policy: Literal["transformer_based", "size_based"] | None = None
    """The units whose parameters are gathered together. `transformer_based`: the blocks of the recipe's plan.
    `size_based`: modules with at least `min_num_params` parameters. Default: the blocks; without blocks the whole
    model."""
    min_num_params: Positive | None = None
    """The smallest unit of `size_based`, in parameters. Default: 100 million."""
    wrap_classes: list[str] | None = None
    """Take the modules of these classes, by class name, as units. Instead of `auto_wrap_policy`."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    param_dtype: FloatType | None = None
    """The type in which parameters are gathered. Default: bf16 for `pure_bf16`, else the type that they have."""
    reduce_dtype: FloatType | None = None
    """The type in which gradients are summed over ranks. Default: the type of the parameters, usually fp32."""
    buffer_dtype: FloatType | None = None
    """The type of floating-point buffers. Default: as the model made them."""
    reduce_every_micro_batch: bool = False
    """Sum gradients over ranks after every micro-batch instead of once per step: more communication, less memory,
    because only shards of gradients are kept."""
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST"] | None = "BACKWARD_PRE"
    """When the next unit's parameters are gathered in the backward. torch's fully_shard has `BACKWARD_PRE` only."""
    forward_prefetch: bool = False
    """Start gathering the next unit's parameters before the forward of the current unit."""
    limit_all_gathers: bool = True
    """Keep at most two units gathered at a time. torch's fully_shard always does."""

    def contradictions(self) -> Sequence[tuple[bool, str]]:
        return (
            (
                self.backward_prefetch != "BACKWARD_PRE",
                f"backward_prefetch = {self.backward_prefetch}: torch's fully_shard always gathers the next unit "
                "before a unit's backward; use BACKWARD_PRE, or leave it out",
            ),
            (
                not self.limit_all_gathers,
                "limit_all_gathers = false: torch's fully_shard always frees a unit before it gathers the one after "
                "the next; use true, or leave it out",
            ),
            (
                self.reduce_every_micro_batch and self.sharding_strategy == "NO_SHARD",
                "reduce_every_micro_batch = true saves nothing with NO_SHARD, which keeps all gradients; leave it out",
            ),
            (
                None not in (self.wrap_classes, self.auto_wrap_policy),
                f"auto_wrap_policy = {self.auto_wrap_policy} and wrap_classes = {self.wrap_classes} both choose the "
                "units; set one of them to null",
            ),
            (
                self.min_num_params is not None and self.auto_wrap_policy != "size_based",
                f"min_num_params = {self.min_num_params} needs auto_wrap_policy: size_based; add it, or leave this out",
            ),
        )


Stage = Annotated[
    Literal[1, 2, 3] | None,
    refuse_if(
        lambda stage: stage == 0,
        "stage 0 of ZeRO shards nothing; use 1, 2 or 3, or distributed.strategy: ddp",
    ),
]
Offload = Annotated[
    str,
    refuse_if(
        lambda place: not str(place).startswith(("/", "./", "../", "~")) and place not in ("none", "cpu"),
        "should be none, cpu, or the path of a folder on a local disk, such as /local/nvme",
    ),
]


class AioConfig(Section):
    block_size: Positive = 2**20
    """Bytes in one I/O request."""
    queue_depth: Positive = 8
    """Number of requests in flight."""
    intra_op_parallelism: Positive = 1
    """Number of threads that read or write one tensor."""
    single_submit: bool = False
    """Submit requests to the kernel one by one."""
    overlap_events: bool = True
    """Submit new requests while earlier ones are still running."""


class DeepSpeedConfig(Section):
    zero_stage: Stage = None
    """What ZeRO shards: 1 the optimizer state, 2 also the gradients, 3 also the weights. Default: 2."""
    offload_optimizer: Offload = "none"
    """`cpu`: keep the optimizer state and fp32 weights in host memory, and step on the CPU. A folder on a local disk,
    such as `/local/nvme`: keep them in files there (stage 3)."""
    offload_parameters: Offload = "none"
    """`cpu`: keep weights in host memory while they are not used. A folder on a local disk: keep them in files there.
    Both need stage 3."""
    aio: AioConfig = AioConfig()
    """How files are read and written if something is offloaded to a disk."""
    overlap_comm: bool | None = None
    """Sum gradients over ranks while the backward runs. Default: true for stage 3 on GPUs."""
    contiguous_gradients: bool = True
    """Copy gradients into one contiguous buffer as they are computed."""
    reduce_bucket_size: Positive | None = None
    """Elements of gradients in one reduction. Default: 25 MB of them, or a twentieth of all gradients if that is
    more."""
    allgather_bucket_size: Positive = 500_000_000
    """Elements of weights in one all-gather after an optimizer step (stages 1 and 2)."""
    sub_group_size: Positive = 1_000_000_000
    """Elements that the optimizer updates at a time (stage 3)."""
    stage3_prefetch_bucket_size: NonNegative = 50_000_000
    """Elements of weights that are gathered ahead of their use."""
    stage3_param_persistence_threshold: NonNegative = 100_000
    """Parameters with at most this many elements stay on every rank in full."""
    stage3_max_live_parameters: NonNegative = 1_000_000_000
    """The largest number of elements that are gathered at a time."""
    stage3_max_reuse_distance: NonNegative = 1_000_000_000
    """Keep weights gathered if they are used again within this many elements."""
    cpu_checkpointing: bool = False
    """Keep the inputs of checkpointed blocks in host memory. Needs `training.activation_checkpointing`."""
    config_file: str | None = None
    """The path of a DeepSpeed JSON, instead of the keys above. Its `auto` values come from the run. See
    [deepspeed.md](deepspeed.md)."""

    @property
    def stage(self) -> int:
        """The ZeRO stage, with its default."""
        return self.zero_stage or 2

    def offload_contradictions(self) -> Sequence[tuple[bool, str]]:
        """Returns pairs (condition, message) about offloading that the ZeRO stage does not support.

        They are not among the contradictions of this section, because `distributed.zero_stage` may set the stage.
        """
        return (
            (
                self.stage < 3 and self.offload_parameters != "none",
                f"offload_parameters = {self.offload_parameters}: ZeRO stage {self.stage} keeps all weights on every "
                "device; use zero_stage: 3, or offload the optimizer only",
            ),
            (
                self.stage < 3 and self.offload_optimizer not in ("none", "cpu"),
                f"offload_optimizer = {self.offload_optimizer}: ZeRO stage {self.stage} offloads to host memory only; "
                "use cpu, or zero_stage: 3",
            ),
        )


class MeshConfig(Section):
    """The number of ranks along each dimension of the mesh, outermost first. -1: all that the other dimensions
    leave."""

    pp: MeshSize = 1
    """Pipeline parallelism: stages that hold some of the layers each."""
    dp_replicate: MeshSize = 1
    """Data parallelism by replicas."""
    dp_shard: MeshSize = -1
    """Data parallelism by shards, as FSDP: each rank keeps a shard of the weights and gathers the others when it needs
    them."""
    cp: MeshSize = 1
    """Context parallelism: each rank has a part of every sequence."""
    tp: MeshSize = 1
    """Tensor parallelism: each rank has a part of every layer. Innermost, because it communicates most."""


class TensorConfig(Section):
    sequence_parallel: bool = False
    """Also split the tokens over the tensor-parallel ranks between the layers that are split: less memory for the same
    amount of communication."""


class PipelineConfig(Section):
    schedule: Literal["gpipe", "1f1b", "interleaved", "zbv"] = "1f1b"
    """The order of forwards and backwards. `gpipe`: all forwards, then all backwards. `1f1b`: one forward and one
    backward in turn. `interleaved`: 1F1B with two stages per rank. `zbv`: zero bubble, V-shaped; two stages per rank
    and a backward in two halves, so that ranks hardly wait."""


class CompressionConfig(Section):
    method: Literal["none", "fp16", "bf16", "int8", "powersgd", "topk"] = "none"
    """How gradients are compressed. `fp16`, `bf16`, `int8`: every element in fewer bits. `powersgd`: matrices as
    products of two thin ones. `topk`: the largest elements. See [slow_networks.md](slow_networks.md)."""
    rank: Annotated[
        int,
        Field(le=1 << 20),
        refuse_if(lambda rank: isinstance(rank, int) and rank < 1, "a product of thin matrices has at least rank 1"),
    ] = 8
    """The rank of `powersgd`: the number of columns of the thin matrices."""
    ratio: Annotated[
        float,
        refuse_if(
            lambda ratio: isinstance(ratio, int | float) and (-inf < ratio <= 0 or 1 < ratio < inf),
            "it is the fraction of elements that is sent; use a number above 0 and at most 1",
        ),
    ] = 0.01
    """The fraction of elements that `topk` sends of each parameter."""
    start_step: NonNegative | None = None
    """The first step with compression; gradients change much at the beginning. Default: 100 for `powersgd` and `topk`,
    else 0."""
    warm_start: bool = True
    """Let `powersgd` begin with the matrices of the last step. `false`: draw new ones in every step."""
    min_compression: Annotated[float, Field(ge=0)] = 2.0
    """Let `powersgd` and `topk` compress only parameters that become shorter by this factor."""
    error_feedback: bool | None = None
    """Add what was not sent to the gradient of the next step. Default: true for `int8`, `powersgd` and `topk`."""
    seed: NonNegative = 0
    """The seed of the first matrices of `powersgd`."""

    @property
    def first_step(self) -> int:
        """The first step with compression, with its default."""
        if self.start_step is not None:
            return self.start_step
        return 100 if self.method in ("powersgd", "topk") else 0

    @property
    def feeds_back(self) -> bool:
        """True if what was not sent is added to the next gradient."""
        return self.method not in ("fp16", "bf16") if self.error_feedback is None else self.error_feedback

    def contradictions(self) -> Sequence[tuple[bool, str]]:
        keys = sorted(self.model_fields_set)
        return (
            (
                bool(keys) and "method" not in keys,
                f"compression has {', '.join(keys)} and no method; add one, such as method: topk",
            ),
        )

    def idle_keys(self) -> dict[str, str]:
        """Returns the keys that the method does not use, with the reason."""
        users = {
            "rank": ("powersgd",),
            "warm_start": ("powersgd",),
            "seed": ("powersgd",),
            "ratio": ("topk",),
            "min_compression": ("powersgd", "topk"),
        }
        others = {} if self.method != "none" else dict.fromkeys(("start_step", "error_feedback"), ())
        why = f"the method is {self.method}"
        return {key: why for key, methods in {**users, **others}.items() if self.method not in methods}


class LocalSGDConfig(Section):
    sync_every: Positive = 16
    """Average the weights of all ranks after so many steps. In between every rank trains alone."""
    outer_lr: Annotated[float, Field(gt=0)] = 0.7
    """How far the weights move towards the average: 1 is the average itself."""
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Nesterov momentum of these moves, as in DiLoCo. 0: none."""


class DistributedConfig(Section):
    strategy: Annotated[
        Literal["auto", "single", "ddp", "ddp_spawn", "fsdp", "deepspeed", "mesh"],
        BeforeValidator(lambda name: "mesh" if name == "3d" else name),  # the name of `mesh` in older configs
    ] = "auto"
    """How the run is spread over processes. `auto`: `single` for one process, `ddp` for several. `mesh`: the product of
    dimensions in the section `mesh`. `ddp_spawn`: `ddp` whose processes the training process starts itself, without a
    launcher that restarts them; for [notebooks](notebooks.md)."""
    mesh: MeshConfig | None = None
    """The dimensions of the mesh; for the strategy `mesh`, and for `fsdp` with HYBRID_SHARD."""
    ddp: DDPConfig = DDPConfig()
    """The options of torch's DistributedDataParallel."""
    fsdp: FSDPConfig = FSDPConfig()
    """The options of torch's fully_shard (FSDP2), by the names that FSDP1 gave them."""
    tensor: TensorConfig = TensorConfig()
    """The options of tensor parallelism under the strategy `mesh`."""
    pipeline: PipelineConfig = PipelineConfig()
    """The options of pipeline parallelism under the strategy `mesh`."""
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    """The options of DeepSpeed's ZeRO, by its own names."""
    zero_stage: Stage = None
    """Short for `deepspeed.zero_stage`."""
    offload: Literal["none", "optimizer", "all"] | bool | None = None
    """`optimizer` is short for `deepspeed.offload_optimizer: cpu`; `all` also for `deepspeed.offload_parameters:
    cpu`. `true`: all that the ZeRO stage can offload, which is `optimizer` up to stage 2 and `all` in stage 3."""
    compression: Annotated[CompressionConfig, short_for("method")] = CompressionConfig()
    """Send gradients in fewer bytes over a slow network: a method, or a section. For `ddp` and for the dimension
    `dp_replicate` of the mesh. The training is no longer the same as on one device."""
    local_sgd: LocalSGDConfig | None = None
    """Exchange weights once in many steps instead of gradients in every step (DiLoCo). For `ddp`. The training is no
    longer the same as on one device."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """The backend of collectives. `auto`: NCCL on GPUs, gloo on CPUs. Ranks that share a GPU need `gloo`."""
    timeout: Seconds = 600.0
    """Seconds after which a rank that makes no progress counts as hung: the run names it and restarts. Must be longer
    than the slowest micro-batch of an evaluation, save or compilation of a rank."""
    init_timeout: Seconds = 1800.0
    """The same until all ranks have finished their first step, because models are loaded and compiled first."""
    desync_steps: Positive | None = 100
    """Check after every n-th step that replicas are equal and that ranks took the samples they should. `null`:
    never."""

    @property
    def zero(self) -> DeepSpeedConfig:
        """The section `deepspeed` with the short forms `zero_stage` and `offload` written out."""
        offload = self.offload
        if isinstance(offload, bool):
            stage = self.zero_stage or self.deepspeed.stage
            offload = ("all" if stage == 3 else "optimizer") if offload else "none"
        short = {
            "zero_stage": self.zero_stage,
            "offload_optimizer": offload and ("none" if offload == "none" else "cpu"),
            "offload_parameters": offload and ("cpu" if offload == "all" else "none"),
        }
        return self.deepspeed.model_copy(update={key: value for key, value in short.items() if value is not None})

    def contradictions(self) -> Sequence[tuple[bool, str]]:
        if self.strategy != "deepspeed":
            return ()
        long = {key: value for key, value in self.deepspeed if value != DeepSpeedConfig.model_fields[key].default}
        file = long.pop("config_file", None)
        short = {"zero_stage": self.zero_stage, "offload": self.offload}
        beside_file = [
            (
                None not in (file, value),
                f"deepspeed.config_file = {file!r} and {key} = {value!r} both set options of DeepSpeed; put it into "
                "the JSON, or leave the JSON out",
            )
            for key, value in {**short, **{f"deepspeed.{key}": value for key, value in long.items()}}.items()
        ]
        short_and_long = [
            (
                getattr(self.zero, key) != value,
                f"deepspeed.{key} = {value}, but its short form sets {getattr(self.zero, key)}; set one of them to "
                "null",
            )
            for key, value in long.items()
        ]
        offload = [(wrong, f"deepspeed.{message}") for wrong, message in self.zero.offload_contradictions()]
        return [*beside_file, *short_and_long, *offload]
