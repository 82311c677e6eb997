"""Stochastic weight averaging: the plain mean of the weights after some steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.callbacks.average import KIND, Average
from shoal.callbacks.callback import Callback
from shoal.config import Section
from shoal.config.section import NonNegative, Positive
from shoal.errors import UserError
from shoal.torch_private import BATCH_NORM

if TYPE_CHECKING:
    from shoal.callbacks.run_handle import RunHandle

BUFFER = "buffer"
"""The first part of the names of BatchNorm's statistics in the state."""
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class SWA(Callback):
    """Averages the weights after every n-th step, each with the same weight. Training goes on with the weights.

    When the run has ended, the statistics of BatchNorm are estimated anew with the average, on training data.
    """

    class Config(Section):
        start_step: NonNegative
        """The first step whose weights are averaged."""
        every: Positive = 1
        """Average the weights after every n-th step from there on."""
        batch_norm_steps: Positive | None = None
        """Number of global batches to estimate the statistics of BatchNorm on. Default: one epoch; a stream needs
        it."""

    def __init__(self, config: Any = None):
        super().__init__(config)
        self._average: Average | None = None
        self._loaded: dict[str, Any] = {}
        self._count = torch.zeros(())
        """How many steps are in the average: on the device, where it is known which updates were skipped."""
        self._statistics: dict[str, Tensor] = {}

    def on_start(self, run: RunHandle) -> None:
        self._weights = run.strategy.local_weights(run.model)
        device = next((part.device for part in self._weights.parts.values()), run.strategy.device)
        self._count = self._count.to(device)
        if any(name.startswith(f"{KIND}/") for name in self._loaded):
            self._average = Average(self._weights)
            self._average.load_state(self._loaded, "swa")
        self._loaded = {}
        self._has_batch_norm = any(isinstance(module, BATCH_NORM) for module in run.model.modules())
        if self._has_batch_norm and (objectives := run.recipe.objectives()):
            raise UserError(
                "callbacks.swa: BatchNorm's statistics are estimated with the loss, and the recipe has several "
                f"objectives ({', '.join(objectives)}); use ema, or a model without BatchNorm"
            )
        if self._has_batch_norm and self.config.batch_norm_steps is None and run.epoch_size is None:
            raise UserError(
                "callbacks.swa.batch_norm_steps is missing: the training data is a stream, which has no epoch to "
                "estimate BatchNorm's statistics on; set it to a number of steps"
            )

    def after_step(self, run: RunHandle) -> None:
        since_start = run.step - self.config.start_step
        if since_start < 0 or since_start % self.config.every:
            return
        assert run.info is not None
        self._statistics = {}
        if self._average is None:
            self._average = Average(self._weights)
        taken = (1 - run.info.skipped).to(self._count)
        self._count = self._count + taken
        self._average.update(taken / self._count.clamp(min=1))

    def on_end(self, run: RunHandle) -> None:
        if self._average is not None and self._has_batch_norm:
            with self._average.in_use():
                self._statistics = _estimate(run, self.config.batch_norm_steps)

    def why_idle(self, run: RunHandle) -> str:
        return (
            f"the run ends before start_step = {start}" if (start := self.config.start_step) > run.total_steps else ""
        )

    def state(self) -> dict[str, Any]:
        tensors = self._average.state() if self._average else {}
        return {"count": self._count, **tensors, **{f"{BUFFER}/{k}": v for k, v in self._statistics.items()}}

    def load_state(self, state: dict[str, Any]) -> None:
        self._count, self._loaded = state["count"], state
        buffers = {key: value for key, value in state.items() if key.startswith(f"{BUFFER}/")}
        self._statistics = {key.partition("/")[2]: value for key, value in buffers.items()}


def _estimate(run: RunHandle, steps: int | None) -> dict[str, Tensor]:
    """Returns the statistics of BatchNorm over training data, by name; those in the model stay as they are."""
    layers = {  # those in evaluation mode train with the statistics that they have, and so keep them
        name: module
        for name, module in run.model.named_modules()
        if isinstance(module, BATCH_NORM) and module.track_running_stats and module.training
    }
    with _estimating(run.model, layers), closing(run.training_data()) as data:
        for micro_batches in islice(data, steps):
            run.strategy.evaluate(run.model, micro_batches, run.recipe)
            run.keep_alive()
        statistics = {}
        for name, layer in layers.items():
            for key in STATISTICS:
                value: Tensor = getattr(layer, key)
                # Each rank has seen other samples: the mean over ranks is that over all batches.
                if value.is_floating_point():
                    value = run.strategy.sum_over_data(value.clone()) / run.strategy.sum_over_data(value.new_ones(()))
                statistics[f"{name}.{key}" if name else key] = value.clone()
    return statistics


@contextmanager
def _estimating(model: nn.Module, layers: Mapping[str, nn.Module]) -> Iterator[None]:
    """Lets BatchNorm take the plain mean over batches from now on, and all else compute as in an evaluation."""
    modes = {module: module.training for module in model.modules()}
    before = {
        layer: (layer.momentum, {key: getattr(layer, key).clone() for key in STATISTICS}) for layer in layers.values()
    }
    model.eval()
    for layer in before:
        layer.train()
        layer.momentum = None  # type: ignore[assignment]  # torch then takes the mean of all batches
        layer.reset_running_stats()  # type: ignore[operator]
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for layer, (momentum, statistics) in before.items():
            layer.momentum = momentum
            for key, value in statistics.items():
                getattr(layer, key).copy_(value)
