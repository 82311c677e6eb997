"""How the matrix of a linear layer is kept in 4 or 8 bits: as two plain tensors, `weight` and `statistics`.

Both are the tensors that bitsandbytes computes, and nothing is rounded twice. Splitting them over ranks along their
first dimension and joining them again gives back the same bytes, so every layout can shard them as it shards any
parameter, however its cuts lie to the blocks in which bitsandbytes quantises.

The numbers do not depend on the device, on the number of threads, or on how the tensors are sharded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from math import ceil, prod
from typing import Any, Literal

import torch
from torch import Tensor

from shoal.tensors import why_no_triton
from shoal.torch_private import is_fake

Part = Literal["weight", "statistics"]
"""The tensors of a quantised matrix."""
Shape = tuple[int, int]
"""The rows (outputs) and columns (inputs) of a matrix."""

BLOCK = 64
"""The number of weights that share a scale in 4 bits; transformers uses bitsandbytes' default."""
NESTED_BLOCK = 256
"""The number of scales that share a scale of their own, if scales are quantised, too."""
NESTED_CODES = 256
"""The number of values that a scale in 8 bits can have."""
_BLOCKS_EACH = 64  # that a program of the GPU's kernel computes
_CHUNK = 1 << 18  # so many numbers stay in a CPU's cache while they are compared


