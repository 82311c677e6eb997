"""Ends a run when a metric of its evaluations no longer improves."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from shoal.callbacks.callback import Callback
from shoal.config import Section
from shoal.config.section import Positive
from shoal.errors import UserError

if TYPE_CHECKING:
    from shoal.callbacks.run_handle import RunHandle


class EarlyStopping(Callback):
    """Counts evaluations in a row without an improvement."""

    class Config(Section):
        metric: str = "eval/loss"
        """The metric of an evaluation that has to improve."""
        mode: Literal["min", "max"] = "min"
        """Whether a smaller (`min`) or a larger (`max`) metric is better."""
        patience: Positive = 3
        """End the run after this many evaluations in a row without an improvement."""
        min_delta: Annotated[float, Field(ge=0)] = 0.0
        """How much better than the best so far a metric has to be to count as an improvement."""

    def __init__(self, config: Any = None):
        super().__init__(config)
        self._best: float | None = None
        self._since_best = 0

    def on_start(self, run: RunHandle) -> None:
        if not (run.config.training.eval_steps or run.config.training.eval_epochs):
            raise UserError(
                "callbacks: early_stopping needs evaluations during the run; set training.eval_steps or eval_epochs, "
                "or leave it out"
            )

    def after_evaluation(self, run: RunHandle, metrics: Mapping[str, float]) -> None:
        config = self.config
        if config.metric not in metrics:
            raise UserError(
                f"callbacks.early_stopping.metric = {config.metric!r}: an evaluation gives {', '.join(metrics)}; use "
                "one of them"
            )
        value = metrics[config.metric]
        if self._improves(value):
            self._best, self._since_best = value, 0
        else:
            self._since_best += 1
        if self._since_best >= config.patience:
            best = "never was a number" if self._best is None else f"is not better than {self._best:.6g}"
            run.stop(f"{config.metric} {best} since {self._since_best} evaluations")

    def _improves(self, value: float) -> bool:
        if not isfinite(value):
            return False
        if self._best is None:
            return True
        gain = self._best - value if self.config.mode == "min" else value - self._best
        return gain > self.config.min_delta

    def state(self) -> dict[str, Any]:
        return {"best": self._best, "since_best": self._since_best}

    def load_state(self, state: dict[str, Any]) -> None:
        best = state["best"]
        self._best, self._since_best = None if best is None else float(best), int(state["since_best"])
