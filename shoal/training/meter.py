"""What happened since the last line of the log. The device is read only when a line is due."""

from __future__ import annotations

import time

import torch
from torch import nn

from shoal.config.schema import TrainingConfig
from shoal.data import Loader
from shoal.observe.flops import count_forward_flops, peak_flops, tree_to_meta
from shoal.strategies import Objective, SingleStrategy
from shoal.types import MicroBatch, StepInfo, StepOutput


class Meter:
    """Adds up on the device; `read` is the one place where the host waits for it."""

    def __init__(self, device: torch.device, unit: str, training: TrainingConfig, loader: Loader, skipped_steps: int):
        self._unit = unit
        self._peak_flops = peak_flops(
            device, "tf32" if training.tf32 and training.mixed_precision == "fp32" else training.mixed_precision
        )
        self._counted = torch.zeros((), device=device)
        self._skipped = torch.full((), float(skipped_steps), device=device)
        self._skipped_in_a_row = torch.zeros((), device=device)
        self.skipped_in_a_row = 0
        self.restart_clock(loader)

    def add(self, output: StepOutput, info: StepInfo) -> None:
        self._output, self._info = output, info
        self._counted += output.count
        self._skipped += info.skipped
        self._skipped_in_a_row.add_(1).mul_(info.skipped)

    def read(self, loader: Loader, flops_per_sample: float | None) -> dict[str, float]:
        """Loss and norm of the last step; rates since the clock was last restarted, which this does."""
        tensors = (self._output.loss, self._info.grad_norm, self._counted, self._skipped, self._skipped_in_a_row)
        loss, norm, counted, skipped, in_a_row = torch.stack([t.float() for t in tensors]).tolist()
        seconds = max(time.perf_counter() - self._since, 1e-9)
        samples_per_second = (loader.position - self._position) / seconds
        self.skipped_in_a_row = int(in_a_row)
        metrics = {
            "train/loss": loss,
            "train/grad_norm": norm,
            "train/skipped_steps": skipped,
            "train/samples_per_second": samples_per_second,
            f"train/{self._unit}_per_second": counted / seconds,
            "train/data_seconds": loader.waited_seconds - self._waited,
        }
        if flops_per_sample and self._peak_flops:
            metrics["train/mfu"] = flops_per_sample * samples_per_second / self._peak_flops
        self.restart_clock(loader)
        return metrics

    def skipped_steps(self) -> int:
        return int(self._skipped)

    def restart_clock(self, loader: Loader) -> None:
        """Leaves what happened until now, such as an evaluation, out of the rates."""
        self._counted.zero_()
        self._position, self._waited = loader.position, loader.waited_seconds
        self._since = time.perf_counter()


def flops_per_sample(strategy: SingleStrategy, model: nn.Module, micro: MicroBatch, recipe: Objective) -> float | None:
    """Model FLOPs of a forward and backward (twice the forward) for one sample, counted without computing."""
    batch = tree_to_meta(strategy.ready(micro, recipe))
    forward = count_forward_flops(model, lambda meta_model: meta_model(**recipe.inputs(batch)))
    return 3 * forward / len(micro.ids) if forward else None
