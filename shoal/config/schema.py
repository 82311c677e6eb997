"""The keys of a config file, section by section, with their types, defaults and descriptions.

`schema_distributed.py` has the section `distributed`, and `schema_optimizers.py` the optimizers and schedules. The
sections `model`, `lora` and `dataset` belong to the recipe, except for the keys in `LoaderConfig`. The texts below the
keys are the user's reference: `python tests/test_docs.py --write` writes them into docs/config.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from shoal.config.schema_distributed import DistributedConfig
from shoal.config.schema_optimizers import (
    AdamW,
    Decay,
    Imported,
    InverseSqrt,
    OneCycle,
    Optimizer,
    Plateau,
    Scheduler,
)
from shoal.config.schema_targets import KubernetesConfig, RayConfig, SlurmConfig
from shoal.config.section import Fraction, NonNegative, Positive, Section, short_for


class ExperimentConfig(Section):
    name: Annotated[str, Field(min_length=1, pattern=r"^[^/\\]+$")] = "run"
    """The name of the run. A config file that leaves it out gives it the file's name."""
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
    drop_last: bool = False
    """Leave out the samples at the end of the run that do not fill a global batch. They otherwise make a smaller last
    step, of at least two samples: a single one takes another from the step before."""


class ActivationCheckpointingConfig(Section):
    mode: Literal["none", "full", "selective"] = "none"
    """`full` keeps only the inputs of each block for the backward; `selective` also keeps the outputs of attention and
    of every second matrix product."""
    every: Positive = 1
    """Checkpoint only every n-th block."""
    classes: list[str] | None = None
    """Checkpoint the modules of these classes, by class name, instead of the blocks in the recipe's plan."""
    offload: bool = False
    """Keep the inputs of checkpointed blocks in pinned host memory. Copies overlap with computing."""

    def contradictions(self) -> Sequence[tuple[bool, str]]:
        return (
            (
                self.mode == "none" and bool(self.classes or self.every > 1 or self.offload),
                "mode = none: `every`, `classes` and `offload` have no effect; use full or selective",
            ),
        )


