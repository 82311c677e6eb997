"""The sections of a run that belong to shoal. `model`, `lora` and `dataset` belong to the recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _refuse(wrong: Callable[[Any], bool], message: str) -> BeforeValidator:
    """A validator that refuses some values, whatever their type."""

    def check(value: Any) -> Any:
        if wrong(value):
            raise ValueError(message)
        return value

    return BeforeValidator(check)


def _short_for(key: str) -> BeforeValidator:
    """A validator that makes `optimizer: {name: sgd}` of `optimizer: sgd`, where the key is `name`."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Side = Annotated[
    int, Field(ge=-1), _refuse(lambda side: side == 0, "0 ranks hold nothing; use 1, or -1 for what is left")
]
Half = Literal["fp32", "bf16", "fp16"]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Closed and strict: an unknown key or a value of the wrong type is refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    def contradictions(self) -> Sequence[tuple[bool, str]]:
        """Conditions under which the values do not go together, each with its message."""
        return ()

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        for contradictory, message in self.contradictions():
            if contradictory:
                raise ValueError(message)
        return self


class ExperimentConfig(Section):
    name: Annotated[str, Field(min_length=1, pattern=r"^[^/\\]+$")] = "run"
    output_dir: str | None = None
    """The run folder; `runs/<name>` unless given."""
    seed: NotNegative = 0
    """Of the weights, the order of samples, dropout and noise."""
    deterministic: bool = False
    """Use only operations that repeat to the bit on this hardware; slower on GPUs."""


class LoaderConfig(Section):
    """The keys of `dataset:` that say how samples are fetched, whatever the recipe."""

    num_workers: NotNegative = 0
    """Processes that fetch samples ahead; 0 fetches in the training process."""
    pin_memory: bool | None = None
    """Unless given: on where the device is a GPU."""
    persistent_workers: bool = True
    """Keep the workers of the evaluation data alive between evaluations."""
    prefetch: Positive = 2
    """Micro-batches each worker fetches ahead."""


class AdamW(Section):
    name: Literal["adamw"] = "adamw"
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    eps: Annotated[float, Field(gt=0)] = 1e-8


class SGD(Section):
    name: Literal["sgd"] = "sgd"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    nesterov: bool = False


class Constant(Section):
    name: Literal["constant", "constant_with_warmup"]


class Decay(Section):
    name: Literal["linear", "cosine"]
    min_ratio: Fraction = 0.0
    """Where the learning rate ends, as a share of its peak."""


class WarmupStableDecay(Section):
    name: Literal["wsd"]
    decay_ratio: Fraction = 0.2
    """The share of the run spent decaying, at its end."""
    min_ratio: Fraction = 0.0


class ActivationCheckpointingConfig(Section):
    mode: Literal["none", "full", "selective"] = "none"
    """`full` keeps only what goes into a block; `selective` also attention and every second matrix product."""
    every: Positive = 1
    """Only every n-th block."""
    classes: list[str] | None = None
    """Modules of these classes instead of the plan's blocks."""

    def contradictions(self) -> Sequence[tuple[bool, str]]:
        unused = self.mode == "none" and bool(self.classes or self.every > 1)
        return ((unused, "`every` and `classes` have no effect with mode: none; use full or selective"),)


