"""fp16, bf16 and int8: every element in fewer bits, in blocks that have a scale each.

Two messages sum a tensor: each rank gets one part of it from all ranks (all-to-all), adds the parts up in fp32, and
sends the coded sum to all ranks (all-gather). Together they have as many elements as a ring all-reduce has, and an
element is rounded twice, however many ranks there are. An all-reduce in fp16 would round at every addition, and a sum
could overflow. What the second rounding loses belongs to the rank that did it, and is in its residual.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.parallel.compression.method import Exchanged, Method, buckets
from shoal.parallel.compression.wire import Wire

BLOCK = 256
"""Elements that have one scale. Every parameter begins with a new block."""


_BUCKET_BYTES = 4 << 20
"""What is coded and sent together, at least."""


class Codec(ABC):
    """Turns rows of fp32 elements, a multiple of BLOCK, into rows of bytes and back."""

    bytes_per_block: int

    @abstractmethod
    def encode(self, rows: Tensor) -> Tensor:
        """Returns the bytes of each row."""

    @abstractmethod
    def decode(self, rows: Tensor) -> Tensor:
        """Returns the elements of each row of bytes."""


class BFloat16(Codec):
    """Has the range of fp32, and needs no scale."""

    bytes_per_block = 2 * BLOCK

    def encode(self, rows: Tensor) -> Tensor:
        return rows.bfloat16().view(torch.uint8)

    def decode(self, rows: Tensor) -> Tensor:
        return rows.view(torch.bfloat16).float()


class _Scaled(Codec):
    """Stores a scale in front of the elements of each block."""

    dtype: torch.dtype

    def encode(self, rows: Tensor) -> Tensor:
        blocks = rows.view(len(rows), -1, BLOCK)
        scales = self._scales(blocks.abs().amax(-1, keepdim=True))
        coded = self._quantise(blocks / scales).view(torch.uint8)
        return torch.cat([scales.view(torch.uint8), coded], -1).flatten(1)

    def decode(self, rows: Tensor) -> Tensor:
        blocks = rows.view(len(rows), -1, self.bytes_per_block)
        scales = blocks[..., :4].contiguous().view(torch.float32)
        return (blocks[..., 4:].contiguous().view(self.dtype).float() * scales).flatten(1)

    @abstractmethod
    def _scales(self, largest: Tensor) -> Tensor:
        """Returns the scales of blocks from their largest absolute values. That of a block of zeros is not 0."""

    @abstractmethod
    def _quantise(self, blocks: Tensor) -> Tensor:
        """Returns scaled elements in the dtype of the codec."""


class Float16(_Scaled):
    """Has scales that are powers of two, so that a number which fp16 can hold stays what it is; none overflows."""

    bytes_per_block, dtype = 4 + 2 * BLOCK, torch.float16

    def _scales(self, largest: Tensor) -> Tensor:
        exponent = torch.frexp(largest).exponent.clamp(min=-110)
        scales = torch.ldexp(
            torch.ones_like(largest), exponent - 15
        )  # the largest is below 2¹⁵, and fp16 ends at 65504
        return torch.where(largest.isfinite(), scales, 1.0)  # infinity and NaN stay what they are

    def _quantise(self, blocks: Tensor) -> Tensor:
        return blocks.half()


class Int8(_Scaled):
    """Divides the range of a block into 255 steps, and rounds to the nearest."""

    bytes_per_block, dtype = 4 + BLOCK, torch.int8

    def _scales(self, largest: Tensor) -> Tensor:
        smallest = torch.finfo(torch.float32).tiny
        # Infinity and NaN become a scale of NaN, which makes the whole block NaN.
        return torch.where(largest.isfinite(), (largest / 127).clamp(min=smallest), torch.nan)

    def _quantise(self, blocks: Tensor) -> Tensor:
        return blocks.round().nan_to_num().clamp(-127, 127).to(torch.int8)


CODECS: Mapping[str, type[Codec]] = {"fp16": Float16, "bf16": BFloat16, "int8": Int8}


class Cast(Method):
    """Sends all elements, coded."""

    def __init__(self, codec: Codec):
        self.codec = codec

    def message_bytes(self, shape: torch.Size, ranks: int) -> float:
        return 2 * (ranks - 1) / ranks * -(-shape.numel() // BLOCK) * self.codec.bytes_per_block

    def exchange(self, tensors: Mapping[str, Tensor], step: int, is_finite: Tensor, wire: Wire) -> dict[str, Exchanged]:
        """Exchanges buckets, so that one is coded while others are on their way. Ranks send them in the same order."""
        parts = [_Bucket(bucket, self.codec, wire) for bucket in buckets(tensors, _BUCKET_BYTES)]
        for part in parts:
            part.add_up()
        return {name: outcome for part in parts for name, outcome in part.outcomes().items()}


class _Bucket:
    """Tensors that are sent together: a part of them to each rank, and the sum of this rank's part to all."""

    def __init__(self, tensors: Mapping[str, Tensor], codec: Codec, wire: Wire):
        self.tensors, self.codec, self.wire = tensors, codec, wire
        self.device = next(iter(tensors.values())).device
        with wire.coding(self.device):
            sizes = [-(-tensor.numel() // BLOCK) * BLOCK for tensor in tensors.values()]
            row = -(-sum(sizes) // (BLOCK * wire.ranks)) * BLOCK
            joined = torch.zeros(wire.ranks * row, device=self.device)
            self.sizes = [*sizes, len(joined) - sum(sizes)]
            for part, tensor in zip(joined.split(self.sizes), tensors.values(), strict=False):
                part[: tensor.numel()] = tensor.reshape(-1)
            self.unsent = joined.view(wire.ranks, row)
            sent = codec.encode(self.unsent)
        self._wait_for_rows = wire.start_all_to_all(sent)
        with wire.coding(self.device):
            self.unsent -= codec.decode(sent)

    def add_up(self) -> None:
        """Adds up this rank's part, and begins to send the sum to all ranks."""
        received = self._wait_for_rows()
        with self.wire.coding(self.device):
            self.part = self.codec.decode(received[:1])
            for one in received[1:].split(1):  # in the order of ranks, so that the sum is always the same
                self.part += self.codec.decode(one)
            coded = self.codec.encode(self.part)
        self._wait_for_sums = self.wire.start_all_gather(coded[0])

    def outcomes(self) -> dict[str, Exchanged]:
        """Waits for the sums of all parts."""
        gathered = self._wait_for_sums()
        with self.wire.coding(self.device):
            totals = self.codec.decode(gathered)
            self.unsent[self.wire.rank] += self.part[0] - totals[self.wire.rank]
            sums, rests = (one.view(-1).split(self.sizes) for one in (totals, self.unsent))
            return {
                name: Exchanged(total[: tensor.numel()].view(tensor.shape), rest[: tensor.numel()].view(tensor.shape))
                for (name, tensor), total, rest in zip(self.tensors.items(), sums, rests, strict=False)
            }
