"""The keys of a config file, section by section, with their types, defaults and descriptions.

The sections `model`, `lora` and `dataset` belong to the recipe, except for the keys in `LoaderConfig`. The texts below
the keys are the user's reference: `python tests/test_docs.py --write` writes them into docs/config.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _refuse(wrong: Callable[[Any], bool], message: str) -> BeforeValidator:
    """Returns a validator that raises `message` if `wrong(value)` is true, before the type is checked."""

    def check(value: Any) -> Any:
        if wrong(value):
            raise ValueError(message)
        return value

    return BeforeValidator(check)


def _short_for(key: str) -> BeforeValidator:
    """Returns a validator for short forms: with the key `name` it reads `optimizer: sgd` as `optimizer: {name:
    sgd}`."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
MeshSize = Annotated[
    int,
    Field(ge=-1),
    _refuse(lambda side: side == 0, "no rank is left; use 1, or -1 for all processes that the other dimensions leave"),
]
FloatType = Literal["fp32", "bf16", "fp16"]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """The base class of all sections. It refuses unknown keys, values of the wrong type, and contradictions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    def contradictions(self) -> Sequence[tuple[bool, str]]:
        """Returns pairs (is it wrong?, message) for values that do not fit together; the first wrong one is raised."""
        return ()

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        for contradictory, message in self.contradictions():
            if contradictory:
                raise ValueError(message)
        return self


class ExperimentConfig(Section):
    name: Annotated[str, Field(min_length=1, pattern=r"^[^/\\]+$")] = "run"
    """The name of the run."""
    output_dir: str | None = None
    """The run folder. Default: `runs/<name>`."""
    seed: NonNegative = 0
    """The seed of everything random: initial weights, order of samples, dropout, noise."""
    deterministic: bool = False
    """Use only deterministic operations, so that a run repeats bit by bit on the same hardware. Slower on GPUs."""


class LoaderConfig(Section):
    """The keys of `dataset:` that every recipe has: how samples are loaded."""

    num_workers: NonNegative = 0
    """Number of worker processes that load samples. 0 loads them in the training process."""
    pin_memory: bool | None = None
    """Load batches into pinned host memory, from which copies to a GPU are faster. Default: true on a GPU."""
    persistent_workers: bool = True
    """Keep the workers of the evaluation data alive between evaluations."""
    prefetch: Positive = 2
    """Number of micro-batches that each worker loads ahead."""


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
    """The final learning rate, as a fraction of `learning_rate`."""


class WarmupStableDecay(Section):
    name: Literal["wsd"]
    decay_ratio: Fraction = 0.2
    """The fraction of all steps, at the end, in which the learning rate decays."""
    min_ratio: Fraction = 0.0
    """The final learning rate, as a fraction of `learning_rate`."""


class ActivationCheckpointingConfig(Section):
    mode: Literal["none", "full", "selective"] = "none"
    """`full` keeps only the inputs of each block for the backward; `selective` also keeps the outputs of attention and
    of every second matrix product."""
    every: Positive = 1
    """Checkpoint only every n-th block."""
    classes: list[str] | None = None
    """Checkpoint the modules of these classes, by class name, instead of the blocks in the recipe's plan."""

    def contradictions(self) -> Sequence[tuple[bool, str]]:
        unused = self.mode == "none" and bool(self.classes or self.every > 1)
        return ((unused, "mode = none: `every` and `classes` have no effect; use full or selective"),)