class TrainingConfig(Section):
    max_steps: Positive | None = None
    """Updates to make; this or `num_epochs`."""
    num_epochs: Positive | None = None
    """How often to see every sample."""

    global_batch_size: Positive | None = None
    """Samples in one update, over all devices."""
    batch_size: Positive | None = None
    """Samples in one micro-batch on one device."""
    gradient_accumulation: Positive | dict[NotNegative, Positive] | None = None
    """Micro-batches in one update on one device."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    mixed_precision: Literal["fp32", "bf16", "fp16", "pure_bf16", "fp8"] = "fp32"
    """What is computed in; the optimizer's weights and state stay fp32. `bf16` and `fp16` are for matrix products
    (autocast), `pure_bf16` is for everything, `fp8` is for the products of large linear layers and bf16 for others."""
    tf32: bool = False
    """Let fp32 matrix products on a CUDA device use TF32."""
    compile: bool = False
    """torch.compile, block by block."""
    activation_checkpointing: Annotated[ActivationCheckpointingConfig, _short_for("mode")] = (
        ActivationCheckpointingConfig()
    )
    """Recompute in the backward instead of keeping: `none`, `full`, `selective`, or a section."""
    loss_chunks: Positive = 1
    """Make logits of this many parts of a batch in turn and never of all of it, for large vocabularies."""

    optimizer: Annotated[AdamW | SGD, Field(discriminator="name"), _short_for("name")] = AdamW()
    learning_rate: Annotated[float, Field(gt=0)] = 3e-4
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Clip the gradient to this norm; `null` for none."""
    max_skipped_steps: Positive = 10
    """Stop after this many updates in a row were skipped because the gradient was not finite."""

    lr_scheduler: Annotated[Constant | Decay | WarmupStableDecay, Field(discriminator="name"), _short_for("name")] = (
        Decay(name="cosine", min_ratio=0.1)
    )
    warmup_steps: NotNegative | None = None
    """Updates until the learning rate is at its peak; this or `warmup_ratio`."""
    warmup_ratio: Fraction | None = None
    """The same as a share of all updates."""

    eval_steps: Positive | None = None
    """Evaluate every so many steps; at the end in any case, if the recipe has data for it."""
    eval_batches: Positive | None = None
    """Look at no more than this many batches of the evaluation data."""
    gc_steps: Positive = 100
    """Python's garbage collector runs only every so many steps, not whenever it likes."""

    def contradictions(self) -> Sequence[tuple[bool, str]]:
        ends, warmups = (self.max_steps, self.num_epochs), (self.warmup_steps, self.warmup_ratio)
        return (
            (
                None not in ends,
                f"max_steps = {self.max_steps} and num_epochs = {self.num_epochs} both say when to stop; "
                "set one of them to null",
            ),
            (ends == (None, None), "say when to stop: give max_steps or num_epochs"),
            (
                None not in warmups,
                f"warmup_steps = {self.warmup_steps} and warmup_ratio = {self.warmup_ratio} say the same thing twice; "
                "set one of them to null",
            ),
            (
                self.lr_scheduler.name == "constant" and any(warmups),
                "lr_scheduler 'constant' has no warmup; use 'constant_with_warmup'",
            ),
        )


class DDPConfig(Section):
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    bucket_cap_mb: Positive | None = None
    """How much gradient is sent at once. Unless given: 25, or a twentieth of all gradients if that is more."""
    broadcast_buffers: bool = True


class FSDPConfig(Section):
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"] = "FULL_SHARD"
    """`FULL_SHARD` gathers a unit's parameters for its forward and again for its backward, `SHARD_GRAD_OP` keeps them
    in between, `NO_SHARD` keeps whole replicas, `HYBRID_SHARD` shards within replicas (see `distributed.mesh`)."""
    auto_wrap_policy: Literal["transformer_based", "size_based"] | None = None
    """What is gathered at once: the plan's blocks, or modules of at least `min_num_params`. Unless given: the blocks
    where there are any, else the whole model."""
    min_num_params: Positive | None = None
    """For `size_based`; 100 million unless given."""
    wrap_classes: list[str] | None = None
    """The classes of the modules that are gathered at once, instead of a policy."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in the host's memory."""
    param_dtype: Half | None = None
    """What parameters are gathered in. Unless given: bf16 for `pure_bf16`, else fp32."""
    reduce_dtype: Half | None = None
    """What gradients are summed over ranks in. Unless given: fp32."""
    buffer_dtype: Half | None = None
    """What floating-point buffers are kept in. Unless given: as the model made them."""
    reduce_every_micro_batch: bool = False
    """Sum gradients over ranks after every micro-batch: more to send, but only shards of them to keep."""
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST"] | None = "BACKWARD_PRE"
    """When a unit's backward begins, the next one's parameters are asked for: BACKWARD_PRE, all that torch has."""
    forward_prefetch: bool = False
    """Ask for the next unit's parameters before this unit's forward is even issued."""
    limit_all_gathers: bool = True
    """Never more than two units gathered at once, which is always so."""

    def contradictions(self) -> Sequence[tuple[bool, str]]:
        return (
            (
                self.backward_prefetch != "BACKWARD_PRE",
                f"backward_prefetch = {self.backward_prefetch}, but torch's fully_shard always asks for the next unit "
                "before a unit's backward; use BACKWARD_PRE or leave it out",
            ),
            (
                not self.limit_all_gathers,
                "limit_all_gathers = false, but torch's fully_shard frees a unit before it gathers the one after the "
                "next and cannot do otherwise; use true or leave it out",
            ),
            (
                self.reduce_every_micro_batch and self.sharding_strategy == "NO_SHARD",
                "reduce_every_micro_batch saves nothing with NO_SHARD, where all gradients stay; leave it out",
            ),
            (
                None not in (self.wrap_classes, self.auto_wrap_policy),
                f"auto_wrap_policy = {self.auto_wrap_policy} and wrap_classes = {self.wrap_classes} both choose the "
                "units; set one of them to null",
            ),
            (
                self.min_num_params is not None and self.auto_wrap_policy != "size_based",
                f"min_num_params = {self.min_num_params} is for auto_wrap_policy: size_based; add that or leave it out",
            ),
        )


