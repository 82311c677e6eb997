"""BatchNorm with the statistics of all data-parallel ranks: what one device computes for their samples together.

torch's SyncBatchNorm works on GPUs alone, over one process group, and counts fillers. This one works on every device,
and is a layer around the forward of the model's BatchNorms, so that classes and names stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.forward import Layer, add_layer
from shoal.parallel.collectives import all_gather_single
from shoal.torch_private import BATCH_NORM

Groups = Sequence[dist.ProcessGroup | None]


def mixing_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules in training mode whose output for a sample depends on the others in its batch, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, BATCH_NORM) and m.training}


class SyncedBatchNorms:
    """Lets the BatchNorms of a model take mean and variance over the samples of all ranks in `groups`.

    In evaluation mode they use their running statistics as always, and nothing is sent.
    """

    def __init__(self, model: nn.Module, groups: Groups):
        self._groups = groups
        self._counts_samples = True
        self.modules = [module for module in model.modules() if isinstance(module, BATCH_NORM)]
        for name, module in model.named_modules():
            if module in self.modules:
                if type(module).forward not in (BATCH_NORM.forward, nn.SyncBatchNorm.forward):
                    raise UserError(
                        f"training.sync_batch_norm = true: {name} is a {type(module).__name__} with a forward of its "
                        "own, which shoal cannot replace; use torch's BatchNorm, or leave the key out"
                    )
                add_layer(module, partial(self._normalize, module))

    @contextmanager
    def without_samples(self) -> Iterator[None]:
        """Is entered around a filler: its samples do not count, but this rank takes part in what is exchanged."""
        self._counts_samples = False
        try:
            yield
        finally:
            self._counts_samples = True

    def _normalize(self, module: Any, forward: Layer, input: Tensor) -> Tensor:
        if not module.training:
            return forward(input)
        if not isinstance(module, nn.SyncBatchNorm):  # that one has its own name for the check
            module._check_input_dim(input)
        output, mean, variance, count = _Normalize.apply(
            input, module.weight, module.bias, module.eps, self._counts_samples, self._groups
        )
        if module.track_running_stats:
            _update_running(module, mean, variance, count)
        return output


@torch.no_grad()
def _update_running(module: Any, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    """Moves the running statistics as torch does, by the variance with n - 1."""
    module.num_batches_tracked.add_(1)
    factor = 1 / module.num_batches_tracked if module.momentum is None else module.momentum
    unbiased = variance * (count / (count - 1).clamp_(min=1))
    for running, new in ((module.running_mean, mean), (module.running_var, unbiased)):
        running.add_(factor * (new.to(running.dtype) - running))


class _Normalize(torch.autograd.Function):
    """Returns the normalized input, and mean, variance (with n) and count of the samples of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, counts: bool, groups: Groups
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        values = input if input.dtype == torch.float64 else input.float()
        mean, variance, count = _statistics(values, counts, groups)
        scale = torch.rsqrt(variance + eps)
        ctx.save_for_backward(input, weight, mean, scale, count)
        ctx.counts, ctx.groups = counts, groups
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(mean, variance, count)
        output = (values - _along(mean, values)) * _along(scale, values)
        if weight is not None:
            output = output * _along(weight.to(values.dtype), values)
        if bias is not None:
            output = output + _along(bias.to(values.dtype), values)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, *others: Any) -> tuple[Tensor | None, ...]:
        input, weight, mean, scale, count = ctx.saved_tensors
        gradient = torch.zeros_like(input) if gradient is None else gradient
        values, upstream = input.to(mean.dtype), gradient.to(mean.dtype)
        normalized, dimensions = (values - _along(mean, values)) * _along(scale, values), _all_but_channels(values)
        of_bias, of_weight = upstream.sum(dimensions), (upstream * normalized).sum(dimensions)
        # The mean and the variance depend on the samples of all ranks, and on those of fillers not at all.
        sums = torch.cat([of_bias, of_weight]) * ctx.counts
        for group in ctx.groups:
            dist.all_reduce(sums, group=group)
        if ctx.counts:
            through_mean, through_variance = (_along(total / count, values) for total in sums.chunk(2))
            upstream = upstream - through_mean - normalized * through_variance
        factor = scale if weight is None else scale * weight.to(scale.dtype)
        of_input = (upstream * _along(factor, values)).to(input.dtype)
        if weight is None:
            return of_input, None, None, None, None, None
        return of_input, of_weight.to(weight.dtype), of_bias.to(weight.dtype), None, None, None


def _statistics(values: Tensor, counts: bool, groups: Groups) -> tuple[Tensor, Tensor, Tensor]:
    """Returns mean, variance and count of the values of each channel over all ranks.

    Ranks exchange their means and their sums of squares around these: sums of squares around 0 would lose digits.
    """
    channels, count = values.shape[1], values.numel() // values.shape[1]
    variance, mean = torch.var_mean(values, _all_but_channels(values), correction=0)
    local = torch.cat([mean, variance * count, values.new_full((1,), count)])
    if not counts:
        local = torch.zeros_like(local)
    for group in groups:
        ranks = local.new_empty(dist.get_world_size(group), len(local))
        all_gather_single(ranks.view(-1), local, group=group)
        means, squares, sizes = ranks.split([channels, channels, 1], dim=1)
        total = sizes.sum()
        mean = (means * sizes).sum(0) / total.clamp(min=1)
        around = squares + sizes * (means - mean).square()
        local = torch.cat([mean, around.sum(0), total.view(1)])
    mean, squares, total = local.split([channels, channels, 1])
    total = total.clamp(min=1)
    return mean.clone(), squares / total, total.clone()


def _all_but_channels(values: Tensor) -> list[int]:
    return [dimension for dimension in range(values.ndim) if dimension != 1]


def _along(channels: Tensor, values: Tensor) -> Tensor:
    """Returns a vector of one number for each channel in a shape that can be multiplied with the values."""
    return channels.view(1, -1, *[1] * (values.ndim - 2))