class TrainingConfig(Section):
    max_steps: Positive | None = None
    """Number of optimizer steps. Give this or `num_epochs`."""
    num_epochs: Positive | None = None
    """Number of passes over the training data."""

    global_batch_size: Positive | None = None
    """Samples in one optimizer step, over all ranks. See [batch arithmetic](#batch-arithmetic)."""
    batch_size: Positive | None = None
    """Samples in one micro-batch of one rank."""
    gradient_accumulation: Positive | dict[NonNegative, Positive] | None = None
    """Micro-batches of one rank in one optimizer step, or a schedule by epoch such as `{0: 8, 5: 4}`."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """The device to train on. `auto` takes a GPU if there is one."""
    mixed_precision: Literal["fp32", "bf16", "fp16", "pure_bf16", "fp8"] = "fp32"
    """The type of the computation; the optimizer's weights and state stay fp32. `bf16` and `fp16`: matrix products, by
    autocast. `pure_bf16`: everything. `fp8`: the products of large linear layers, other products in bf16."""
    tf32: bool = False
    """Compute fp32 matrix products in TF32 on CUDA devices: faster, less exact."""
    compile: bool = False
    """Compile each block with torch.compile."""
    activation_checkpointing: Annotated[ActivationCheckpointingConfig, _short_for("mode")] = (
        ActivationCheckpointingConfig()
    )
    """Recompute activations in the backward instead of keeping them: `none`, `full`, `selective`, or a section."""
    loss_chunks: Positive = 1
    """Compute the loss in this many chunks of a micro-batch, so that all of its logits never exist at once. Saves
    memory for large vocabularies."""

    optimizer: Annotated[AdamW | SGD, Field(discriminator="name"), _short_for("name")] = AdamW()
    """The optimizer: its name, or a section with its name and options."""
    learning_rate: Annotated[float, Field(gt=0)] = 3e-4
    """The peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Weight decay of matrices; norms, biases and embeddings have none, unless the recipe groups parameters
    otherwise."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Clip the gradient to this norm. `null`: do not clip."""
    max_skipped_steps: Positive = 10
    """Stop the run after this many steps in a row were skipped because the gradient was not finite."""

    lr_scheduler: Annotated[Constant | Decay | WarmupStableDecay, Field(discriminator="name"), _short_for("name")] = (
        Decay(name="cosine", min_ratio=0.1)
    )
    """The learning-rate schedule: its name, or a section with its name and options."""
    warmup_steps: NonNegative | None = None
    """Number of steps in which the learning rate rises from 0 to its peak. Give this or `warmup_ratio`."""
    warmup_ratio: Fraction | None = None
    """The same, as a fraction of all steps."""

    eval_steps: Positive | None = None
    """Evaluate after every n-th step. A recipe with evaluation data is always evaluated at the end."""
    eval_batches: Positive | None = None
    """Evaluate on at most this many batches. Default: all evaluation data."""
    gc_steps: Positive = 100
    """Run Python's garbage collector every n-th step and at no other time, because it stops a rank while others
    wait."""

    def contradictions(self) -> Sequence[tuple[bool, str]]:
        ends, warmups = (self.max_steps, self.num_epochs), (self.warmup_steps, self.warmup_ratio)
        return (
            (
                None not in ends,
                f"max_steps = {self.max_steps} and num_epochs = {self.num_epochs} both set the end of the run; "
                "set one of them to null",
            ),
            (ends == (None, None), "the run has no end; give max_steps or num_epochs"),
            (
                None not in warmups,
                f"warmup_steps = {self.warmup_steps} and warmup_ratio = {self.warmup_ratio} both set the warmup; "
                "set one of them to null",
            ),
            (
                self.lr_scheduler.name == "constant" and any(warmups),
                "lr_scheduler = constant has no warmup; use constant_with_warmup, or leave the warmup out",
            ),
        )


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
    """Copy buffers from rank 0 to the other ranks before each forward."""


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
    """The type in which parameters are gathered. Default: bf16 for `pure_bf16`, else fp32."""
    reduce_dtype: FloatType | None = None
    """The type in which gradients are summed over ranks. Default: fp32."""
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
    _refuse(
        lambda stage: stage == 0,
        "ZeRO stage 0 shards nothing; use 1, 2 or 3, or distributed.strategy: ddp",
    ),
]
Offload = Annotated[
    str,
    _refuse(
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

    def why_not_offload(self) -> str | None:
        """Returns why the ZeRO stage cannot offload as the keys ask, or None if it can.

        This is not a contradiction of the section itself, because `distributed.zero_stage` or a JSON may set the stage.
        """
        if self.stage < 3 and self.offload_parameters != "none":
            return (
                f"offload_parameters = {self.offload_parameters}: ZeRO stage {self.stage} keeps all weights on every "
                "device; use zero_stage: 3, or offload the optimizer only"
            )
        if self.stage < 3 and self.offload_optimizer not in ("none", "cpu"):
            return (
                f"offload_optimizer = {self.offload_optimizer}: ZeRO stage {self.stage} offloads to host memory only; "
                "use cpu, or zero_stage: 3"
            )
        return None


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
    """Also split the tokens over the tensor-parallel ranks between the layers that are cut: less memory for the same
    amount of communication."""


class PipelineConfig(Section):
    schedule: Literal["gpipe", "1f1b", "interleaved", "zbv"] = "1f1b"
    """The order of forwards and backwards. `gpipe`: all forwards, then all backwards. `1f1b`: one forward and one
    backward in turn. `interleaved`: 1F1B with two stages per rank. `zbv`: zero bubble, V-shaped; two stages per rank
    and a backward in two halves, so that ranks hardly wait."""


class DistributedConfig(Section):
    strategy: Annotated[
        Literal["auto", "single", "ddp", "fsdp", "deepspeed", "mesh"],
        BeforeValidator(lambda name: "mesh" if name == "3d" else name),  # the name of `mesh` in older configs
    ] = "auto"
    """How the run is spread over processes. `auto`: `single` for one process, `ddp` for several. `mesh`: the product of
    dimensions in the section `mesh`."""
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
    offload: Literal["none", "optimizer", "all"] | None = None
    """`optimizer` is short for `deepspeed.offload_optimizer: cpu`; `all` also for `deepspeed.offload_parameters:
    cpu`."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """The backend of collectives. `auto`: NCCL on GPUs, gloo on CPUs. Ranks that share a GPU need `gloo`."""
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds after which a rank that makes no progress counts as hung: the run names it and restarts. Must be longer
    than the slowest evaluation sample, save or compilation of a rank."""
    init_timeout: Annotated[float, Field(gt=0)] = 1800.0
    """The same until all ranks have finished their first step, because models are loaded and compiled first."""
    desync_steps: Positive | None = 100
    """Check after every n-th step that replicas are equal and that ranks took the samples they should. `null`:
    never."""

    @property
    def zero(self) -> DeepSpeedConfig:
        """The section `deepspeed` with the short forms `zero_stage` and `offload` written out."""
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
                f"deepspeed.config_file = {file!r} and {key} = {value!r} both set options of DeepSpeed; put it into "
                "the JSON, or leave the JSON out",
            )
            for key, value in {**short, **{f"deepspeed.{key}": value for key, value in long.items()}}.items()
        ]
        short_and_long = [
            (
                getattr(zero, key) != value,
                f"deepspeed.{key} = {value}, but its short form sets {getattr(zero, key)}; set one of them to null",
            )
            for key, value in long.items()
        ]
        return [*beside_file, *short_and_long, (why is not None, f"deepspeed.{why}")]