Stage = Annotated[
    Literal[1, 2, 3] | None,
    _refuse(
        lambda stage: stage == 0,
        "stage 0 splits nothing, which is distributed.strategy: ddp; use that, or 1, 2 or 3",
    ),
]
Offload = Annotated[
    str,
    _refuse(
        lambda place: not str(place).startswith(("/", "./", "../", "~")) and place not in ("none", "cpu"),
        "should be none, cpu, or a folder on a local disk, such as /local/nvme",
    ),
]


class AioConfig(Section):
    block_size: Positive = 2**20
    """Bytes of one request."""
    queue_depth: Positive = 8
    """Requests that are under way at once."""
    intra_op_parallelism: Positive = 1
    """Threads that share one tensor."""
    single_submit: bool = False
    """Hand requests to the kernel one by one."""
    overlap_events: bool = True
    """Hand over new requests while others are waited for."""


class DeepSpeedConfig(Section):
    zero_stage: Stage = None
    """What ranks split: 1 the optimizer, 2 the gradients too, 3 the weights too. 2 unless given."""
    offload_optimizer: Offload = "none"
    """`cpu`: keep optimizer and fp32 weights in the host's memory, and step there. A folder on a local disk, such as
    `/local/nvme`: keep them in files; stage 3."""
    offload_parameters: Offload = "none"
    """`cpu`: keep weights in the host's memory while they are not computed with; or a folder on a local disk. For stage
    3."""
    aio: AioConfig = AioConfig()
    """How files are read and written, where something is offloaded to a disk."""
    overlap_comm: bool | None = None
    """Send gradients while the backward goes on. Unless given: under stage 3 on GPUs."""
    contiguous_gradients: bool = True
    """Copy gradients into one buffer as they come."""
    reduce_bucket_size: Positive | None = None
    """Elements of gradients that are summed at once. Unless given: 25 MB of them, or a twentieth of all if that is
    more."""
    allgather_bucket_size: Positive = 500_000_000
    """Elements of weights that are gathered at once after a step of stage 1 or 2."""
    sub_group_size: Positive = 1_000_000_000
    """Elements that the optimizer steps at once; stage 3."""
    stage3_prefetch_bucket_size: NotNegative = 50_000_000
    """Elements of weights that are asked for ahead."""
    stage3_param_persistence_threshold: NotNegative = 100_000
    """Parameters with at most so many elements stay whole on every rank, too."""
    stage3_max_live_parameters: NotNegative = 1_000_000_000
    """Elements that may be gathered at any moment."""
    stage3_max_reuse_distance: NotNegative = 1_000_000_000
    """Weights that are used again within so many elements stay gathered."""
    cpu_checkpointing: bool = False
    """Keep what goes into a block that is recomputed in the host's memory; with `training.activation_checkpointing`."""
    config_file: str | None = None
    """A DeepSpeed JSON instead of the keys above. What it says `auto` for comes from the run."""

    @property
    def stage(self) -> int:
        return self.zero_stage or 2

    def why_not_offload(self) -> str | None:
        """What the stage cannot do of what is asked for. The JSON may still say the stage."""
        if self.stage < 3 and self.offload_parameters != "none":
            return (
                f"offload_parameters = {self.offload_parameters}, but ZeRO stage {self.stage} keeps all weights on "
                "every device; use zero_stage: 3, or offload the optimizer alone"
            )
        if self.stage < 3 and self.offload_optimizer not in ("none", "cpu"):
            return (
                f"offload_optimizer = {self.offload_optimizer}, but ZeRO stage {self.stage} offloads to the host's "
                "memory alone; use cpu, or zero_stage: 3"
            )
        return None