class ObjectiveConfig(Section):
    """What one of a recipe's objectives has different; what is left out is as in `training`."""

    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """The peak learning rate of its optimizer."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """The weight decay of its matrices."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = None
    """Clip its gradient to this norm."""


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
    """The type of the computation; weights and optimizer state have that of `weights_dtype`. `bf16` and `fp16`: matrix
    products, by autocast. `pure_bf16`: everything. `fp8`: the products of large linear layers, other products in bf16.
    """
    weights_dtype: Literal["fp32", "bf16"] = "fp32"
    """The type of weights, gradients and optimizer state. `fp32`: the type that the model has, usually fp32. `bf16`: 8
    bytes a parameter instead of 16, with [stochastic rounding](choosing.md#weights-in-bf16) of weights and state; for
    `adamw` with `mixed_precision: bf16` or `fp8`."""
    tf32: bool = False
    """Compute fp32 matrix products in TF32 on CUDA devices: faster, less exact."""
    compile: bool = False
    """Compile each block with torch.compile."""
    cuda_graphs: bool = False
    """Record forward and backward of a micro-batch in a CUDA graph, and compute all micro-batches of its shapes by the
    recording: for steps in which the GPU waits for the host. On one process. See
    [choosing.md](choosing.md#small-steps-on-a-gpu)."""
    kernels: Literal["auto", "plain", "fused"] = "auto"
    """How modules with a fused path compute: the heads of BDH, and adapters with dropout. `plain`: by their own code.
    `fused`: by operators that keep less for the backward, in Triton on GPUs that the kernels fit; refused for models
    without such modules. `auto`: `fused` on CUDA devices where it is faster. See
    [choosing.md](choosing.md#less-memory-for-activations)."""
    activation_checkpointing: Annotated[ActivationCheckpointingConfig, short_for("mode")] = (
        ActivationCheckpointingConfig()
    )
    """Recompute activations in the backward instead of keeping them: `none`, `full`, `selective`, or a section."""
    loss_chunks: Positive = 1
    """Compute the loss in this many chunks of a micro-batch, so that all of its logits never exist at once. Saves
    memory for large vocabularies."""
    fp8_head: bool = False
    """With `mixed_precision: fp8` and `loss_chunks`, the head also computes its logits and the gradients of its inputs
    in fp8. See [choosing.md](choosing.md#fp8)."""
    sync_batch_norm: bool = False
    """BatchNorm takes mean and variance over the micro-batches of all data-parallel ranks, instead of each rank over
    its own. Layouts then compute the same; not for pipelines, sequence parallelism and DeepSpeed."""

    body: str | None = None
    """A function `module:function` that computes every step in place of the recipe's loss. See [a loop of your
    own](plain_pytorch.md#a-run-with-a-loop-of-your-own)."""

    optimizer: Annotated[Optimizer, short_for("name")] = AdamW()
    """The optimizer: its name, or a section with its name and options. `path.to:Class` is one of your own; its section
    has the arguments of its constructor. See [optimizers](recipes.md#optimizers-and-schedules)."""
    learning_rate: Annotated[float, Field(gt=0)] = 3e-4
    """The peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Weight decay of matrices; norms, biases and embeddings have none, unless the recipe groups parameters
    otherwise."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Clip the gradient to this norm. `null`: do not clip."""
    objectives: dict[str, ObjectiveConfig] = {}  # noqa: RUF012, pydantic copies it
    """For a recipe with several objectives: by name, `learning_rate`, `weight_decay` and `max_grad_norm` of those that
    differ, such as `{generator: {learning_rate: 1e-4}}`."""
    max_skipped_steps: Positive = 10
    """Stop the run after this many steps in a row were skipped because the gradient was not finite."""

    lr_scheduler: Annotated[Scheduler, short_for("name")] = Decay(name="cosine")
    """The learning-rate schedule: its name, or a section with its name and options. `path.to:function` is one of your
    own, `f(step, total_steps)`, which returns the factor on the learning rate."""
    warmup_steps: NonNegative | None = None
    """Number of steps in which the learning rate rises from 0 to its peak. Give this or `warmup_ratio`."""
    warmup_ratio: Fraction | None = None
    """The same, as a fraction of all steps."""

    eval_steps: Positive | None = None
    """Evaluate after every n-th step. A recipe with evaluation data is always evaluated at the end."""
    eval_epochs: Positive | None = None
    """Evaluate after every n-th epoch: after the step in which it ends, because batches continue into the next one."""
    eval_batch_size: Positive | None = None
    """Samples in one micro-batch of one rank in evaluations. Default: as in training."""
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
                self.body is not None and self.loss_chunks > 1,
                f"loss_chunks = {self.loss_chunks}: body = {self.body!r} computes its loss itself; leave one of them "
                "out",
            ),
            (
                self.lr_scheduler.name == "constant" and any(warmups),
                "lr_scheduler = constant has no warmup; use constant_with_warmup, or leave the warmup out",
            ),
            (
                isinstance(self.lr_scheduler, OneCycle | Imported) and any(warmups),
                f"lr_scheduler = {self.lr_scheduler.name} has a warmup of its own or none; leave warmup_steps and "
                "warmup_ratio out",
            ),
            (
                isinstance(self.lr_scheduler, InverseSqrt) and not (self.lr_scheduler.timescale or any(warmups)),
                "lr_scheduler = inverse_sqrt needs a warmup or a timescale; give warmup_steps, warmup_ratio, or "
                "lr_scheduler.timescale",
            ),
            (
                isinstance(self.lr_scheduler, Plateau) and not (self.eval_steps or self.eval_epochs),
                "lr_scheduler = plateau follows the evaluations of a run, but there are none; set eval_steps or "
                "eval_epochs",
            ),
            (
                self.weights_dtype == "bf16" and self.optimizer.name != "adamw",
                f"weights_dtype = bf16 needs an optimizer that rounds stochastically, and optimizer = "
                f"{self.optimizer.name} does not; use adamw, or weights_dtype: fp32",
            ),
            (
                self.fp8_head and self.mixed_precision != "fp8",
                f"fp8_head = true is for mixed_precision = fp8, and mixed_precision = {self.mixed_precision}; set it "
                "to fp8, or leave fp8_head out",
            ),
            (
                self.fp8_head and self.loss_chunks == 1,
                "fp8_head = true needs a head that computes the loss in chunks; set loss_chunks, for example to 8, or "
                "leave fp8_head out",
            ),
            (
                self.weights_dtype == "bf16" and self.mixed_precision not in ("bf16", "fp8"),
                f"weights_dtype = bf16 computes in bf16, but mixed_precision = {self.mixed_precision}; set "
                "mixed_precision to bf16 or fp8",
            ),
            (
                self.optimizer.name == "rprop" and (self.lr_scheduler.name != "constant"),
                "optimizer = rprop takes learning_rate as its first step size and no schedule changes it later; set "
                "lr_scheduler to constant",
            ),
        )


