"""Launches the kernels in Gluon, which take the place of some in Triton for the sizes of the published BDH."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

# What each of the two groups of warps in a program computes at a time, and how many tiles are loaded ahead: the fastest
# of five each, measured on an H200 with 32 × 512 tokens of the published BDH.
ENCODE = {"SEQUENCES": 1, "ROWS": 64, "COLUMNS": 128, "STAGES": 2}
GATE = {"SEQUENCES": 1, "ROWS": 64, "COLUMNS": 64, "STAGES": 4, "AHEAD": 5}
GATE_BACKWARD = {"SEQUENCES": 1, "ROWS": 64, "COLUMNS": 32, "STAGES": 5, "AHEAD": 5}
KEYS_BACKWARD = {"DEPTH": 512, "ROWS": 64, "COLUMNS": 64, "STAGES": 2}


@cache
def why_not(embd: int, neurons: int) -> str | None:
    """Returns why the kernels in Gluon cannot compute a level on a GPU on which those in Triton can, or None."""
    try:
        found = version("triton")
    except PackageNotFoundError:
        return "the package triton is not installed"
    if not found.startswith("3.6."):
        return f"Gluon is experimental, and the kernels are known to work with Triton 3.6; this is {found}"
    if embd != 256 or neurons % 128:
        return f"the kernels need n_embd = 256 and a multiple of 128 neurons in a head, and here are {embd}, {neurons}"
    return None


def fits(time: int, embd: int, neurons: int) -> bool:
    """Returns whether kernels can compute for so many tokens in a sequence, channels, and neurons in a head. Places
    within a tile of a tensor (heads, batch, time, neurons) are numbers of 32 bits."""
    return why_not(embd, neurons) is None and time * neurons < 2**31


def fits_keys(keys: Tensor) -> bool:
    """Returns whether `keys_backward` can compute: the scores of a token have to fit into registers."""
    *_, time, width = keys.shape
    return why_not(256, width) is None and 256 < time <= 512 and time % 8 == 0


def encode(x: Tensor, encoder: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    from shoal.models.bdh import gluon_kernels

    (batch, time, embd), (heads, _, width) = x.shape, encoder.shape
    neurons, keys = (x.new_empty(heads, batch, time, width) for _ in range(2))
    sequences, rows, columns, _ = ENCODE.values()
    gluon_kernels.encode[_tiles(batch, 2 * sequences, time, rows), heads](
        x.contiguous(),
        _described(encoder.contiguous().flatten(0, 1), (embd, columns)),
        *(_described(table.contiguous(), (rows, columns // 2)) for table in (cos, sin)),
        *_by_pair(neurons, keys),
        batch,
        time,
        width,
        D=embd,
        **ENCODE,
        num_warps=4,
    )
    return neurons, keys


def gate(normed: Tensor, encoder_v: Tensor, neurons: Tensor, dropout: float, seed: Tensor) -> Tensor:
    from shoal.models.bdh import gluon_kernels

    gated, embd = torch.empty_like(neurons), normed.shape[-1]
    heads, batch, time, width = neurons.shape
    sequences, rows, columns, *_ = GATE.values()
    gluon_kernels.gate[_tiles(batch, 2 * sequences, time, rows), heads](
        normed.contiguous(),
        _described(encoder_v.contiguous().flatten(0, 1), (embd, columns)),
        _described(neurons.contiguous().flatten(0, 1), (2 * sequences, rows, columns)),
        *_by_pair(gated),
        seed,
        round(dropout * 65536),
        1 / (1 - dropout),
        batch,
        time,
        width,
        D=embd,
        DROPS=dropout > 0,
        **GATE,
        num_warps=4,
    )
    return gated


def gate_backward(
    x: Tensor, to_y: Tensor, encoder: Tensor, decoder: Tensor, gated: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    from shoal.models.bdh import gluon_kernels

    to_gates, to_neurons = (torch.empty_like(gated) for _ in range(2))
    heads, batch, time, width = gated.shape
    embd = to_y.shape[-1]
    sequences, rows, columns, *_ = GATE_BACKWARD.values()
    in_order = decoder.contiguous().view(-1, 4, 4, 2, embd).transpose(1, 2)
    gluon_kernels.gate_backward[_tiles(batch, 2 * sequences, time, rows), heads](
        x.contiguous(),
        to_y.contiguous(),
        _described(encoder.contiguous().flatten(0, 1), (embd, columns)),
        _described(in_order, (columns // 32, 4, 4, 2, embd)),
        _described(gated.contiguous().flatten(0, 1), (2 * sequences, rows, columns)),
        *_by_pair(to_gates, to_neurons),
        scale,
        batch,
        time,
        width,
        D=embd,
        **GATE_BACKWARD,
        num_warps=4,
    )
    return to_gates, to_neurons


def keys_backward(scores: Tensor, keys: Tensor, to_neurons: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    from shoal.models.bdh import gluon_kernels

    result = torch.empty_like(keys)
    heads, batch, time, width = keys.shape
    depth, rows, columns, _ = KEYS_BACKWARD.values()
    blocks = ((1, depth, columns), (1, 2 * rows, columns))
    tensors = (tensor.contiguous().flatten(0, 1) for tensor in (keys, to_neurons))
    gluon_kernels.keys_backward[(_tiles(heads * batch, 1, time, 2 * rows),)](
        scores.contiguous(),
        *(_described(tensor, block) for tensor, block in zip(tensors, blocks, strict=True)),
        *(_described(table.contiguous(), (2 * rows, columns // 2)) for table in (cos, sin)),
        *_by_pair(result),
        time // 8,
        width,
        **KEYS_BACKWARD,
        num_warps=4,
    )
    return result


def interleaved(weight: Tensor) -> Tensor:
    """Returns a weight (…, neurons) with its columns in such an order that a thread gets neighbours of a product.

    Of 32 columns 8q + 2j + e (q and j below 4, e below 2), the tensor cores give 8j + 2q + e to thread q.
    """
    return weight.unflatten(-1, (-1, 4, 4, 2)).transpose(-3, -2).flatten(-4)


def _by_pair(*tensors: Tensor) -> list[Tensor]:
    return [tensor.view(torch.int32) for tensor in tensors]


def _tiles(batch: int, sequences: int, time: int, rows: int) -> int:
    return -(-batch // sequences) * -(-time // rows)


def _described(tensor: Tensor, block: Sequence[int]) -> Any:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout.get_default_for([*block], gl.bfloat16)
    return TensorDescriptor.from_tensor(tensor, [*block], layout)