class MeshConfig(Section):
    """How many ranks lie along each dimension, outermost first; -1 is what is left of the world."""

    pp: Side = 1
    """Pipeline: stages, each with some of the layers."""
    dp_replicate: Side = 1
    """Replicas, each with its share of the batch."""
    dp_shard: Side = -1
    """Shards: the same, but each rank keeps only its part of the weights and gathers the rest while it computes."""
    cp: Side = 1
    """Context: parts of every sequence."""
    tp: Side = 1
    """Tensor: parts of every layer. Innermost, because it exchanges most."""


class TensorConfig(Section):
    sequence_parallel: bool = False
    """Between the layers that tensor parallelism cuts, keep each token on one of its ranks: less memory, the same
    amount to exchange."""


class PipelineConfig(Section):
    schedule: Literal["gpipe", "1f1b", "interleaved", "zbv"] = "1f1b"
    """In which order a rank runs forwards and backwards: all forwards first, one of each in turn, the same with two
    stages per rank, or those with backwards in two halves so that nobody waits (zero bubble, V-shaped)."""


class DistributedConfig(Section):
    strategy: Annotated[
        Literal["auto", "single", "ddp", "fsdp", "deepspeed", "mesh"],
        BeforeValidator(lambda name: "mesh" if name == "3d" else name),  # the name of `mesh` in older configs
    ] = "auto"
    """`auto` is `single` for one process and `ddp` for several; `mesh` is any product that the section `mesh` says."""
    mesh: MeshConfig | None = None
    """For `mesh`, and for `fsdp`'s HYBRID_SHARD: replicas × shards."""
    ddp: DDPConfig = DDPConfig()
    """The options of torch's DistributedDataParallel."""
    fsdp: FSDPConfig = FSDPConfig()
    """The options of torch's fully_shard, by the names that FSDP gave them."""
    tensor: TensorConfig = TensorConfig()
    """How `mesh` is tensor parallel."""
    pipeline: PipelineConfig = PipelineConfig()
    """How `mesh` is a pipeline."""
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    """The options of DeepSpeed's ZeRO, by the names that it gave them."""
    zero_stage: Stage = None
    """Short for `deepspeed.zero_stage`."""
    offload: Literal["none", "optimizer", "all"] | None = None
    """Short for `deepspeed.offload_optimizer: cpu`; `all` is for `deepspeed.offload_parameters: cpu`, too."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """What processes talk through: NCCL between GPUs and gloo elsewhere. Ranks that share a GPU need `gloo`."""
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that ranks wait for one that does not arrive, or does not move; then the run says who, and starts again.
    Longer than the slowest evaluation sample, save or compilation of any one rank."""
    init_timeout: Annotated[float, Field(gt=0)] = 1800.0
    """The same until all ranks have taken their first step: models are loaded and compiled."""
    desync_steps: Positive | None = 100
    """Every so many steps, compare replicas and the samples they took over ranks; `null` for never."""

    @property
    def zero(self) -> DeepSpeedConfig:
        """`deepspeed` with what the short forms say."""
        short = {
            "zero_stage": self.zero_stage,
            "offload_optimizer": self.offload and ("none" if self.offload == "none" else "cpu"),
            "offload_parameters": self.offload and ("cpu" if self.offload == "all" else "none"),
        }
        return self.deepspeed.model_copy(update={key: value for key, value in short.items() if value is not None})

    def contradictions(self) -> Sequence[tuple[bool, str]]:
        if self.strategy != "deepspeed":
            return ()
        zero, why = self.zero, self.zero.why_not_offload()
        long = {key: value for key, value in self.deepspeed if value != DeepSpeedConfig.model_fields[key].default}
        file = long.pop("config_file", None)
        short = {"zero_stage": self.zero_stage, "offload": self.offload}
        beside_file = [
            (
                None not in (file, value),
                f"deepspeed.config_file = {file!r} and {key} = {value!r} both say what DeepSpeed does; put it into the "
                "JSON or leave the JSON out",
            )
            for key, value in {**short, **{f"deepspeed.{key}": value for key, value in long.items()}}.items()
        ]
        short_and_long = [
            (
                getattr(zero, key) != value,
                f"deepspeed.{key} = {value}, but its short form says {getattr(zero, key)}; set one of them to null",
            )
            for key, value in long.items()
        ]
        return [*beside_file, *short_and_long, (why is not None, f"deepspeed.{why}")]


