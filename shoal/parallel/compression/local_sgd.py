"""Weights instead of gradients, once in many steps: DiLoCo (arXiv:2311.08105), or plain averaging (local SGD).

Every rank takes `sync_every` steps alone, on its slice of each global batch and with a gradient that is the mean over
its own slice. Then all ranks average their weights, and the outer step moves the weights that they began with, the
anchor, towards the average by Nesterov momentum:

    d = anchor − average        v = momentum·v + d        anchor = anchor − lr·(d + momentum·v)

With lr = 1 and momentum = 0 the anchor becomes the average. Ranks begin the next round with the anchor; each keeps the
moments of its own optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.config.schema_distributed import LocalSGDConfig
from shoal.parallel.compression.rank_state import state_of_rank, tag_with_rank
from shoal.parallel.compression.wire import Wire, all_reduce_bytes, sum_in_buckets
from shoal.types import TrainState

_ANCHOR, _MOMENTUM = "local_sgd/anchor/", "local_sgd/momentum/"
"""What all ranks have alike in a checkpoint."""
_WEIGHTS, _MOMENTS = "weights/", "moments/"
"""What each rank has for itself."""


class LocalSGD:
    """The outer step over the trained parameters of a model."""

    on_average: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None] | None = None
    """Is called after an outer step with this rank's weights and the anchor before it, for a proof."""

    def __init__(
        self, config: LocalSGDConfig, model: nn.Module, group: dist.ProcessGroup | None, mesh: Mapping[str, int]
    ):
        self.config, self.wire = config, Wire(group, config.sync_every)
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._origin = {"method": "local_sgd", "mesh": dict(mesh)}
        total_bytes = sum(parameter.nbytes for parameter in self._parameters.values())
        # A round sends what plain ddp sends in a step; known before the first one, also in a process that resumes.
        self.wire.bytes_sent = self.wire.bytes_uncompressed = all_reduce_bytes(total_bytes, self.ranks)
        self.anchor: dict[str, Tensor] = {}
        self.momentum: dict[str, Tensor] = {}
        self._start_round()
        self.momentum = {name: torch.zeros_like(value) for name, value in self.anchor.items()}

    @property
    def ranks(self) -> int:
        """The number of ranks that average their weights."""
        return self.wire.ranks

    def after_step(self, step: int) -> None:
        """Takes the outer step if a round ends with this step, counted from 0."""
        self._steps_in_round += 1
        if (step + 1) % self.config.sync_every == 0:
            self._take_outer_step()

    @torch.no_grad()
    def _take_outer_step(self) -> None:
        self.wire.start()
        factor, momentum = self.config.outer_lr, self.config.outer_momentum
        before = None
        if self.on_average is not None:
            before = [{n: t.detach().clone() for n, t in one.items()} for one in (self._parameters, self.anchor)]
        with self.wire.exchanging(next(iter(self.anchor.values())).device):
            for name, mean in self._mean(self.wire).items():
                anchor, velocity = self.anchor[name], self.momentum[name]
                difference = anchor - mean
                velocity.mul_(momentum).add_(difference)
                anchor.sub_(difference.add_(velocity, alpha=momentum), alpha=factor)
                self._parameters[name].copy_(anchor)
        self._steps_in_round = 0
        if self.on_average is not None and before is not None:
            self.on_average(*before)

    def _mean(self, wire: Wire | None = None) -> dict[str, Tensor]:
        """Returns the average of each parameter over ranks; `wire` counts what is sent, if it is part of a step."""
        totals = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        sum_in_buckets([*totals.values()], wire or Wire(self.wire.group))
        return {name: total.div_(self.ranks) for name, total in totals.items()}

    def average(self) -> AveragedWeights:
        """Puts the average over ranks into the model; leaving what it returns, as a context, takes it out again."""
        own: dict[str, Tensor] = {}
        if self._steps_in_round:
            own = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
            self._write(self._mean())
        return AveragedWeights(self, own)

    @torch.no_grad()
    def _write(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self._parameters[name].copy_(value)

    def _start_round(self) -> None:
        self.anchor = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._steps_in_round = 0

    def replicated(self) -> dict[str, Tensor]:
        """Returns what is equal on all ranks, also within a round."""
        return {f"{kind}/{name}": t for kind in ("anchor", "momentum") for name, t in getattr(self, kind).items()}

    def describe(self) -> str:
        """Returns what is in force, for the report."""
        config, uncompressed = self.config, self.wire.bytes_uncompressed
        return (
            f"local_sgd: weights of {self.ranks} ranks are averaged every {config.sync_every} steps, outer learning "
            f"rate {config.outer_lr:g}, outer momentum {config.outer_momentum:g}, "
            f"{uncompressed / config.sync_every / 1e6:.3g} instead of {uncompressed / 1e6:.3g} MB sent by a rank in a "
            "step; not the same training as on one device"
        )

    def check(self) -> None:
        """Is called after the first step; nothing can keep the outer step from its work."""

    def num_stored_copies(self, slots: int) -> int:
        """Returns how many numbers a checkpoint has at most for each parameter besides weights and moments."""
        return 2 + self.ranks + slots * (self.ranks - 1)

    # Checkpoints

    def as_stored(self, state: TrainState) -> TrainState:
        """Returns a state with the average as weights and the moments of rank 0, which any layout can load.

        Weights within a round, and the moments of other ranks, are stored for each rank. All ranks call it.
        """
        rank, own = dist.get_rank(), dict[str, Tensor]()
        shared = {f"{_MOMENTUM}{name}": value for name, value in self.momentum.items()}
        model, moments = state.model, state.optimizer
        if self._steps_in_round:
            own |= {f"{_WEIGHTS}{name}": parameter.detach() for name, parameter in self._parameters.items()}
            shared |= {f"{_ANCHOR}{name}": value for name, value in self.anchor.items()}
            model = {**model, **self._mean()}
        if rank:
            own |= {f"{_MOMENTS}{slot}/{name}": t for name, slots in moments.items() for slot, t in slots.items()}
            moments = {}
        strategy = {**state.strategy, **shared, **tag_with_rank(own, self._origin, rank)}
        return replace(state, model=model, optimizer=moments, strategy=strategy)

    def own_state(self, state: TrainState) -> tuple[TrainState, str]:
        """Returns a loaded state with this rank's own weights and moments, and why it has none, or an empty text."""
        own, other = state_of_rank(state.strategy, self._origin, dist.get_rank())
        if other is not None:
            then = "other processes" if other.get("method") == "local_sgd" else "another exchange"
            return state, f"it was saved with {then}, so all ranks begin a round of local_sgd with the same state"
        weights = {name.removeprefix(_WEIGHTS): t for name, t in own.items() if name.startswith(_WEIGHTS)}
        moments: dict[str, dict[str, Tensor]] = {}
        for key, value in own.items():
            if key.startswith(_MOMENTS):
                slot, _, name = key.removeprefix(_MOMENTS).partition("/")
                moments.setdefault(name, {})[slot] = value
        model = {**state.model, **weights}
        return replace(state, model=model, optimizer=moments if dist.get_rank() else state.optimizer), ""

    @torch.no_grad()
    def load_state(self, stored: Mapping[str, Any], is_own: bool) -> None:
        """Takes anchor and momentum from a checkpoint, after the weights were loaded; `is_own` says whether those are
        this rank's own."""
        self._start_round()
        for name, velocity in self.momentum.items():
            key = f"{_MOMENTUM}{name}"
            velocity.copy_(_read(stored[key])) if key in stored else velocity.zero_()
        anchors = {name: stored[f"{_ANCHOR}{name}"] for name in self.anchor if f"{_ANCHOR}{name}" in stored}
        if is_own and anchors:
            self._steps_in_round = 1  # at least; it only matters that a round has begun
            for name, anchor in anchors.items():
                self.anchor[name].copy_(_read(anchor))


class AveragedWeights:
    """A context at whose end a rank has its own weights again."""

    def __init__(self, local_sgd: LocalSGD, own: Mapping[str, Tensor]):
        self._local_sgd, self._own = local_sgd, own

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._local_sgd._write(self._own)


def _read(tensor: Any) -> Tensor:
    return tensor if isinstance(tensor, Tensor) else tensor.read()