class LaunchConfig(Section):
    target: Literal["local"] = "local"
    """Where processes are started: on this machine."""
    nodes: Positive = 1
    """Number of machines. If more than one, run the command on each, with MASTER_ADDR, MASTER_PORT and NODE_RANK
    set."""
    procs_per_node: Positive = 1
    """Number of processes on each machine, usually one per GPU."""
    max_restarts: NonNegative = 3
    """How many times to restart from the last checkpoint after a process died."""

    @property
    def processes(self) -> int:
        """The number of processes on all machines."""
        return self.nodes * self.procs_per_node


class CheckpointConfig(Section):
    every: Positive | None = 100
    """Save after every n-th step, and always at the end. `null`: only at the end."""
    every_minutes: Annotated[float, Field(gt=0)] | None = None
    """Also save when the last save was this many minutes ago."""
    keep_last: Positive = 3
    """Number of newest checkpoints to keep."""
    keep_best: NonNegative = 0
    """Number of best checkpoints to keep as well. A step whose evaluation is among the best is saved at once."""
    metric: str = "eval/loss"
    """The metric that decides which checkpoints are best."""
    mode: Literal["min", "max"] = "min"
    """Whether a smaller (`min`) or a larger (`max`) metric is better."""
    keep_every: Positive | None = None
    """Save after every n-th step and never delete these checkpoints."""
    load_best_model_at_end: bool = False
    """Load the weights of the best checkpoint into the model when the run has ended. The last checkpoint still holds
    the last step."""
    async_save: bool | None = None
    """Write checkpoints in the background while training continues, from a copy of the state in host memory. Default:
    true on a GPU."""
    resume: str = "auto"
    """`auto`: resume from the last good checkpoint in the run folder, if there is one. `never`: start from scratch; the
    folder must have no checkpoints. A path: start from that checkpoint."""
    init_from: str | None = None
    """Load only weights from here when a new run starts: from a checkpoint of any layout, a `.safetensors` file, a
    folder that transformers saved, or a torch state dict."""
    allow_changed: list[str] = []
    """Keys that may differ from those of the checkpoint on resume, such as `dataset.files`."""

    def contradictions(self) -> Sequence[tuple[bool, str]]:
        no_best = self.load_best_model_at_end and not self.keep_best
        return (
            (
                no_best,
                "load_best_model_at_end = true, but keep_best = 0 keeps no best checkpoint; set keep_best to 1 or more",
            ),
        )


class WandbConfig(Section):
    project: str = "shoal"
    """The project in Weights & Biases."""
    entity: str | None = None
    """The user or team that owns the project. Default: yours."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to the run folder; `wandb sync` uploads it later."""


class MlflowConfig(Section):
    tracking_uri: str | None = None
    """The address of a server or database. Default: a folder in the run folder."""
    experiment: str = "shoal"
    """The experiment in MLflow."""


class ProfileConfig(Section):
    start: Positive
    """The first step to record."""
    steps: Positive = 3
    """Number of steps to record."""


ConsoleMode = Literal["auto", "rich", "plain", "off"]


class LoggingConfig(Section):
    every: Positive = 10
    """Log after every n-th step."""
    console: ConsoleMode = "auto"
    """`rich`: a live progress bar. `plain`: lines. `auto`: `rich` on a terminal, else `plain`. `off`: nothing."""
    tensorboard: bool = True
    """Write TensorBoard files to `tensorboard/` in the run folder."""
    jsonl: bool = True
    """Write metrics to `metrics.jsonl` in the run folder."""
    wandb: bool | WandbConfig = False
    """Log to Weights & Biases: `true`, or a section."""
    mlflow: bool | MlflowConfig = False
    """Log to MLflow: `true`, or a section."""
    profile: ProfileConfig | None = None
    """Record these steps with torch.profiler, to `profile/` in the run folder."""


class Config(Section):
    """All sections of a config file that belong to shoal."""

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
        """The run folder."""
        return self.experiment.output_dir or f"runs/{self.experiment.name}"