class LaunchConfig(Section):
    target: Literal["local"] = "local"
    nodes: Positive = 1
    """Machines. With more than one, start the command on each, with MASTER_ADDR, MASTER_PORT and NODE_RANK set."""
    procs_per_node: Positive = 1
    """Processes on each machine, usually one per GPU."""
    max_restarts: NotNegative = 3
    """How often to start again from the last checkpoint after a process died."""

    @property
    def processes(self) -> int:
        return self.nodes * self.procs_per_node


class CheckpointConfig(Section):
    every: Positive | None = 100
    """Save every so many steps; always at the end. `null`: only at the end."""
    every_minutes: Annotated[float, Field(gt=0)] | None = None
    """Save also when the last save was so many minutes ago."""
    keep_last: Positive = 3
    """How many of the newest checkpoints to keep."""
    keep_best: NotNegative = 0
    """How many of the best to keep besides; an evaluation that gets among them is saved at once."""
    metric: str = "eval/loss"
    """What `keep_best` goes by."""
    mode: Literal["min", "max"] = "min"
    """Whether less or more of it is better."""
    keep_every: Positive | None = None
    """Steps that are multiples of this are saved and stay for good."""
    load_best_model_at_end: bool = False
    """When the run has ended, put the best checkpoint's weights into the model; the last checkpoint stays the last
    step's."""
    async_save: bool | None = None
    """Write while training goes on, from a copy of the state in the host's memory. Unless given: on where the device is
    a GPU."""
    resume: str = "auto"
    """`auto` goes on from the last good checkpoint in the run folder, `never` starts anew in an empty one,
    a path starts from that checkpoint."""
    init_from: str | None = None
    """A run that begins takes its weights from here, and nothing else: a checkpoint of any layout, a `.safetensors`
    file, a folder that transformers saved, or a state dict of torch."""
    allow_changed: list[str] = []
    """Keys that may differ from the checkpoint's on resume, such as `dataset.files`."""

    def contradictions(self) -> Sequence[tuple[bool, str]]:
        no_best = self.load_best_model_at_end and not self.keep_best
        return (
            (no_best, "load_best_model_at_end = true, but keep_best = 0 keeps no best; set keep_best to 1 or more"),
        )


class WandbConfig(Section):
    project: str = "shoal"
    entity: str | None = None
    mode: Literal["online", "offline"] = "online"
    """Offline runs are written below the run folder; `wandb sync` uploads them later."""


class MlflowConfig(Section):
    tracking_uri: str | None = None
    """A server or database; unless given, a folder in the run folder."""
    experiment: str = "shoal"


class ProfileConfig(Section):
    start: Positive
    """The first step to record."""
    steps: Positive = 3


ConsoleMode = Literal["auto", "rich", "plain", "off"]


class LoggingConfig(Section):
    every: Positive = 10
    """Steps between two lines of the log."""
    console: ConsoleMode = "auto"
    """`auto`: a live bar on a terminal, plain lines elsewhere."""
    tensorboard: bool = True
    """Write `tensorboard/` in the run folder."""
    jsonl: bool = True
    """Write `metrics.jsonl` in the run folder."""
    wandb: bool | WandbConfig = False
    mlflow: bool | MlflowConfig = False
    profile: ProfileConfig | None = None
    """Record these steps with torch.profiler, into `profile/` in the run folder."""


class Config(Section):
    experiment: ExperimentConfig = ExperimentConfig()
    recipe: str
    dataset: LoaderConfig = LoaderConfig()
    training: TrainingConfig
    distributed: DistributedConfig = DistributedConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    launch: LaunchConfig = LaunchConfig()

    @property
    def output_dir(self) -> str:
        return self.experiment.output_dir or f"runs/{self.experiment.name}"
