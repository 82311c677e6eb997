"""The precisions of a run: which type is used where.

Weights, gradients and optimizer state are fp32 in every mode; modes differ in the type of the computation, and in what
casts to it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.errors import UserError
from shoal.tensors import DTYPES
from shoal.torch_private import TorchDispatchMode

_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled", "aten::convolution")


@dataclass(frozen=True)
class Types:
    """The types that a precision uses."""

    storage: str
    """The type of the weights that the optimizer updates."""
    compute: str
    accumulate: str
    """The type of gradients while they accumulate over micro-batches."""
    reduce: str
    """The type of gradients while they are summed over ranks."""
    cast_by: str
    """What casts weights and activations to the compute type."""


PRECISIONS = {
    "fp32": Types("fp32", "fp32", "fp32", "fp32", "nobody"),
    "bf16": Types("fp32", "bf16", "fp32", "fp32", "autocast: matrix products in bf16, norms and sums in fp32"),
    "fp16": Types("fp32", "fp16", "fp32", "fp32", "autocast, with the loss scaled"),
    "pure_bf16": Types("fp32", "bf16", "fp32", "fp32", "FSDP, when it gathers: everything in bf16"),
    "fp8": Types("fp32", "fp8", "fp32", "fp32", "torchao in linear layers, autocast to bf16 elsewhere"),
}


def check_precision(precision: str, tf32: bool, device: torch.device) -> None:
    """Refuses a precision that the device cannot compute in."""
    if precision not in PRECISIONS:
        raise UserError(f"mixed_precision = {precision!r} is not one of {', '.join(PRECISIONS)}")
    if "bf16" in precision and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise UserError(f"training.mixed_precision = {precision}, but {name} has no bf16 arithmetic; use fp32")
    if precision == "fp8":
        if device.type != "cuda":
            raise UserError(f"training.mixed_precision = fp8 needs a GPU, but the run is on {device.type}; use bf16")
        if torch.cuda.get_device_capability(device) < (8, 9):
            name = torch.cuda.get_device_name(device)
            raise UserError(
                f"training.mixed_precision = fp8, but {name} has no fp8 arithmetic (Ada, Hopper and later do); use bf16"
            )
    if tf32 and device.type != "cuda":
        raise UserError(f"training.tf32 = true needs a CUDA device, but the run is on {device.type}; set it to false")


def half_type(precision: str) -> torch.dtype | None:
    """Returns the half type that a precision computes in; None for fp32."""
    compute = PRECISIONS[precision].compute
    return None if compute == "fp32" else DTYPES["bf16" if compute == "fp8" else compute]


_AUTOCAST = {mode: half_type(mode) for mode in ("bf16", "fp16", "fp8")}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[None]:
    half = _AUTOCAST.get(precision)
    return nullcontext() if half is None else torch.autocast(device.type, half)


class HalfWitness(TorchDispatchMode):
    """Watches for a matrix product in half precision, as proof that the precision engaged."""

    def __init__(self, precision: str) -> None:
        super().__init__()
        self.seen = False
        self._wanted = half_type(precision)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        first = output[0] if isinstance(output, list | tuple) and output else output
        if isinstance(first, Tensor) and first.dtype == self._wanted and func._schema.name.startswith(_PRODUCTS):
            self.seen = True
        return output