@dataclass(frozen=True)
class FourBit:
    """NF4 or FP4 in blocks of 64 weights.

    `weight` has two numbers in each byte. `statistics` has the scale of each block, in float32; or, with `double`, in
    one byte each, after the values of these bytes, the scale of each 256 of them, and their offset. Both are kept in
    the dtype `storage`, as bytes in its memory: fully_shard gathers tensors of one dtype together, and casts those of
    another floating-point dtype than its own.
    """

    quant_type: Literal["nf4", "fp4"] = "nf4"
    double: bool = False
    storage: str = "uint8"
    compute: str | None = None
    """The dtype that a layer computes in. Default: autocast's, or that of its input."""
    bits = 4

    @property
    def dtypes(self) -> dict[Part, torch.dtype]:
        """The dtypes of the tensors."""
        return {"weight": getattr(torch, self.storage), "statistics": getattr(torch, self.storage)}

    def shapes(self, shape: Shape) -> dict[Part, tuple[int, ...]]:
        """Returns the shapes of the tensors for a matrix; that of the weight is bitsandbytes' own."""
        size = self.dtypes["weight"].itemsize
        return {
            "weight": (ceil(ceil(prod(shape) / 2) / size), 1),
            "statistics": (ceil(self._num_statistics_bytes(shape) / size),),
        }

    def quantise(self, part: Part, matrix: Tensor) -> Tensor:
        """Returns one of the tensors of a matrix."""
        if part == "weight":
            return self.codes(matrix.reshape(-1))
        scales = block_maxima(matrix.reshape(-1)).cpu()
        return self.statistics_of(*self.nested(scales) if self.double else (scales,)).to(matrix.device)

    def codes(self, numbers: Tensor) -> Tensor:
        """Returns the packed weights of a stretch of numbers that begins at a block.

        Equal to bitsandbytes' function on a CPU, bit by bit. This one takes a sixth of its time there, and gives the
        same bytes on every device, which bitsandbytes does not promise.
        """
        from bitsandbytes import functional

        whole = numbers.numel() // BLOCK * BLOCK
        bounds, order = _bounds(self.quant_type)
        packed = torch.empty(ceil(numbers.numel() / 2), dtype=torch.uint8, device=numbers.device)
        for start in range(0, whole, _CHUNK):
            blocks = numbers[start : min(start + _CHUNK, whole)].float().view(-1, BLOCK)
            scales = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-38)
            scaled = (blocks * (1.0 / scales)).clamp(-1, 1).view(-1)
            rank = torch.zeros_like(scaled, dtype=torch.uint8)
            for bound in bounds:
                rank += scaled > bound
            if order is not None:
                rank = torch.tensor(order, dtype=torch.uint8, device=rank.device)[rank.long()]
            packed[start // 2 : (start + len(rank)) // 2] = (rank[::2] << 4) | rank[1::2]
        if whole < numbers.numel():  # the last block is shorter, which bitsandbytes treats in another way
            rest, _ = functional.quantize_4bit(numbers[whole:].float().cpu(), quant_type=self.quant_type)
            packed[whole // 2 :] = rest.view(-1)
        return self._stored(packed)[:, None]

    def nested(self, scales: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the scales in 8 bits, the values of these bits, the scales of these scales, and their offset."""
        from bitsandbytes import functional

        with _one_thread():  # several would add up the mean in another order
            offset = scales.mean()
        codes, state = functional.quantize_blockwise(scales - offset, blocksize=NESTED_BLOCK)
        return codes, state.code, state.absmax, offset

    def statistics_of(
        self,
        scales: Tensor,
        values: Tensor | None = None,
        nested_scales: Tensor | None = None,
        offset: Tensor | None = None,
    ) -> Tensor:
        """Returns the tensor `statistics`, from the scales of blocks and, if these are in 8 bits, what they mean."""
        parts = [scales.float()] if values is None else [values.float(), nested_scales, offset, scales]
        return self._stored(torch.cat([part.reshape(-1).view(torch.uint8) for part in parts if part is not None]))

    def scales(self, statistics: Tensor, shape: Shape) -> Tensor:
        """Returns the scales of all blocks in float32, from the tensor `statistics`."""
        if not self.double:
            return statistics.view(torch.uint8)[: 4 * ceil(prod(shape) / BLOCK)].view(torch.float32)
        from bitsandbytes import functional

        codes, values, nested_scales, offset = self._nested_parts(statistics, shape)
        scales: Tensor = functional.dequantize_blockwise(
            codes, absmax=nested_scales, code=values, blocksize=NESTED_BLOCK
        )
        return scales.add_(offset)

    def _nested_parts(self, statistics: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns what `nested` returned, from the tensor `statistics`."""
        data, blocks = statistics.view(torch.uint8), ceil(prod(shape) / BLOCK)
        num_nested = ceil(blocks / NESTED_BLOCK)
        end = 4 * (NESTED_CODES + num_nested + 1)
        values, nested_scales, offset = data[:end].view(torch.float32).split([NESTED_CODES, num_nested, 1])
        return data[end : end + blocks], values, nested_scales, offset

    def dequantise(self, weight: Tensor, statistics: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Returns the matrix that the tensors stand for, in a dtype."""
        if has_kernel(weight):
            return self._dequantise_in_triton(weight, statistics, shape, dtype)
        from bitsandbytes import functional

        # As one row of whole bytes: on CPUs bitsandbytes 0.50 mistakes the blocks of a matrix whose rows are not whole
        # blocks, and calls a compiler for rows of an odd length.
        packed = weight.reshape(-1).view(torch.uint8)[: ceil(prod(shape) / 2), None]
        row = torch.Size((1, 2 * len(packed)))
        state = functional.QuantState(self.scales(statistics, shape), row, None, BLOCK, self.quant_type, dtype)
        numbers: Tensor = functional.dequantize_4bit(packed, state)
        return numbers.view(-1)[: prod(shape)].view(shape)

    def _dequantise_in_triton(self, weight: Tensor, statistics: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        from shoal.quantised import triton_kernels

        if statistics.data_ptr() % 4:  # the kernel reads float32
            statistics = statistics.clone()
        count = ceil(prod(shape) / 2)
        numbers = torch.empty(2 * count, dtype=dtype, device=weight.device)
        triton_kernels.dequantise[(ceil(count / (BLOCK // 2 * _BLOCKS_EACH)),)](
            weight.view(torch.uint8),
            _values(self.quant_type, weight.device),
            statistics.view(torch.uint8),
            numbers,
            count,
            DOUBLE=self.double,
            BLOCK_BYTES=BLOCK // 2,
            NESTED_BLOCK=NESTED_BLOCK,
            NESTED_CODES=NESTED_CODES,
            BLOCKS=_BLOCKS_EACH,
            enable_fp_fusion=False,
            num_warps=2,
        )
        return numbers[: prod(shape)].view(shape)

    def describe(self) -> str:
        """Returns what the scheme is, for the report."""
        double = " with quantised scales" if self.double else ""
        return f"{self.quant_type}{double}, kept as {self.storage}"

    def as_json(self) -> dict[str, Any]:
        """Returns the scheme for a manifest, without what does not change the numbers."""
        return {"bits": 4, **{key: value for key, value in asdict(self).items() if key != "compute"}}

    def _stored(self, data: Tensor) -> Tensor:
        """Returns bytes as a tensor of the dtype `storage`, filled up with zeros."""
        dtype = self.dtypes["weight"]
        return torch.nn.functional.pad(data, (0, -len(data) % dtype.itemsize)).view(dtype)

    def _num_statistics_bytes(self, shape: Shape) -> int:
        blocks = ceil(prod(shape) / BLOCK)
        return 4 * (NESTED_CODES + ceil(blocks / NESTED_BLOCK) + 1) + blocks if self.double else 4 * blocks


@dataclass(frozen=True)
class EightBit:
    """LLM.int8(): `weight` is the matrix in int8, `statistics` the largest number of each row in float32."""

    threshold: float = 6.0
    """Inputs with a larger number are multiplied in 16 bits on a GPU; transformers' default."""
    compute = None
    bits = 8

    @property
    def dtypes(self) -> dict[Part, torch.dtype]:
        """The dtypes of the tensors."""
        return {"weight": torch.int8, "statistics": torch.float32}

    def shapes(self, shape: Shape) -> dict[Part, tuple[int, ...]]:
        """Returns the shapes of the tensors for a matrix."""
        return {"weight": shape, "statistics": (shape[0],)}

    def quantise(self, part: Part, matrix: Tensor) -> Tensor:
        """Returns one of the tensors of a matrix, or of some of its rows. Equal to bitsandbytes on a CPU."""
        rows = matrix.to(torch.float16)  # as bitsandbytes does
        maxima = rows.abs().amax(1).float()
        if part == "statistics":
            return maxima
        # A row of zeros makes NaN here, which is 0 in int8 on CPUs and undefined elsewhere.
        return (rows * (127.0 / maxima[:, None])).round().nan_to_num(0).to(torch.int8)

    def dequantise(self, weight: Tensor, statistics: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Returns the matrix that the tensors stand for, in a dtype."""
        return weight.to(dtype, copy=True).mul_(statistics[:, None].mul(1.0 / 127.0))

    def describe(self) -> str:
        """Returns what the scheme is, for the report."""
        return "int8 by rows"

    def as_json(self) -> dict[str, Any]:
        """Returns the scheme for a manifest, without what does not change the numbers."""
        return {"bits": 8}


Scheme = FourBit | EightBit
"""How a matrix is quantised."""


def scheme_from_json(about: dict[str, Any]) -> Scheme:
    """Returns the scheme that a manifest names; the inverse of `as_json`. Raises ValueError for others."""
    options = {key: value for key, value in about.items() if key in ("quant_type", "double", "storage")}
    scheme: Scheme = FourBit(**options) if about.get("bits") == 4 else EightBit()
    if scheme.as_json() != about or (isinstance(scheme, FourBit) and scheme.storage not in STORAGE):
        raise ValueError(f"the quantisation {about!r:.200} is not known")
    return scheme


STORAGE = ("uint8", "float16", "bfloat16", "float32")
"""The dtypes that 4-bit weights may be kept in."""


def block_maxima(numbers: Tensor) -> Tensor:
    """Returns the largest absolute value of each block, in float32; the last block may be shorter."""
    whole = numbers.numel() // BLOCK * BLOCK
    maxima = numbers[:whole].view(-1, BLOCK).abs().amax(-1).float()
    if whole < numbers.numel():
        maxima = torch.cat([maxima, numbers[whole:].abs().amax().float().clamp(min=1e-38)[None]])
    return maxima


@cache
def _values(quant_type: str, device: torch.device) -> Tensor:
    """Returns the 16 values of a type on a device."""
    from bitsandbytes.functional import get_4bit_type

    with torch.inference_mode(False):  # it is kept for later
        values: Tensor = get_4bit_type(quant_type, device=device)
    return values


def has_kernel(weight: Tensor) -> bool:
    """Returns whether the kernel of this package dequantises; torch.compile knows bitsandbytes' operators instead."""
    return why_no_triton(weight.device) is None and not torch.compiler.is_compiling() and not is_fake(weight)


@cache
def _bounds(quant_type: str) -> tuple[list[float], list[int] | None]:
    """Returns the numbers between the 16 values of a type, and the code of each value if they are not in order."""
    from bitsandbytes.functional import get_4bit_type

    values = get_4bit_type(quant_type, device="cpu")
    order = values.argsort()
    codes = order.tolist()
    return ((values[order[:-1]] + values[order[1:]]) / 2).tolist(), None if codes == [*range(16)] else codes


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
