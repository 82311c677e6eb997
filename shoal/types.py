"""The nouns the rooms exchange."""

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
"""How tensor parallelism cuts something. A number is for a parameter: the dimension along which ranks share it. For
modules: `column` and `row` are Linear layers cut by outputs and by inputs, `vocabulary` an embedding or the head cut by
tokens, `region` a module that all ranks call with the same first input and that works on their parts inside, `sum` one
that also returns only its rank's part of a sum, `sequence` one that treats every token by itself."""

IGNORED = -100
"""The label that counts for nothing, as in torch's cross-entropy."""


@dataclass(frozen=True, slots=True)
class BatchPhase:
    """From `first_epoch` on, a step takes `global_batch_size` samples in micro-batches of `batch_size`."""

    first_epoch: int
    global_batch_size: int
    batch_size: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one rank sends through the model in one forward: the collated samples and who they are.

    `weight` is 0 for a filler: a rank that ran out of samples repeats some so that every rank runs the
    same number of micro-batches, and their loss and count are multiplied away.
    """

    data: Any
    epochs: Sequence[int]
    ids: Sequence[int]
    weight: int = 1


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Sums over the whole global batch, on the device, equal on all ranks; the loss is total / count."""

    total: Tensor
    count: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)

    @property
    def loss(self) -> Tensor:
        return self.total / self.count


@dataclass(frozen=True, slots=True)
class StepInfo:
    """What an update did: the gradient norm before clipping and whether it was skipped (0 or 1)."""

    grad_norm: Tensor
    skipped: Tensor


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
    """Weights and buffers by the names of the unwrapped model; the optimizer's tensors by parameter name, then slot."""

    model: dict[str, Tensor]
    optimizer: dict[str, dict[str, Tensor]]
    strategy: dict[str, Tensor] = field(default_factory=dict)
    """What the layout itself keeps, such as the loss scale of fp16."""


class Objective(Protocol):
    """What a strategy needs of a recipe."""

    def prepare_batch(self, batch: Any, rng: SampleRng) -> Any: ...
    def inputs(self, batch: Any) -> dict[str, Any]: ...
    def count(self, batch: Any) -> Tensor | int: ...
    def loss(self, output: Any, batch: Any) -> Tensor: ...
    def labels(self, batch: Any) -> Tensor: ...
    def sequence_length(self, batch: Any) -> int: ...
    def split_sequence(self, batch: Any, index: int, parts: int) -> Any: ...


@dataclass(frozen=True)
class ParallelPlan:
    """How a model may be cut, as data. Names are module or parameter names of the unwrapped model."""

    blocks: tuple[str, ...] = ()
    """The repeated modules in order: units for compilation, activation checkpointing and sharding."""
    embed: str | None = None
    """The module that makes hidden states of tokens, before the blocks."""
    head: str | None = None
    """The module that makes logits of hidden states, where the recipe's loss is `token_loss` of them. Called with
    (hidden) if it is an nn.Linear, or with (hidden, weight), weight (embd, vocab), if it owns no parameters."""
    order: tuple[str, ...] = ()
    """For a pipeline: the modules that hidden states go through, one after another and nothing else between, such as
    embedding, blocks, norm, head. Together they own all parameters."""
    entry: str | None = None
    """For a pipeline: the keyword of the model's input that the first module of `order` takes."""
    tensor: Mapping[str, TensorStyle] = field(default_factory=dict)
    """For tensor parallelism: how modules and parameters are cut. Names may have `*` for a part between dots."""

    @classmethod
    def derive(cls, model: nn.Module) -> ParallelPlan:
        """What can be seen from outside: the longest list of like modules are the blocks."""
        from torch import nn

        lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
        alike = [(name, m) for name, m in lists if len(m) > 1 and len({type(child) for child in m}) == 1]
        if not alike:
            return cls()
        name, blocks = max(alike, key=lambda item: len(item[1]))
        return cls(blocks=tuple(f"{name}.{i}" if name else str(i) for i in range(len(blocks))))


NO_PLAN = ParallelPlan()
"""Of a model that is taken as one."""
