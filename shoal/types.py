"""The nouns the rooms exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor


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
    """Where a run's weights come from: drawn by name (`init`), or whatever the constructor left (`built`)."""

    kind: Literal["init", "built"]
    reason: str = ""


@dataclass(frozen=True)
class TrainState:
    """Weights and buffers by the names of the unwrapped model; the optimizer's tensors by parameter name, then slot."""

    model: dict[str, Tensor]
    optimizer: dict[str, dict[str, Tensor]]
    strategy: dict[str, Tensor] = field(default_factory=dict)
    """What the layout itself keeps, such as the loss scale of fp16."""


@dataclass(frozen=True)
class ParallelPlan:
    """How a model may be cut, as data. Names are module or parameter names of the unwrapped model."""

    blocks: tuple[str, ...] = ()
    """The repeated modules in order: units for compilation, activation checkpointing and sharding."""
