"""The update by itself, from equal weights with equal gradients: no rounding of the precision can hide a mistake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import torch
from torch import Tensor

from shoal.checkpoint.peers import Peers
from shoal.tensors import local_part, local_slices
from shoal.training.session import Session
from shoal.types import TrainState
from shoal.verify.gradients import set_gradients

Moments = dict[str, dict[str, Tensor]]
"""The state of an optimizer, by the names of parameter and slot."""


@dataclass
class Updates:
    """What two updates have made of the first weights. Tensors are whole, on the CPU."""

    norms: list[float] = field(default_factory=list)
    """The gradient norms."""
    updated: dict[str, Tensor] = field(default_factory=dict)
    """The weights after one update, with the gradients of one device."""
    moments: dict[str, Tensor] = field(default_factory=dict)
    """The state of the optimizer after that update, by the names of parameter and slot."""
    resumed: dict[str, Tensor] = field(default_factory=dict)
    """The weights after one more update, before which weights and optimizer state were loaded as from a checkpoint."""
    skips_infinite: bool = True
    """True if an update with an infinite gradient left the weights as they were."""

    def drop_tensors(self) -> None:
        """Empties what is compared of the first rank alone."""
        self.updated, self.moments, self.resumed = {}, {}, {}


def update_alone(
    session: Session,
    start: dict[str, Tensor],
    gradients: tuple[dict[str, Tensor], dict[str, Tensor]],
    max_norm: float,
    loss_scale: Callable[[], float],
    backward: Callable[[], None],
) -> Updates:
    """Updates from the weights `start` with the first gradients, and again with the others.

    After the first update, state is collected and loaded, as a checkpoint is. The second gradient is another one: with
    the first one again, AdamW would take the same step whatever its betas are.
    """
    updates, (first, later) = Updates(), gradients

    def update_with(gradients: dict[str, Tensor]) -> tuple[dict[str, Tensor], Moments]:
        if session.strategy.layout.engine == "deepspeed":
            backward()
        for turn in session.turns:
            trained = gradients.keys() if turn.parameters is None else turn.parameters
            chosen = {name: gradient for name, gradient in gradients.items() if name in trained}
            set_gradients(session.strategy, session.model, chosen, loss_scale())
            updates.norms.append(session.strategy.step(turn.optimizer, max_norm).grad_norm.item())
        return _whole_state(session)

    session.load_state(TrainState(start, {}))
    updates.updated, moments = update_with(first)
    updates.moments = {f"{name} {slot}": t for name, slots in moments.items() for slot, t in slots.items()}
    session.load_state(TrainState(updates.updated, moments))
    updates.resumed, _ = update_with(later)
    after, _ = update_with({name: torch.full_like(gradient, inf) for name, gradient in first.items()})
    del updates.norms[-len(session.turns) :]
    updates.skips_infinite = all(torch.equal(after[name], t) for name, t in updates.resumed.items())
    return updates


def _whole_state(session: Session) -> tuple[dict[str, Tensor], Moments]:
    """Returns the whole weights and optimizer state."""
    state = session.state()
    flat = whole({f"{name} {slot}": t for name, slots in state.optimizer.items() for slot, t in slots.items()})
    moments: Moments = {}
    for key, tensor in flat.items():
        name, slot = key.rsplit(" ", 1)
        moments.setdefault(name, {})[slot] = tensor
    return whole(state.model), moments


def whole(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors on the CPU, put together from the parts of all ranks; stages of a pipeline have other names.

    Not by DTensor's own gathering: over gloo with CUDA tensors, which tests on one GPU use, it is not to be trusted.
    """
    parts = {name: (t.shape, local_slices(t), local_part(t).to("cpu", copy=True)) for name, t in named.items()}
    found: dict[str, Tensor] = {}
    for rank in Peers().all_gather(parts):
        for name, (shape, place, part) in rank.items():
            found.setdefault(name, torch.empty(shape, dtype=part.dtype))[tuple(place)] = part
    return found
