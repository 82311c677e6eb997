"""An exponential moving average of the weights, for evaluation and export."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from shoal.callbacks.average import KIND, Average
from shoal.callbacks.callback import Callback
from shoal.config import Section
from shoal.config.section import NonNegative, Positive

if TYPE_CHECKING:
    from shoal.callbacks.run_handle import RunHandle


class EMA(Callback):
    """Keeps an exponential moving average of the trained parameters."""

    class Config(Section):
        decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
        """The part of the average that is kept at each update: average = decay × average + (1 − decay) × weights."""
        every: Positive = 1
        """Update after every n-th step."""
        start_step: NonNegative = 0
        """The step whose weights the average begins with. 0: the initial weights."""
        warmup: bool = False
        """Use a smaller decay at first, (1 + n) / (10 + n) after n updates, until it reaches `decay`."""
        use_for_evaluation: bool = True
        """Evaluate the average instead of the weights. Training goes on with the weights."""

    def __init__(self, config: Any = None):
        super().__init__(config)
        self._updates = 0
        self._average: Average | None = None
        self._loaded: dict[str, Any] = {}

    def on_start(self, run: RunHandle) -> None:
        self._weights = run.strategy.local_weights(run.model)
        if run.step >= self.config.start_step:
            self._average = Average(self._weights)
            if any(name.startswith(f"{KIND}/") for name in self._loaded):
                self._average.load_state(self._loaded, "ema")
        self._loaded = {}

    def after_step(self, run: RunHandle) -> None:
        since_start = run.step - self.config.start_step
        if self._average is None:
            if since_start == 0:
                self._average = Average(self._weights)
        elif since_start % self.config.every == 0:
            assert run.info is not None
            # On the device: the average does not move if the update was skipped because of its gradient.
            self._average.update((1 - run.info.skipped) * (1 - self._decay()))
            self._updates += 1

    def _decay(self) -> float:
        decay: float = self.config.decay
        return min(decay, (1 + self._updates) / (10 + self._updates)) if self.config.warmup else decay

    def evaluating(self, run: RunHandle) -> AbstractContextManager[None]:
        if self._average is None or not self.config.use_for_evaluation:
            return nullcontext()
        return self._average.in_use()

    def evaluated_weights(self) -> str | None:
        return KIND if self.config.use_for_evaluation else None

    def why_idle(self, run: RunHandle) -> str:
        return (
            f"the run ends before start_step = {start}" if (start := self.config.start_step) > run.total_steps else ""
        )

    def state(self) -> dict[str, Any]:
        return {"updates": self._updates, **(self._average.state() if self._average else {})}

    def load_state(self, state: dict[str, Any]) -> None:
        self._updates, self._loaded = int(state["updates"]), state
