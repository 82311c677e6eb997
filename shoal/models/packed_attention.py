"""Attention in sequences into which several samples are packed: no token attends to another sample.

`starts` (batch, samples) has the positions at which the samples of each sequence begin, in ascending order; entries
that a sequence does not need are its length. On CUDA, flash attention computes samples of different lengths side by
side. Elsewhere a mask of (batch, 1, time, time) is needed.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

_kernel: Any = None
"""torch's function for samples of different lengths side by side, once `as_mask` has imported it: its module imports
torch.compile, which takes seconds, and an import in a compiled function may break its graph."""
_options: Mapping[str, Any] = {}
"""The arguments of that function; torch 2.11 has no `enable_gqa` yet."""
_LARGEST_HEAD = 256
PACKABLE = (
    *("cohere", "cohere2", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2", "gpt_neox", "granite", "llama"),
    *("mistral", "mixtral", "olmo2", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"),
    "starcoder2",
)
"""The kinds of transformers models that are proved by a test to keep packed samples apart, with shoal's attention and
with those of transformers. Others may mix them without a sign: GPT-OSS and OPT do, and so do recurrent models."""


def positions_of(starts: Tensor, length: int) -> Tensor:
    """Returns the position of every token within its sample, (batch, time)."""
    positions = torch.arange(length, device=starts.device)
    number = _sample_numbers(starts, length)
    return positions - starts.gather(1, number.clamp(min=0)).to(positions.dtype)


def block_mask(starts: Tensor, length: int) -> Tensor:
    """Returns the mask by which tokens attend to earlier tokens of their sample, (batch, 1, time, time)."""
    number = _sample_numbers(starts, length)
    positions = torch.arange(length, device=starts.device)
    return ((number[:, :, None] == number[:, None, :]) & (positions[:, None] >= positions))[:, None]


def _sample_numbers(starts: Tensor, length: int) -> Tensor:
    """Returns the number of the sample that each token belongs to, (batch, time)."""
    positions = torch.arange(length, device=starts.device)
    return (positions[None, :, None] >= starts[:, None, :]).sum(-1) - 1


def as_mask(starts: Tensor, length: int) -> Tensor:
    """Returns what to hand a model in the place of the mask: the starts on CUDA, else the mask itself.

    transformers passes on whatever has four dimensions.
    """
    if not starts.is_cuda:
        return block_mask(starts, length)
    _import_kernel()
    return starts[:, None, None, :]


def _import_kernel() -> None:
    global _kernel, _options
    if _kernel is None:
        from torch.nn.attention.varlen import varlen_attn

        _kernel, _options = varlen_attn, inspect.signature(varlen_attn).parameters


def bounds_in_batch(starts: Tensor, length: int) -> Tensor:
    """Returns where samples begin if the sequences of a batch are laid end to end, and the end, (batch × samples + 1).

    An entry that a sequence does not need is where the next sequence begins: a sample without tokens.
    """
    first = torch.arange(len(starts), device=starts.device, dtype=torch.int32)[:, None] * length
    end = torch.full((1,), len(starts) * length, device=starts.device, dtype=torch.int32)
    return torch.cat([(starts + first).flatten(), end])


def has_starts(mask: Tensor) -> bool:
    """Returns whether a mask is the starts of samples."""
    return mask.dtype == torch.int32


def attend_within_samples(
    sdpa: Callable[..., Any], module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any
) -> Tensor:
    """Takes (batch, heads, time, size) and returns (batch, time, heads, size); `mask` is the starts of samples."""
    starts, length = mask[:, 0, 0], query.shape[2]
    if torch.is_autocast_enabled(query.device.type):
        # As sdpa does under autocast; rotary embeddings are computed in fp32.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    if reason := _why_no_kernel(query, value, options):
        if query.is_cuda and not torch.compiler.is_compiling():
            _warn(reason)
        return sdpa(module, query, key, value, block_mask(starts, length), **options)[0]
    batch, heads, _, size = query.shape
    if "enable_gqa" not in _options:
        groups = heads // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    shared: dict[str, Any] = {"enable_gqa": True} if key.shape[1] != heads else {}
    bounds = bounds_in_batch(starts, length)
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    output = _kernel(
        query, key, value, bounds, bounds, length, length, scale=options.get("scaling"), window_size=(-1, 0), **shared
    )
    assert isinstance(output, Tensor)
    return output.view(batch, length, heads, size)


def _why_no_kernel(query: Tensor, value: Tensor, options: dict[str, Any]) -> str:
    """Returns why flash attention cannot compute samples of different lengths side by side here; "" if it can."""
    size = query.shape[-1]
    reasons = {
        "there is no GPU": not query.is_cuda,
        f"this torch ({torch.__version__}) has no `window_size` and `scale` for it": not _options.keys()
        >= {"window_size", "scale"},
        "it computes in bf16 and fp16 only": query.dtype not in (torch.bfloat16, torch.float16),
        f"it takes heads of up to {_LARGEST_HEAD} numbers, a multiple of 8": not (
            size == value.shape[-1] <= _LARGEST_HEAD and size % 8 == 0
        ),
        "it has neither dropout nor capped scores": bool(options.get("dropout") or options.get("softcap")),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


@cache
def _warn(reason: str) -> None:
    warnings.warn(
        f"dataset.packing: attention computes with a mask of time × time instead of variable-length flash attention, "
        f"because {reason}; results are the same, and memory and time grow with the square of max_seq_length",
        stacklevel=2,
    )
