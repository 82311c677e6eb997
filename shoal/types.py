"""The data types that the packages of shoal pass to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.seeding import SampleRng
    from shoal.weights.conversion import Source


TensorStyle = Literal["column", "row", "vocabulary", "region", "sum", "sequence"] | int
"""How tensor parallelism splits a parameter or a module over the ranks of a `tp` group.

For a parameter:
    a number        the dimension along which the parameter is split

For a module:
    `column`        an nn.Linear split by its outputs: every rank computes some of them
    `row`           an nn.Linear split by its inputs: every rank computes a part of the sum, and the sum is all-reduced
    `vocabulary`    an embedding or the head, split by tokens of the vocabulary; also a head's parameter (embd, vocab)
    `region`        a module with split layers inside; all ranks call it with the same first input, and its gradient is
                    all-reduced
    `sum`           a `region` whose output is one rank's part of a sum, which is all-reduced
    `sequence`      a module that treats every token by itself, such as a norm; under sequence parallelism it gets the
                    tokens of one rank only
"""

IGNORED_LABEL = -100
"""The value of a label that the loss and the count leave out, as in torch's cross-entropy."""


@dataclass(frozen=True, slots=True)
class BatchPhase:
    """The batch sizes of a run from one epoch on; a schedule of gradient accumulation has several phases.

    `global_batch_size` is the number of samples in one step over all ranks, `batch_size` that in one micro-batch.
    """

    first_epoch: int
    global_batch_size: int
    batch_size: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The samples that one rank sends through the model in one forward."""

    data: Any
    """The samples as the recipe collated them."""
    epochs: Sequence[int]
    """The epoch of each sample."""
    ids: Sequence[int]
    """The index of each sample in the dataset."""
    weight: int = 1
    """1, or 0 for a filler: all ranks run the same number of micro-batches, so a rank that runs out of samples repeats
    some, whose loss, count and gradient are left out."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The result of a step's forward and backward: sums over the global batch, on the device, equal on all ranks.

    Under `local_sgd` they are of this rank's slice alone, because ranks exchange nothing in a step.
    """

    total: Tensor
    """The sum of all losses."""
    count: Tensor
    """The sum of all counts: tokens, or samples."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The recipe's metrics by name: (sum, count) over the micro-batches of this rank alone, not equal on all ranks, or
    a torchmetrics object."""

    @property
    def loss(self) -> Tensor:
        """The mean loss."""
        return self.total / self.count


@dataclass(frozen=True, slots=True)
class StepInfo:
    """The result of an optimizer step, on the device."""

    grad_norm: Tensor
    """The norm of the whole gradient, before clipping."""
    skipped: Tensor
    """1 if the step was skipped because the gradient was not finite, else 0."""


@dataclass(frozen=True)
class Weights:
    """Says where a run's first weights come from.

    `init`: each module draws its own under a seed made from its name. `files`: they are read from safetensors. `built`:
    they are what the model's constructor left. `empty`: parameters get memory and no values, for planning only.
    """

    kind: Literal["init", "files", "built", "empty"]
    reason: str = ""
    """A remark for the report, such as why a model is `built`."""
    reset: Callable[[nn.Module, nn.Module], None] | None = None
    """A function (model, module) that initialises the parameters which the module itself holds. Default: the module's
    `reset_parameters()`."""
    files: tuple[Path, ...] = ()
    """Safetensors that hold every parameter and persistent buffer. If `reset` is given too, trained parameters may be
    missing, such as those of an adapter; `reset` draws them."""
    sources: Mapping[str, Source] | None = None
    """How each tensor is made from tensors in the files, by its name in the model (see shoal.weights.conversion). A
    tensor without a source is in no file. None: the files hold every tensor under its name in the model."""


@dataclass(frozen=True)
class TrainState:
    """The tensors of a checkpoint. Names are those of the unwrapped model."""

    model: dict[str, Tensor]
    """Parameters and buffers by name."""
    optimizer: dict[str, dict[str, Tensor]]
    """The optimizer's tensors by parameter name, then by slot, such as `exp_avg`."""
    strategy: dict[str, Tensor] = field(default_factory=dict)
    """Tensors besides those: the loss scale of fp16, and the extra state of modules."""
    callbacks: dict[str, Tensor] = field(default_factory=dict)
    """The tensors of callbacks, by `<callback>/<name>`."""


def required(method: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a method that only raises, so that `is_defined` knows whether a subclass has its own."""
    method.is_required = True  # type: ignore[attr-defined]
    return method


def is_defined(method: Callable[..., Any]) -> bool:
    """Returns whether a method of a recipe is more than the one of the base class that only raises."""
    return not getattr(method, "is_required", False)


class Objective(Protocol):
    """What a strategy needs of a recipe."""

    @property
    def has_metrics(self) -> bool: ...
    @property
    def prepares_batches(self) -> bool: ...
    @property
    def sizes_vary(self) -> bool: ...
    def prepare_batch(self, batch: Any, rng: SampleRng) -> Any: ...
    def inputs(self, batch: Any) -> dict[str, Any]: ...
    def count(self, batch: Any) -> Tensor | int: ...
    def loss(self, output: Any, batch: Any) -> Tensor | tuple[Tensor, Mapping[str, Any]]: ...
    def metrics(self, output: Any, batch: Any) -> Mapping[str, Any]: ...
    def labels(self, batch: Any) -> Tensor: ...
    def sequence_length(self, batch: Any) -> int: ...
    def split_sequence(self, batch: Any, index: int, parts: int) -> Any: ...


@dataclass(frozen=True)
class ParallelPlan:
    """How a model can be split. Names are those of modules and parameters in the unwrapped model."""

    blocks: tuple[str, ...] = ()
    """The repeated modules, in order. They are the units of compilation, activation checkpointing and sharding."""
    embed: str | None = None
    """The module before the blocks that turns tokens into hidden states."""
    head: str | None = None
    """The module that turns hidden states into logits, if the recipe's loss is `token_loss` of these logits. An
    nn.Linear is called with (hidden); a module without parameters with (hidden, weight), where weight is (embd,
    vocab)."""
    order: tuple[str, ...] = ()
    """For a pipeline: all modules that hidden states pass through, one after another with nothing in between, such as
    embedding, blocks, norm, head. Together they have all parameters."""
    entry: str | None = None
    """For a pipeline: the keyword of the model input that the first module in `order` is called with."""
    tensor: Mapping[str, TensorStyle] = field(default_factory=dict)
    """For tensor parallelism: how modules and parameters are split, by name. `*` stands for any part between dots."""

    @classmethod
    def derive(cls, model: nn.Module) -> ParallelPlan:
        """Returns a plan with blocks only: the longest list of modules of one class."""
        from torch import nn

        lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
        alike = [(name, m) for name, m in lists if len(m) > 1 and len({type(child) for child in m}) == 1]
        if not alike:
            return cls()
        name, blocks = max(alike, key=lambda item: len(item[1]))
        return cls(blocks=tuple(f"{name}.{i}" if name else str(i) for i in range(len(blocks))))


NO_PLAN = ParallelPlan()
"""The plan of a model that is not split."""
