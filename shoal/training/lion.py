"""The Lion optimizer: it steps by the sign of an average of gradients, and keeps one tensor for each parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.torch_private import (
    declare_skips_on_device,
    foreach_add_,
    foreach_div,
    foreach_lerp,
    foreach_lerp_,
    foreach_mul_,
    foreach_sign_,
)


class Lion(Optimizer):
    """Lion, from "Symbolic Discovery of Optimization Algorithms" (Chen et al., 2023), with decoupled weight decay.

    It divides and skips on the device, as torch's fused optimizers do.
    """

    elementwise = True
    found_inf: Tensor | None = None
    """1 if the update is to be skipped, else 0."""
    grad_scale: Tensor | None = None
    """What gradients are divided by."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        declare_skips_on_device(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._step_group(group, parameters)

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        averages = [self._average(parameter) for parameter in parameters]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self.grad_scale is not None:
            gradients = [*foreach_div(gradients, self.grad_scale)]
        lr, (beta1, beta2) = group["lr"], group["betas"]
        factor: Any = 1.0
        if self.found_inf is not None:
            # A skipped update takes the averages for gradients, which leaves them as they are, and is multiplied by 0.
            skipped, factor = self.found_inf.bool(), 1 - self.found_inf
            gradients = [torch.where(skipped, m, g) for m, g in zip(averages, gradients, strict=True)]
        updates = foreach_lerp(averages, gradients, 1 - beta1)
        foreach_sign_(updates)
        foreach_mul_(updates, -lr * factor)
        foreach_mul_(parameters, 1 - lr * group["weight_decay"] * factor)
        foreach_add_(parameters, updates)
        foreach_lerp_(averages, gradients, 1 - beta2)

    def _average(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        average: Tensor = state["exp_avg"]
        return average
