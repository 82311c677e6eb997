"""Who computes in which type. Weights, gradients and optimizer state stay fp32; `bf16` and `fp16` are autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from shoal.errors import UserError

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_precision(precision: str, tf32: bool, device: torch.device) -> None:
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise UserError(f"training.mixed_precision = bf16, but {name} has no bf16 arithmetic; use fp32")
    if tf32 and device.type != "cuda":
        raise UserError(f"training.tf32 = true needs a CUDA device, but the run is on {device.type}; set it to false")


def autocast(precision: str, device: torch.device) -> AbstractContextManager[None]:
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, HALF[precision])


class HalfWitness:
    """Sees whether half precision was computed in: matmuls under autocast keep half inputs for the backward."""

    def __init__(self, precision: str) -> None:
        self.seen = False
        self._wanted = HALF.get(precision)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen or tensor.dtype == self._wanted
        return tensor

    def watch(self) -> AbstractContextManager[None]:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
