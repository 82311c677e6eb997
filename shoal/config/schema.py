"""The sections of a run that belong to shoal. `model`, `lora` and `dataset` belong to the recipe."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Closed and strict: an unknown key or a value of the wrong type is refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class ExperimentConfig(Section):
    name: Annotated[str, Field(min_length=1, pattern=r"^[^/\\]+$")] = "run"
    output_dir: str | None = None
    """The run folder; `runs/<name>` unless given."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the weights, the order of samples, dropout and noise."""
    deterministic: bool = False
    """Use only operations that repeat to the bit on this hardware; slower on GPUs."""


class LoaderConfig(Section):
    """The keys of `dataset:` that say how samples are fetched, whatever the recipe."""

    num_workers: Annotated[int, Field(ge=0)] = 0
    """Processes that fetch samples ahead; 0 fetches in the training process."""
    pin_memory: bool | None = None
    """Unless given: on where the device is a GPU."""
    persistent_workers: bool = True
    """Keep the workers of the evaluation data alive between evaluations."""
    prefetch: Positive = 2
    """Micro-batches each worker fetches ahead."""


def _by_name(value: Any) -> Any:
    """`optimizer: sgd` is short for `optimizer: {name: sgd}`."""
    return {"name": value} if isinstance(value, str) else value


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


Optimizer = Annotated[AdamW | SGD, Field(discriminator="name"), BeforeValidator(_by_name)]
Scheduler = Annotated[
    Constant | Decay | WarmupStableDecay, Field(discriminator="name"), BeforeValidator(_by_name)
]  # fmt: skip


class TrainingConfig(Section):
    max_steps: Positive | None = None
    """Updates to make; this or `num_epochs`."""
    num_epochs: Positive | None = None
    """How often to see every sample."""

    global_batch_size: Positive | None = None
    """Samples in one update, over all devices."""
    batch_size: Positive | None = None
    """Samples in one micro-batch on one device."""
    gradient_accumulation: Positive | dict[Annotated[int, Field(ge=0)], Positive] | None = None
    """Micro-batches in one update on one device."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    mixed_precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What matrix products are computed in; weights and optimizer state stay fp32."""
    tf32: bool = False
    """Let fp32 matrix products on a CUDA device use TF32."""
    compile: bool = False
    """torch.compile, block by block."""

    optimizer: Optimizer = AdamW()
    learning_rate: Annotated[float, Field(gt=0)] = 3e-4
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Clip the gradient to this norm; `null` for none."""
    max_skipped_steps: Positive = 10
    """Stop after this many updates in a row were skipped because the gradient was not finite."""

    lr_scheduler: Scheduler = Decay(name="cosine", min_ratio=0.1)
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Updates until the learning rate is at its peak; this or `warmup_ratio`."""
    warmup_ratio: Fraction | None = None
    """The same as a share of all updates."""

    eval_steps: Positive | None = None
    """Evaluate every so many steps; at the end in any case, if the recipe has data for it."""
    eval_batches: Positive | None = None
    """Look at no more than this many batches of the evaluation data."""
    gc_steps: Positive = 100
    """Python's garbage collector runs only every so many steps, not whenever it likes."""

    @model_validator(mode="after")
    def _consistent(self) -> TrainingConfig:
        if self.max_steps is not None and self.num_epochs is not None:
            raise ValueError(
                f"max_steps = {self.max_steps} and num_epochs = {self.num_epochs} both say when to stop; "
                "set one of them to null"
            )
        if self.max_steps is None and self.num_epochs is None:
            raise ValueError("say when to stop: give max_steps or num_epochs")
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError(
                f"warmup_steps = {self.warmup_steps} and warmup_ratio = {self.warmup_ratio} say the same thing twice; "
                "set one of them to null"
            )
        if self.lr_scheduler.name == "constant" and (self.warmup_steps or self.warmup_ratio):
            raise ValueError("lr_scheduler 'constant' has no warmup; use 'constant_with_warmup'")
        return self


class DDPConfig(Section):
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    bucket_cap_mb: Positive = 25
    broadcast_buffers: bool = True


class DistributedConfig(Section):
    strategy: Literal["auto", "single", "ddp"] = "auto"
    """`auto` is `single` for one process and `ddp` for several."""
    ddp: DDPConfig = DDPConfig()
    """The options of torch's DistributedDataParallel."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """What processes talk through: NCCL between GPUs and gloo elsewhere. Ranks that share a GPU need `gloo`."""
    timeout: Annotated[float, Field(gt=0)] = 1800.0
    """Seconds until a collective that does not complete ends the run."""
    desync_steps: Positive | None = 100
    """Every so many steps, compare replicas and the samples they took over ranks; `null` for never."""


class LaunchConfig(Section):
    target: Literal["local"] = "local"
    nodes: Positive = 1
    """Machines. With more than one, start the command on each, with MASTER_ADDR, MASTER_PORT and NODE_RANK set."""
    procs_per_node: Positive = 1
    """Processes on each machine, usually one per GPU."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """How often to start again from the last checkpoint after a process died."""

    @property
    def processes(self) -> int:
        return self.nodes * self.procs_per_node


class CheckpointConfig(Section):
    every: Positive | None = 100
    """Save every so many steps; always at the end. `null`: only at the end."""
    keep_last: Positive = 3
    """How many checkpoints to keep."""
    resume: str = "auto"
    """`auto` goes on from the last good checkpoint in the run folder, `never` starts anew in an empty one,
    a path starts from that checkpoint."""
    allow_changed: list[str] = []
    """Keys that may differ from the checkpoint's on resume, such as `dataset.files`."""


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
