"""The hooks of a run: methods that recipes and callbacks may define."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.callbacks.run_handle import RunHandle

HOOKS = (
    *("on_start", "before_step", "before_update", "after_step", "after_log", "after_evaluation", "before_save"),
    "on_end",
)


class HookMethods:
    """Hooks that do nothing. A run calls those that a subclass overrides, on every rank."""

    def on_start(self, run: RunHandle) -> None:
        """Is called before the first step of this process, after the state of a checkpoint was loaded."""

    def before_step(self, run: RunHandle) -> None:
        """Is called before each step."""

    def before_update(self, run: RunHandle) -> None:
        """Is called in each step after the backward, when `run.strategy.gradients(run.model)` has the gradients.

        With several objectives it is called once for each, with its gradients alone.
        """

    def after_step(self, run: RunHandle) -> None:
        """Is called after each step. `run.output` and `run.info` have its loss and norm, on the device."""

    def after_log(self, run: RunHandle, metrics: Mapping[str, float]) -> None:
        """Is called after each line of the log that files have too, with its numbers."""

    def after_evaluation(self, run: RunHandle, metrics: Mapping[str, float]) -> None:
        """Is called after each evaluation with its metrics, which are equal on all ranks."""

    def before_save(self, run: RunHandle) -> None:
        """Is called before a checkpoint is saved, and before `state`."""

    def on_end(self, run: RunHandle) -> None:
        """Is called once when the run has ended, after its last evaluation and before its last save.

        A signal does not end a run: it will be resumed.
        """

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint has to hold: tensors by name, and anything that JSON can hold.

        All ranks call it. Tensors and values have to be equal on all ranks; rank 0's are saved. A tensor whose name is
        `<kind>/<name of a parameter>` is this rank's part of a tensor that is sharded as the parameter is.
        """
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes back what `state` returned, before `on_start`. Tensors are on the CPU."""
