"""The precisions of a run: the type of the computation.

Weights, gradients (while they accumulate, and while ranks sum them) and optimizer state are fp32 in every mode, unless
`training.weights_dtype` is bf16. Modes differ in the type of the computation, and in what casts to it: autocast for
bf16 and fp16; fully_shard, when it gathers parameters, for pure_bf16; torchao in linear layers for fp8, and autocast to
bf16 elsewhere.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from shoal.errors import UserError
from shoal.torch_private import TorchDispatchMode

_PRODUCTS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_scaled",
    "aten::convolution",
    "shoal::mul",
)


HALF_TYPES = {
    "fp32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "pure_bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
}
"""The half type that each precision computes in, for fp8 outside of its linear layers; None for fp32."""


def compute_dtype(precision: str) -> torch.dtype:
    """Returns the dtype that products are computed in."""
    return HALF_TYPES[precision] or torch.float32


def check_precision(precision: str, tf32: bool, device: torch.device) -> None:
    """Refuses a precision that the device cannot compute in."""
    if precision not in HALF_TYPES:
        raise UserError(f"mixed_precision = {precision!r} is not one of {', '.join(HALF_TYPES)}")
    if "bf16" in precision and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(
            f"training.mixed_precision = {precision}, but {torch.cuda.get_device_name(device)} has no bf16 arithmetic; "
            "use fp32"
        )
    if precision == "fp8":
        if device.type not in ("cuda", "cpu"):
            raise UserError(f"training.mixed_precision = fp8 runs on cuda and cpu, not on {device.type}; use bf16")
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            raise UserError(
                f"training.mixed_precision = fp8, but {torch.cuda.get_device_name(device)} has no fp8 arithmetic (Ada, "
                "Hopper and later do); use bf16"
            )
    if tf32 and device.type != "cuda":
        raise UserError(f"training.tf32 = true needs a CUDA device, but the run is on {device.type}; set it to false")


_NO_AUTOCAST = nullcontext()


def autocast(precision: str, device: torch.device) -> AbstractContextManager[None]:
    if precision in ("fp32", "pure_bf16"):
        return _NO_AUTOCAST
    return torch.autocast(device.type, HALF_TYPES[precision])


class HalfWitness(TorchDispatchMode):
    """Watches for a matrix product in half precision, as proof that the precision engaged."""

    def __init__(self, precision: str) -> None:
        super().__init__()
        self.seen = False
        self._wanted, self._in_float8 = HALF_TYPES[precision], precision == "fp8"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        first = output[0] if isinstance(output, list | tuple) and output else output
        if isinstance(first, Tensor) and first.dtype == self._wanted and func._schema.name.startswith(_PRODUCTS):
            # torchao's layers multiply tensors of a class of their own; other products are in bf16.
            self.seen |= not self._in_float8 or any("Float8" in kind.__name__ for kind in types)
        return output