def _check_nodes(value: int | str) -> int | str:
    found = re.fullmatch(r"([1-9]\d{0,5}):([1-9]\d{0,5})", value if isinstance(value, str) else f"{value}:{value}")
    if not found or int(found[1]) > int(found[2]):
        raise ValueError(f"nodes = {value!r:.100} should be a number from 1, or MIN:MAX such as 1:4")
    return value


_LAUNCHER_VARIABLES = r"(LOCAL_|NODE_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(TORCHELASTIC|SLURM|SHOAL|PET)_\w+"


def _read_variables(value: Any) -> Any:
    """Returns numbers as texts, because the environment has texts alone; refuses variables that launchers set."""
    if not isinstance(value, dict):
        return value
    for name in value:
        if not re.fullmatch(r"[A-Za-z_]\w*", str(name), re.ASCII):
            raise ValueError(f"{name!r:.100} is not the name of an environment variable")
        if re.fullmatch(_LAUNCHER_VARIABLES, name):
            raise ValueError(f"launchers set {name}; remove it")
    return {name: str(value) if type(value) in (int, float) else value for name, value in value.items()}


class LaunchConfig(Section):
    target: Literal["local", "slurm", "kubernetes", "ray"] = "local"
    """Where `shoal launch` starts the run: on this machine (`local`), as a job of a cluster (`slurm`, `kubernetes`), or
    on the workers of `ray`."""
    nodes: Annotated[int | str, AfterValidator(_check_nodes)] = 1
    """Number of machines, or `MIN:MAX` for a run that goes on when machines leave, as long as MIN are left. If more
    than one, run the command on each machine, and say where they meet and which machine each is."""
    procs_per_node: Positive = 1
    """Number of processes on each machine, usually one per GPU. `auto`: one for every GPU of the machine, or one if it
    has none."""
    env: Annotated[dict[str, str], BeforeValidator(_read_variables)] = {}  # noqa: RUF012, pydantic copies it
    """Environment variables for every process of the run, such as `NCCL_DEBUG: INFO`."""
    master_addr: str | None = None
    """The address of the first machine (node 0), which all others can reach. Default: the variable MASTER_ADDR."""
    master_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """A free port of the first machine. Default: the variable MASTER_PORT."""
    node_rank: NonNegative | None = None
    """The number of this machine, from 0. Default: the variable NODE_RANK."""
    detect: Literal["auto", "none"] = "auto"
    """`auto`: join the processes that torchrun, SLURM, Kubeflow, Ray or MPI has started. `none`: ignore their
    variables; this process is alone, or starts the others itself."""
    max_restarts: NonNegative = 3
    """How many times to restart from the last checkpoint after a process died."""
    slurm: SlurmConfig = SlurmConfig()
    """The job of a [SLURM](slurm.md) cluster."""
    kubernetes: KubernetesConfig = KubernetesConfig()
    """The job on [Kubernetes](kubernetes.md)."""
    ray: RayConfig = RayConfig()
    """The workers of [Ray](ray.md)."""

    @property
    def min_nodes(self) -> int:
        """The number of machines without which the run does not go on."""
        return self.nodes if isinstance(self.nodes, int) else int(self.nodes.partition(":")[0])

    @property
    def max_nodes(self) -> int:
        """The number of machines that the run uses if all are there."""
        return self.nodes if isinstance(self.nodes, int) else int(self.nodes.partition(":")[2])

    @property
    def is_elastic(self) -> bool:
        """True if the run may go on with fewer machines."""
        return self.min_nodes < self.max_nodes

    @property
    def processes(self) -> int:
        """The number of processes on all machines, if all are there."""
        return self.max_nodes * self.procs_per_node


