"""Launches the kernels in Gluon, which take the place of some in Triton for the sizes of the published BDH."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

# The fastest of about eight each, measured on an H200 with 32 × 512 tokens of the published BDH.
GATE = {"SEQUENCES": 4, "ROWS": 64, "COLUMNS": 32, "STAGES": 4}
GATE_BACKWARD = {"SEQUENCES": 4, "ROWS": 32, "COLUMNS": 64, "STAGES": 3}
KEYS_BACKWARD = {"DEPTH": 512, "ROWS": 128, "COLUMNS": 64}
NUM_WARPS = 8


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


def fits(tokens: Tensor, neurons: Tensor) -> bool:
    """Returns whether `gate` and `gate_backward` can compute for tokens (…, time, embd). Places within a tile of a
    tensor (heads, batch, time, neurons) are numbers of 32 bits."""
    return why_not(tokens.shape[-1], neurons.shape[-1]) is None and 4 * neurons[0, 0].numel() < 2**31


def fits_keys(neurons: Tensor) -> bool:
    """Returns whether `keys_backward` can compute: the scores of a token have to fit into registers."""
    *_, time, width = neurons.shape
    return why_not(256, width) is None and 256 < time <= 512 and time % 8 == 0


def gate(normed: Tensor, encoder_v: Tensor, neurons: Tensor, dropout: float, seed: Tensor) -> Tensor:
    from shoal.models.bdh import gluon_kernels

    gated, embd = torch.empty_like(neurons), normed.shape[-1]
    heads, batch, time, width = neurons.shape
    sequences, rows, columns, _ = GATE.values()
    gluon_kernels.gate[_tiles(batch, sequences, time, rows), heads](
        _described(normed.contiguous().flatten(0, 1), (sequences, rows, embd)),
        _described(interleaved(encoder_v).flatten(0, 1), (embd, columns)),
        _described(neurons.contiguous().flatten(0, 1), (sequences, rows, columns)),
        gated,
        seed,
        round(dropout * 65536),
        1 / (1 - dropout),
        batch,
        time,
        width,
        D=embd,
        DROPS=dropout > 0,
        **GATE,
        num_warps=NUM_WARPS,
    )
    return gated


def gate_backward(
    to_y: Tensor, decoder: Tensor, neurons: Tensor, gated: Tensor, cos: Tensor, sin: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    from shoal.models.bdh import gluon_kernels

    to_gates, to_neurons, keys = (torch.empty_like(neurons) for _ in range(3))
    heads, batch, time, width = neurons.shape
    embd = to_y.shape[-1]
    sequences, rows, columns, _ = GATE_BACKWARD.values()
    in_order = decoder.contiguous().view(-1, 4, 4, 2, embd).transpose(1, 2)
    gluon_kernels.gate_backward[_tiles(batch, sequences, time, rows), heads](
        _described(to_y.contiguous(), (sequences, rows, embd)),
        _described(in_order, (columns // 32, 4, 4, 2, embd)),
        *(_described(tensor.contiguous().flatten(0, 1), (sequences, rows, columns)) for tensor in (neurons, gated)),
        cos.contiguous(),
        sin.contiguous(),
        to_gates,
        to_neurons,
        keys,
        scale,
        batch,
        time,
        width,
        D=embd,
        **GATE_BACKWARD,
        num_warps=NUM_WARPS,
    )
    return to_gates, to_neurons, keys


def keys_backward(
    scores: Tensor, keys: Tensor, to_neurons: Tensor, neurons: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    from shoal.models.bdh import gluon_kernels

    result = torch.empty_like(neurons)
    heads, batch, time, width = neurons.shape
    depth, rows, columns = KEYS_BACKWARD.values()
    blocks = ((1, rows, depth), (1, depth, columns), (1, rows, columns), (1, rows, columns))
    tensors = (tensor.contiguous().flatten(0, 1) for tensor in (scores, keys, to_neurons, neurons))
    gluon_kernels.keys_backward[(_tiles(heads * batch, 1, time, rows),)](
        *(_described(tensor, block) for tensor, block in zip(tensors, blocks, strict=True)),
        cos.contiguous(),
        sin.contiguous(),
        result,
        time,
        width,
        **KEYS_BACKWARD,
        num_warps=NUM_WARPS,
    )
    return result


def interleaved(weight: Tensor) -> Tensor:
    """Returns a weight (…, neurons) with its columns in such an order that a thread gets neighbours of a product.

    Of 32 columns 8q + 2j + e (q and j below 4, e below 2), the tensor cores give 8j + 2q + e to thread q.
    """
    return weight.unflatten(-1, (-1, 4, 4, 2)).transpose(-3, -2).flatten(-4).contiguous()


def _tiles(batch: int, sequences: int, time: int, rows: int) -> int:
    return -(-batch // sequences) * -(-time // rows)


def _described(tensor: Tensor, block: Sequence[int]) -> Any:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout.get_default_for([*block], gl.bfloat16)
    return TensorDescriptor.from_tensor(tensor, [*block], layout)
