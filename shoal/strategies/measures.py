"""What a recipe measures of micro-batches besides their loss: checked, and added up over a step on this rank."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.errors import UserError
from shoal.strategies.recipe_results import checked_loss
from shoal.types import MicroBatch, Objective

NAME = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")
"""What the name of a metric, or of a set of evaluation data, may look like: all loggers take such names."""
RESERVED = {"loss", "grad_norm", "skipped_steps", "learning_rate", "data_seconds", "mfu", "memory_gib", "epoch"}
"""Names of numbers that every run logs."""


class Measures:
    """Adds up a recipe's metrics over the micro-batches of one step.

    Sums stay on the device, in float64 where the device has it, so that nothing waits and nothing is rounded away.
    """

    def __init__(
        self,
        recipe: Objective,
        micro_batches: Sequence[MicroBatch],
        counts: Sequence[Tensor | int],
        only_loss: bool = False,
    ):
        """`counts` are the recipe's counts of the micro-batches. With `only_loss` nothing is measured."""
        self.by_name: dict[str, Any] = {}
        """(sum, count), or a torchmetrics object."""
        self._recipe, self._micro_batches, self._counts = recipe, micro_batches, counts
        self.has_metrics, self._only_loss = recipe.has_metrics and not only_loss, only_loss

    def is_filler(self, index: int) -> bool:
        """Returns whether a micro-batch only repeats samples, so that it must change nothing."""
        return not self._micro_batches[index].weight

    def loss(self, output: Any, batch: Any, index: int) -> Tensor:
        """Returns the loss of a micro-batch, and adds its metrics unless it is a filler."""
        loss, beside = self._recipe.loss(output, batch), None
        if isinstance(loss, tuple):
            loss, beside = self._split(loss)
        if (self.has_metrics or (beside and not self._only_loss)) and self._micro_batches[index].weight:
            self._add(output, batch, beside, self._counts[index])
        return checked_loss(self._recipe, loss)

    def split_loss(self, output: Any, batch: Any) -> tuple[Tensor, Mapping[str, Any] | None]:
        """Returns the loss of a micro-batch, and what the recipe returned with it, which `measure` takes."""
        loss = self._recipe.loss(output, batch)
        loss, beside = self._split(loss) if isinstance(loss, tuple) else (loss, None)
        return checked_loss(self._recipe, loss), beside

    def measure(self, output: Any, batch: Any, beside: Mapping[str, Any] | None, index: int) -> None:
        """Adds the metrics of a micro-batch whose loss has been computed before."""
        if self.has_metrics or (beside and not self._only_loss):
            self._add(output, batch, beside, self._counts[index])

    def loss_alone(self, output: Any, batch: Any) -> Tensor:
        """Returns the loss of a micro-batch that is computed only to set things up."""
        loss = self._recipe.loss(output, batch)
        return checked_loss(self._recipe, self._split(loss)[0] if isinstance(loss, tuple) else loss)

    def _split(self, returned: tuple[Any, ...]) -> tuple[Tensor, Mapping[str, Any]]:
        if len(returned) != 2 or not isinstance(returned[0], Tensor) or not isinstance(returned[1], Mapping):
            kinds = ", ".join(type(value).__name__ for value in returned)
            raise UserError(f"{self._who}: loss returned ({kinds}); return a tensor, or (tensor, dict of metrics)")
        return returned[0], returned[1]

    @torch.no_grad()
    def _add(self, output: Any, batch: Any, beside: Mapping[str, Any] | None, count: Tensor | int) -> None:
        found = {name: self._sum_of(name, value, count, "loss") for name, value in (beside or {}).items()}
        if self.has_metrics:
            returned = self._recipe.metrics(output, batch)
            if not isinstance(returned, Mapping):
                raise UserError(f"{self._who}: metrics returned {_say(returned)}; return a dict of metrics by name")
            for name, value in returned.items():
                if name in found:
                    raise UserError(f"{self._who}: both loss and metrics give {name!r}; rename one of them")
                found[name] = self._sum_of(name, value, count, "metrics")
        for name, new in found.items():
            old = self.by_name.get(name)
            if isinstance(old, tuple) and isinstance(new, tuple):
                new = (old[0] + new[0], old[1] + new[1])
            elif old is not None and old is not new:
                raise self._error(name, "is of another kind than in the micro-batch before; return one kind only")
            self.by_name[name] = new

    def _sum_of(self, name: Any, value: Any, count: Tensor | int, method: str) -> Any:
        """Returns (sum, count) on the device, or the torchmetrics object."""
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise self._error(name, "is no good name; use letters, digits and _ . - /")
        if is_reserved(name):
            raise self._error(name, "is the name of a number that every run logs; rename it")
        if isinstance(value, Tensor):
            total = self._number(name, value) * count
            # The mean of an empty batch is NaN, and its sum is 0.
            return (torch.where(count > 0, total, 0.0) if isinstance(count, Tensor) else total if count else 0.0), count
        if isinstance(value, tuple) and len(value) == 2:
            return self._number(name, value[0]), self._number(name, value[1], is_count=True)
        if is_metric_object(value):
            if method == "loss":  # which is also called to warm up
                raise self._error(name, f"is a {type(value).__name__} from loss; update and return it in metrics")
            return value
        raise self._error(
            name,
            f"is {_say(value)}; return (sum, count), a tensor that is a mean over the batch, or a torchmetrics object",
        )

    def _number(self, name: str, value: Any, is_count: bool = False) -> Tensor | float:
        """Returns a copy of one number: a tensor may be a view of a large one, or change later."""
        if isinstance(value, Tensor) and not value.ndim and not value.is_complex():
            return value.detach().to(torch.float32 if value.device.type == "mps" else torch.float64, copy=True)
        if type(value) is int or (is_count and type(value) is float):
            return float(value)
        part = "the count of " if is_count else ""
        if isinstance(value, float):
            hint = "return a tensor instead of .item(), for which the host would wait"
        else:
            hint = "it should be one number, a sum or a mean over the batch"
        raise self._error(name, f"has a wrong value: {part}it is {_say(value)}; {hint}")

    def _error(self, name: Any, problem: str) -> UserError:
        return UserError(f"{self._who}: the metric {name!r} {problem}")

    @property
    def _who(self) -> str:
        # Under ZeRO-3 the recipe is wrapped in the first step.
        return f"recipe {type(getattr(self._recipe.metrics, '__self__', self._recipe)).__name__}"


def is_reserved(name: str) -> bool:
    """Returns whether every run logs a number of this name."""
    return name in RESERVED or name.endswith("_per_second")


def is_metric_object(value: Any) -> bool:
    """Returns whether a value is an object of the package torchmetrics, which need not be installed."""
    package = sys.modules.get("torchmetrics")
    return package is not None and isinstance(value, package.Metric)


def _say(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {'complex ' if value.is_complex() else ''}tensor of shape {[*value.shape]}"
    return f"a Python {type(value).__name__}"
