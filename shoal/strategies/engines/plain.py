"""The plain model: nothing is exchanged. Also the base of the other engines, with what each of them may change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shoal.config.layout import Layout
from shoal.errors import UserError
from shoal.parallel.compression.exchange import CompressedExchange
from shoal.parallel.compression.local_sgd import LocalSGD
from shoal.strategies.own_time import OwnTime

Reduction = Literal["sum", "mean", "none"]
"""How gradients are combined over data-parallel ranks. A strategy divides losses by the global count and needs the sum;
a hand-written loop has a mean over its own samples and needs the mean; "none" leaves it to the update. It is fixed when
the engine is built, because multiplying a loss by the number of ranks would round twice."""


NOTHING = nullcontext()
"""A context that does nothing. It may be entered again and again, so that no step has to make one."""


class PlainEngine:
    """Computes with the model as it is."""

    module: nn.Module
    """The module to call in a forward that a backward follows."""
    backward: Callable[[Tensor, Tensor], None] | None = None
    """Runs the backward of loss × scale; set by engines that cannot use plain `loss.backward(scale)`."""
    keeps_gradients = False
    """True if gradients live in buffers of the engine and are set to zero instead of being freed."""
    compressed: CompressedExchange | None = None
    """The exchange of gradients between replicas, if they are compressed."""
    local_sgd: LocalSGD | None = None
    """The averages of weights, if replicas exchange these instead of gradients."""
    waits_in: Literal["forward", "backward", "exchange"] = "exchange"
    """Where a step's first wait for other ranks is, as far as the engine causes it."""
    is_warm = True
    """False until the engine has seen a first forward and backward; see `warm_up`."""

    def __init__(self, layout: Layout, device: torch.device, mesh: DeviceMesh | None, reduction: Reduction):
        self.layout, self.device, self.mesh, self.reduction = layout, device, mesh, reduction
        self.parameter_device = device
        self.own_time = OwnTime(device)

    def shard(self, model: nn.Module, roots: Sequence[nn.Module], units: Sequence[str]) -> None:
        """Cuts the parameters while they are on the meta device.

        `roots` are the modules that are called as a whole, `units` the names of those that are gathered one by one.
        """

    def wrap(self, model: nn.Module) -> None:
        """Takes the model once it has its weights."""
        self.module = model

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Is entered around the forward and backward of a micro-batch; gradients are exchanged in the last one."""
        return NOTHING

    def warm_up(self, loss_of_batch: Callable[[], Tensor]) -> None:
        """Runs before the first step if `is_warm` is False; `loss_of_batch` computes the loss of one micro-batch."""

    def exchange(self, step: int) -> None:
        """Runs after the last backward of a step, for an engine that does not exchange gradients in the backward."""

    def rank_state(self) -> dict[str, Tensor]:
        """Returns what a checkpoint holds of this rank alone, such as residuals of compression."""
        return self.compressed.state() if self.compressed else {}

    def load_rank_state(self, stored: Mapping[str, Any]) -> str:
        """Takes back what `rank_state` returned; returns why it starts anew, or an empty text."""
        return self.compressed.load_state(stored) if self.compressed else ""

    def check_frozen(self) -> None:
        """Refuses a model that has changed frozen parameters in a step, if the engine would lose the change."""

    def reshard(self) -> None:
        """Frees gathered parameters, so that the model's parameters are the sharded ones."""

    def explain(self, error: RuntimeError) -> UserError | None:
        """Returns an error in the user's terms for one that the engine raised, if there is one."""
        return None

    def describe(self) -> str:
        """Returns the layout in words, for the report."""
        return self.layout.strategy
