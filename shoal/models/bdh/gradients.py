"""The gradient of a norm without parameters, for autograd functions that have the heads of BDH inside."""

from __future__ import annotations

import torch
from torch import Tensor

NORM_EPS = 1e-5
"""The default of F.layer_norm, which `norm` uses."""


def norm_with_deviation(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns norm(x), and the standard deviation that x was divided by, in at least float32."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = x - x.mean(-1, keepdim=True)
    deviation = (centred.square().mean(-1, keepdim=True) + NORM_EPS).sqrt()
    return centred / deviation, deviation


def through_norm(gradient: Tensor, normed: Tensor, deviation: Tensor) -> Tensor:
    """Returns the gradient with respect to the input of a norm."""
    along = normed * (gradient * normed).mean(-1, keepdim=True)
    return (gradient - gradient.mean(-1, keepdim=True) - along) / deviation
