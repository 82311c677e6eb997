"""Dynamic loss scaling for fp16, computed on the device, so that the host does not wait to know of a skipped step."""

from __future__ import annotations

import torch
from torch import Tensor


class LossScale:
    """A factor on the loss that halves after a skipped step and doubles after enough good steps in a row."""

    INITIAL, GROWTH_STEPS = 2.0**16, 2000

    def __init__(self, device: torch.device):
        self.scale = torch.full((), self.INITIAL, device=device)
        self.good_steps = torch.zeros((), device=device)

    def update(self, skipped: Tensor) -> None:
        good = (self.good_steps + 1) * (1 - skipped)
        grow = good >= self.GROWTH_STEPS
        self.scale *= torch.where(skipped.bool(), 0.5, torch.where(grow, 2.0, 1.0))
        self.good_steps.copy_(torch.where(grow, 0.0, good))

    def state(self) -> dict[str, Tensor]:
        return {"loss_scale": self.scale, "loss_scale_good_steps": self.good_steps}
