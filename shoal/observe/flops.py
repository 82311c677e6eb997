"""The FLOPs that a model needs and the FLOP/s that a device can do: together, model FLOPs utilisation (MFU)."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

# Dense TFLOP/s as the manufacturers state them (without sparsity; consumer cards with fp32 accumulation). Only the row
# of the H200 was checked against a datasheet. The first row whose words are all in the device's name applies.
_PEAK_TFLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    ("B200", {"bf16": 2250, "fp16": 2250, "tf32": 1125, "fp32": 75}),
    ("H200 NVL", {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60}),
    ("H200", {"fp8": 1979, "bf16": 989.5, "fp16": 989.5, "tf32": 494.5, "fp32": 67}),
    ("H100 NVL", {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60}),
    ("H100 PCIe", {"bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51}),
    ("H100", {"fp8": 1979, "bf16": 989.5, "fp16": 989.5, "tf32": 494.5, "fp32": 67}),
    ("A100", {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5}),
    ("L40S", {"bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6}),
    ("L4", {"bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3}),
    ("A10", {"bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2}),
    ("RTX 4090", {"bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp32": 82.6}),
    ("RTX 3090", {"bf16": 71, "fp16": 71, "tf32": 35.6, "fp32": 35.6}),
    ("V100 PCIE", {"fp16": 112, "fp32": 14}),
    ("V100", {"fp16": 125, "fp32": 15.7}),
    ("T4", {"fp16": 65, "fp32": 8.1}),
)
_UNKNOWN_VARIANTS = {"MIG", "TI", "D", "LAPTOP"}  # a slice of a device, or another chip with the same number


def peak_flops(device: torch.device | str, precision: str) -> float | None:
    """Returns the FLOP/s of the device in bf16, fp16, tf32, fp32 or fp8, or None if the table has no figure for it."""
    if torch.device(device).type != "cuda":
        return None
    words = set(re.split(r"[\s-]+", torch.cuda.get_device_name(device).upper()))
    rows = [row for name, row in _PEAK_TFLOPS if words.issuperset(name.upper().split())]
    tflops = rows[0].get(precision) if rows and not words & _UNKNOWN_VARIANTS else None
    return tflops and tflops * 1e12


def copy_on_meta(model: nn.Module) -> nn.Module | None:
    """Returns a copy of the model on the meta device (shapes without memory), or None if it cannot be copied."""
    # deepcopy uses the tensors in its memo instead of copying, so there is never a second set of weights in memory.
    memo: dict[int, Any] = {id(buffer): buffer.detach().to("meta") for buffer in model.buffers()}
    memo |= {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
    try:
        return copy.deepcopy(model, memo)
    except Exception:  # modules of other libraries may raise anything, and an estimate must not end a run
        return None


def flop_counter() -> FlopCounterMode:
    """Returns torch's FLOP counter with our own formulas for attention: torch 2.11 refuses to count attention that has
    fewer key and value heads than query heads."""
    formulas = {
        operator: flops
        for kind in _ATTENTIONS
        for ending, flops in (("", _attention_flops), ("_backward", _attention_backward_flops))
        if (operator := getattr(torch.ops.aten, f"_scaled_dot_product_{kind}{ending}", None))
    }
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    counter.mod_tracker = _NoModuleTracker()  # type: ignore[assignment]
    return counter


class _NoModuleTracker(nullcontext[None]):
    """Replaces torch's module tracker: we need only the total, and the tracker's hooks fail in a backward that is split
    into input and weight gradients (the pipeline schedule zbv)."""

    parents = frozenset({"Global"})


_ATTENTIONS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Counts two matrix products over all pairs of positions. Shapes are (batch, heads, time, size)."""
    return 2 * prod(query[:3]) * key[-2] * (query[-1] + value[-1])


def _attention_backward_flops(gradient: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Counts five matrix products: the scores again, and the gradients of scores, queries, keys and values."""
    return 2 * prod(query[:3]) * key[-2] * (3 * query[-1] + 2 * value[-1])


def count_forward_flops(forward: Callable[[], object]) -> int | None:
    """Returns the FLOPs of calling a model on meta (`copy_on_meta`) with inputs on meta.

    Returns None if the model cannot run on shapes alone, for example because its control flow depends on values.
    """
    try:
        with torch.no_grad(), flop_counter() as counter:
            forward()
    except Exception:  # kernels of other libraries may raise anything on meta
        return None
    return counter.get_total_flops()
