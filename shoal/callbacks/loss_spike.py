"""Goes back to the last checkpoint when the loss jumps up, and leaves out the samples since it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import isfinite
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from shoal.callbacks.callback import Callback
from shoal.config import Section
from shoal.errors import UserError

if TYPE_CHECKING:
    from shoal.callbacks.run_handle import RunHandle


class LossSpike(Callback):
    """Compares each logged loss with the median of those before it."""

    class Config(Section):
        factor: Annotated[float, Field(gt=1)] = 3.0
        """A loss above this many times the median of the last losses is a spike."""
        window: Annotated[int, Field(ge=2, le=10_000)] = 20
        """Number of last losses in the log; until there are as many, nothing is a spike."""

    def __init__(self, config: Any = None):
        super().__init__(config)
        self._losses: deque[float] = deque(maxlen=self.config.window)

    def after_log(self, run: RunHandle, metrics: Mapping[str, float]) -> None:
        loss, config = metrics["train/loss"], self.config
        usual = median(self._losses) if len(self._losses) == config.window else None
        if usual is not None and usual <= 0:
            raise UserError(
                f"callbacks: loss_spike compares with {config.factor:g} times the median loss, which is {usual:.6g} "
                "and has to be above 0; leave it out, or add a constant to the loss"
            )
        if usual is not None and loss > config.factor * usual:
            run.go_back(
                f"callbacks: loss_spike: the loss is {loss:.6g}, more than {config.factor:g} times {usual:.6g}, the "
                f"median of the last {config.window} logged ones"
            )
        elif isfinite(loss):
            self._losses.append(loss)

    def why_idle(self, run: RunHandle) -> str:
        steps, every = run.total_steps, run.config.logging.every
        lines = steps // every + (every > 1) + (steps % every > 0)  # the first and the last step have one, too
        return (
            f"the log of the run has no more than window = {self.config.window} lines"
            if (lines <= self.config.window)
            else ""
        )

    def state(self) -> dict[str, Any]:
        return {"losses": [*self._losses]}

    def load_state(self, state: dict[str, Any]) -> None:
        self._losses.extend(float(loss) for loss in state["losses"])