class CheckpointConfig(Section):
    every: Positive | None = 100
    """Save after every n-th step, and always at the end. `null`: only at the end."""
    every_epochs: Positive | None = None
    """Save after every n-th epoch: after the step in which it ends."""
    every_minutes: Annotated[float, Field(gt=0)] | None = None
    """Also save when the last save was this many minutes ago."""
    keep_last: Positive = 3
    """Number of newest checkpoints to keep."""
    keep_best: NonNegative = 0
    """Number of best checkpoints to keep as well. A step whose evaluation is among the best is saved at once."""
    metric: str = "eval/loss"
    """The metric of an evaluation that decides which checkpoints are best: `eval/loss`, or `eval/<name>` of the
    recipe's metrics; `eval/<set>/<name>` if there are several sets."""
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
    folder must have no checkpoints. A path: start from that checkpoint. `last` and `best`: that checkpoint of the run
    itself, and `RUN/last` and `RUN/best` of another run, here and in `init_from`."""
    init_from: str | None = None
    """Load only weights from here when a new run starts: from a checkpoint of any layout, a `.safetensors` file, a
    folder that transformers or PEFT saved, or a torch state dict. An adapter for another base is refused."""
    allow_changed: list[str] = []  # noqa: RUF012, pydantic copies it
    """Keys that may differ from those of the checkpoint on resume, such as `dataset.files`. With `model.name`,
    `init_from` also loads an adapter that was trained on another base."""

    def contradictions(self) -> Sequence[tuple[bool, str]]:
        return (
            (
                self.load_best_model_at_end and not self.keep_best,
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
    """Log after every n-th step: means over the steps since the last line."""
    console: ConsoleMode = "auto"
    """`rich`: a live progress bar. `plain`: lines. `auto`: `rich` on a terminal, else `plain`. `off`: only warnings, on
    standard error."""
    tensorboard: bool = True
    """Write TensorBoard files to `tensorboard/` in the run folder."""
    jsonl: bool = True
    """Write metrics to `metrics.jsonl` in the run folder."""
    wandb: bool | WandbConfig = False
    """Log to Weights & Biases: `true`, or a section."""
    mlflow: bool | MlflowConfig = False
    """Log to MLflow: `true`, or a section."""
    straggler_factor: Annotated[float, Field(gt=1)] | None = 1.3
    """Name a rank that takes so many times as long as its peers by itself, without waiting for others, in two windows
    of `every` steps (at least 5) in a row. `null`: never."""
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
    callbacks: list[str | dict[str, Any]] = []  # noqa: RUF012, pydantic copies it
    """What happens besides the steps: names of callbacks, or sections with a name and options."""

    @property
    def output_dir(self) -> str:
        """The run folder."""
        return self.experiment.output_dir or f"runs/{self.experiment.name}"
