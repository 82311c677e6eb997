"""What a model asks for and what a device can give: together, model FLOPs utilisation."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shoal.tensors import map_tensors

# Dense TFLOP/s as the makers state them (no sparsity; consumer cards with fp32 accumulation); only the H200's row was
# checked against a datasheet's figures. A row holds for a device whose name has all its words; the first one counts.
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
_OTHER_CHIPS = {"MIG", "TI", "D", "LAPTOP"}  # a slice of a device, or a slower one under the same number


def peak_flops(device: torch.device | str, precision: str) -> float | None:
    """FLOP/s of the device in bf16, fp16, tf32 or fp32; None where no datasheet figure is known."""
    if torch.device(device).type != "cuda":
        return None
    words = set(re.split(r"[\s-]+", torch.cuda.get_device_name(device).upper()))
    rows = [row for name, row in _PEAK_TFLOPS if words.issuperset(name.upper().split())]
    known = rows and not words & _OTHER_CHIPS
    tflops = rows[0].get(precision) if known else None
    return tflops and tflops * 1e12


def copy_on_meta(model: nn.Module) -> nn.Module | None:
    """A copy that has shapes and no memory; None if the model cannot be copied."""
    # deepcopy takes what its memo holds, so not even for a moment is there a second set of weights.
    memo: dict[int, Any] = {id(buffer): buffer.detach().to("meta") for buffer in model.buffers()}
    memo |= {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
    try:
        return copy.deepcopy(model, memo)
    except Exception:  # foreign modules refuse in their own ways, and an estimate must not end a run
        return None


def flop_counter() -> FlopCounterMode:
    """torch's own, but for attention with fewer key and value heads than queries, which torch 2.11 refuses to count."""
    formulas = {
        operator: flops
        for kind in _ATTENTIONS
        for ending, flops in (("", _attention_flops), ("_backward", _attention_backward_flops))
        if (operator := getattr(torch.ops.aten, f"_scaled_dot_product_{kind}{ending}", None))
    }
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    return counter


class _NoModules(nullcontext[None]):
    """Instead of telling modules apart, by hooks that a backward in halves cannot run."""

    parents = frozenset({"Global"})


_ATTENTIONS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Two products over all pairs of positions. Shapes are (batch, heads, time, size)."""
    batch, heads, queries, size = query
    return 2 * batch * heads * queries * key[-2] * (size + value[-1])


def _attention_backward_flops(gradient: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Five products: the scores once more, and the gradients of scores, queries, keys and values."""
    batch, heads, queries, size = query
    return 2 * batch * heads * queries * key[-2] * (3 * size + 2 * value[-1])


def count_forward_flops(forward: Callable[[], object]) -> int | None:
    """FLOPs of a call of a model on meta (`copy_on_meta`) with inputs on meta (`tree_to_meta`).

    None when the model cannot run on shapes alone, for instance because its control flow depends on values.
    """
    try:
        with torch.no_grad(), flop_counter() as counter:
            forward()
    except Exception:  # foreign kernels fail on meta in their own ways, too
        return None
    return counter.get_total_flops()


def tree_to_meta(tree: Any) -> Any:
    """The same nesting of dicts, lists and tuples with tensors that have a shape and no values."""
    return map_tensors(lambda tensor: tensor.to("meta"), tree)
