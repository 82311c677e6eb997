"""Who computes in which type. Weights, gradients and optimizer state stay fp32; `bf16` computes under autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from shoal.errors import UserError


def check_precision(precision: str, tf32: bool, device: torch.device) -> None:
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise UserError(f"training.mixed_precision = bf16, but {name} has no bf16 arithmetic; use fp32")
    if tf32 and device.type != "cuda":
        raise UserError(f"training.tf32 = true needs a CUDA device, but the run is on {device.type}; set it to false")


def autocast(precision: str, device: torch.device) -> AbstractContextManager[None]:
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


class Bf16Witness:
    """Sees whether bf16 was really computed with: matmuls under autocast keep bf16 inputs for the backward."""

    def __init__(self) -> None:
        self.seen = False

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen or tensor.dtype == torch.bfloat16
        return tensor

    def watch(self) -> AbstractContextManager[None]:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
