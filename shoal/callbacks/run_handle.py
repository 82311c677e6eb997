"""What hooks see of a run, and what they can ask of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.config import Config
from shoal.config.body import NO_WAY_BACK
from shoal.errors import UserError
from shoal.types import StepInfo, StepOutput

if TYPE_CHECKING:
    from shoal.strategies import DistributedStrategy


class Histogram(NamedTuple):
    """The counts of a tensor's elements in bins of equal width between its extremes, on the device."""

    low: Tensor
    high: Tensor
    counts: Tensor
    total: Tensor
    """The sum of the elements."""
    squares: Tensor
    """The sum of their squares."""


def as_record(histogram: Histogram) -> dict[str, Any]:
    """Returns a histogram as the fields of TensorBoard's HistogramProto. The host waits for the device."""
    low, high, total, squares = torch.stack([*histogram[:2], *histogram[3:]]).tolist()
    counts, bins = histogram.counts.tolist(), len(histogram.counts)
    return {
        "min": low,
        "max": high,
        "num": sum(counts),
        "sum": total,
        "sum_squares": squares,
        "bucket_limit": [low + (high - low) * (index + 1) / bins for index in range(bins)],
        "bucket": counts,
    }


@dataclass
class RunHandle:
    """A run as hooks see it. The same object is passed to all of them."""

    config: Config
    recipe: Any
    strategy: DistributedStrategy
    model: nn.Module
    """What this rank holds of the model: parameters may be sharded."""
    optimizer: Optimizer
    """The optimizer, or that of the first objective if the recipe has several."""
    output_dir: Path
    step: int
    """The number of steps that the run has taken."""
    total_steps: int
    metrics: dict[str, float] = field(default_factory=dict)
    """The metrics that were logged last, by name."""
    training_data: Callable[[], Any] = lambda: ()
    """Opens a loader of the training data from its beginning, apart from the one that is trained on. Close it."""
    epoch_size: int | None = None
    """The number of samples in an epoch; None for a stream."""
    keep_alive: Callable[[], None] = lambda: None
    """Tells the hang detection that a hook which takes long goes on."""
    output: StepOutput | None = None
    """The sum of the losses and the count of the last step, on the device."""
    info: StepInfo | None = None
    """The gradient norm of the last step, and whether its update was skipped, on the device."""

    learning_rate_scale: float = 1.0
    """What the learning rate of the schedule is multiplied by."""
    stop_reason: str | None = None
    """Why a hook has ended the run."""
    logged: dict[str, float | Tensor] = field(default_factory=dict)
    """What hooks have logged since the last line of the log."""
    histograms: dict[str, Histogram] = field(default_factory=dict)
    has_request: bool = False
    """True if a hook of this rank has asked for something that all ranks must agree on at the end of the step."""
    requested_factor: float = 1.0
    requested_stop: str | None = None
    requested_return: str | None = None
    may_go_back: bool = False
    """True while `after_log` is called."""

    def log(self, name: str, value: float | Tensor) -> None:
        """Shows a number in the next line of the log. A tensor stays on the device until then."""
        if name.startswith(("eval/", "preview")):  # lines with such names are written again by a resumed run
            raise UserError(f"log({name!r}): names that begin with eval/ are those of evaluations; choose another")
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise UserError(f"log({name!r}): the tensor has the shape {[*value.shape]}; log one number at a time")
            value = value.detach().clone()  # it may be changed in place before the line is due
        elif not isinstance(value, int | float):
            raise UserError(f"log({name!r}): {value!r:.100} is a {type(value).__name__}; log a number or a tensor")
        self.logged[name] = value

    def scale_learning_rate(self, factor: float) -> None:
        """Multiplies the learning rate by a factor from the next step on, for the rest of the run.

        All ranks have to ask for the same factor.
        """
        if not (isinstance(factor, int | float) and isfinite(factor) and factor > 0):
            raise UserError(f"scale_learning_rate({factor!r:.100}): the factor has to be a number above 0")
        self.requested_factor *= factor
        self.has_request = True

    def go_back(self, reason: str) -> None:
        """Returns to the last checkpoint after this step, on all ranks, and leaves out the samples since it.

        To be called in `after_log`, by all ranks in the same step, which is then neither evaluated nor saved.
        """
        if self.config.training.body is not None:
            raise UserError(f"{reason}: {NO_WAY_BACK}; leave out what calls go_back, or train the recipe's loss")
        if not self.may_go_back:
            raise UserError(f"go_back({str(reason)!r:.100}): it was not called in after_log; call it there")
        self.requested_return = str(reason)

    def stop(self, reason: str) -> None:
        """Ends the run after this step, on all ranks, if any rank asks for it. The step is evaluated and saved."""
        self.requested_stop = self.requested_stop or str(reason)
        self.has_request = True
