"""Histograms of gradients and weights in TensorBoard, of whole tensors, without gathering them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.callbacks.callback import Callback
from shoal.callbacks.run_handle import Histogram
from shoal.config import Section
from shoal.config.section import Positive
from shoal.errors import UserError
from shoal.parallel.sharding.shards import split_over
from shoal.tensors import local_part

if TYPE_CHECKING:
    from shoal.callbacks.run_handle import RunHandle


class Histograms(Callback):
    """Counts the elements of each gradient and each trained parameter in bins between its extremes."""

    class Config(Section):
        every: Positive = 100
        """Make histograms of every n-th step; a multiple of `logging.every`."""
        bins: Positive = 64
        """Number of bins, of equal width."""

    def on_start(self, run: RunHandle) -> None:
        if not run.config.logging.tensorboard:
            raise UserError("callbacks: histograms are written to TensorBoard; set logging.tensorboard to true")
        if self.config.every % run.config.logging.every:
            raise UserError(
                f"callbacks.histograms.every = {self.config.every}: histograms are shown with a line of the log, and "
                f"logging.every is {run.config.logging.every}; use a multiple of it"
            )
        if run.config.training.mixed_precision == "fp16":
            raise UserError(
                "callbacks: histograms of gradients under training.mixed_precision = fp16 would show them multiplied "
                "by the loss scale; use bf16 or fp32, or leave the callback out"
            )
        if run.strategy.layout.engine == "deepspeed":
            raise UserError(
                "callbacks: histograms look at gradients where ranks keep them, which DeepSpeed does its own way; use "
                "strategy fsdp or ddp, or leave the callback out"
            )

    def why_idle(self, run: RunHandle) -> str:
        return f"the run has fewer than every = {every} steps" if (every := self.config.every) > run.total_steps else ""

    @torch.no_grad()
    def before_update(self, run: RunHandle) -> None:
        """The weights are those that the gradients belong to."""
        if (run.step + 1) % self.config.every:
            return
        trained: dict[str, Tensor] = {name: p for name, p in run.model.named_parameters() if p.requires_grad}
        gradients = {name: _placed(g, trained[name]) for name, g in run.strategy.gradients(run.model).items()}
        for kind, tensors in (("gradients", gradients), ("weights", trained)):
            for name, histogram in count_elements(tensors, self.config.bins).items():
                run.histograms[f"train/{kind}/{name}"] = histogram


def _placed(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Returns a gradient in the layout of its parameter."""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        return gradient.redistribute(placements=parameter.placements)
    return gradient


def count_elements(tensors: Mapping[str, Tensor], bins: int) -> dict[str, Histogram]:
    """Returns a histogram of each whole tensor, on the device. Ranks add up the counts of their parts."""
    names_by_groups: dict[tuple[dist.ProcessGroup, ...], list[str]] = {}
    for name, tensor in tensors.items():
        if not tensor.is_complex():
            names_by_groups.setdefault(split_over(tensor), []).append(name)
    histograms: dict[str, Histogram] = {}
    for groups, names in names_by_groups.items():  # in few messages: one for all tensors that are split alike
        parts = [local_part(tensors[name]).flatten().float() for name in names]
        extremes = torch.stack([_extremes(part) for part in parts])
        for group in groups:
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
        lows, highs = -extremes[:, 0], extremes[:, 1]
        sums = torch.stack([_sums(*row, bins) for row in zip(parts, lows, highs, strict=True)])
        for group in groups:
            dist.all_reduce(sums, group=group)
        for index, name in enumerate(names):
            total, squares, counts = sums[index, 0], sums[index, 1], sums[index, 2:]
            histograms[name] = Histogram(lows[index].to(sums), highs[index].to(sums), counts, total, squares)
    return histograms


def _extremes(part: Tensor) -> Tensor:
    """Returns (-smallest, largest) of the finite elements, so that one maximum over ranks finds both."""
    if not part.numel():
        return part.new_full((2,), -torch.inf)
    known = part.isfinite()
    return torch.stack([(-part).where(known, -torch.inf).max(), part.where(known, -torch.inf).max()])


def _sums(part: Tensor, low: Tensor, high: Tensor, bins: int) -> Tensor:
    """Returns the sum, the sum of squares and the counts of the finite elements. No host reads the extremes, as
    torch.histc would have to."""
    known = part.isfinite()
    width = (high - low) / bins
    position = ((part - low) / width.where(width > 0, torch.ones_like(width))).nan_to_num(0).clamp(0, bins - 1).long()
    exact = torch.float32 if part.device.type == "mps" else torch.float64
    counts = torch.zeros(bins, dtype=exact, device=part.device).index_add_(0, position, known.to(exact))
    numbers = part.where(known, 0).to(exact)
    return torch.cat([torch.stack([numbers.sum(), numbers.square().sum()]), counts])
