"""The steps of a `training.body`, as far as their gradients: the prover looks at these and then updates itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.errors import UserError
from shoal.training.own_steps import Step, Verbs
from shoal.training.session import Session
from shoal.types import MicroBatch, StepInfo, StepOutput


class GradientsOfBody(Verbs):
    """Calls a body for one step at a time. Its `run.step()` leaves the gradients where they are."""

    def __init__(self, session: Session, body: Callable[[Any, Step], None]):
        self._session, self._body = session, body

    def forward_backward(self, micro_batches: Sequence[MicroBatch], step: int) -> StepOutput:
        """Does what `strategy.forward_backward` does for a recipe."""
        self._body(self, self._begin(micro_batches, step))
        output, _ = self._end()
        return output

    def _update(self, max_norm: float | str | None) -> StepInfo:
        if self._info is not None:
            raise UserError(
                "training.body: it calls run.step() more than once in a step, and `shoal verify` compares the gradient "
                "of one update; verify a body with one"
            )
        return StepInfo(torch.zeros((), device=self.device), torch.zeros((), device=self.device))
