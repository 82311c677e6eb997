"""Compression for loops that are written by hand, without a strategy of shoal.

compressor = GradientCompressor(compression_ratio=0.01, method="topk")
compressed = compressor.compress(gradient)          # {"values", "indices", "shape"}
dense = compressor.decompress(compressed)           # as long as the gradient, zero where nothing was sent

compressor.attach(DistributedDataParallel(model))   # or: let DDP exchange compressed gradients from now on
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shoal.config.schema_distributed import CompressionConfig
from shoal.errors import UserError
from shoal.parallel.compression.cast import BLOCK, Cast
from shoal.parallel.compression.exchange import CompressedExchange, build_method
from shoal.parallel.compression.topk import TopK, largest


class GradientCompressor:
    """Compresses tensors one by one, or the gradients of a DistributedDataParallel."""

    def __init__(
        self,
        compression_ratio: float = 0.01,
        method: str = "topk",
        *,
        rank: int = 8,
        start_step: int = 0,
        min_compression: float = 2.0,
        error_feedback: bool | None = None,
        seed: int = 0,
    ):
        """`compression_ratio` is the fraction of elements that topk keeps; the others are those of
        `distributed.compression`."""
        if not 0 < compression_ratio <= 1:
            raise UserError(
                f"compression_ratio = {compression_ratio}: it is the fraction of elements that is kept; use a number "
                "above 0 and at most 1"
            )
        try:
            self.config = CompressionConfig(
                method=method,  # type: ignore[arg-type]  # pydantic checks it
                ratio=float(compression_ratio),
                rank=rank,
                start_step=start_step,
                min_compression=float(min_compression),
                error_feedback=error_feedback,
                seed=seed,
            )
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            message = first["msg"].removeprefix("Value error, ")
            raise UserError(f"GradientCompressor({key}={first['input']!r}): {message}") from None
        if self.config.method == "none":
            raise UserError("method = none: there is nothing to compress with; use fp16, bf16, int8, powersgd or topk")
        self._method, self._exchange = build_method(self.config), None

    _exchange: CompressedExchange | None
    _step = 0

    def compress(self, tensor: Tensor) -> dict[str, Any]:
        """Returns a tensor in fewer bytes. With topk: `values` and `indices` of the largest elements by absolute value,
        with their signs, and the `shape`. With fp16, bf16 and int8: `data`, `shape` and `dtype`."""
        method, flat = self._method, tensor.detach().reshape(-1)
        if isinstance(method, TopK):
            indices = largest(flat, method.count(len(flat))) if len(flat) else flat.long()
            return {"values": flat[indices], "indices": indices, "shape": tensor.shape}
        if isinstance(method, Cast):
            padded = torch.zeros(-(-len(flat) // BLOCK) * BLOCK, device=tensor.device)
            padded[: len(flat)] = flat
            return {"data": method.codec.encode(padded.view(1, -1))[0], "shape": tensor.shape, "dtype": tensor.dtype}
        raise UserError(
            f"method = {self.config.method}: its matrices come from the gradients of all ranks, so that a tensor alone "
            "cannot be compressed; use attach, or another method"
        )

    def decompress(self, compressed: Mapping[str, Any]) -> Tensor:
        """Returns a dense tensor with what `compress` kept, on the same device and in the same dtype."""
        shape = compressed["shape"]
        if "indices" in compressed:
            values = compressed["values"]
            dense = torch.zeros(shape, dtype=values.dtype, device=values.device)
            dense.view(-1)[compressed["indices"]] = values
            return dense
        assert isinstance(self._method, Cast)
        flat = self._method.codec.decode(compressed["data"].view(1, -1))[0]
        return flat[: shape.numel()].view(shape).to(compressed["dtype"])

    def attach(self, model: DistributedDataParallel) -> None:
        """Lets a DistributedDataParallel average compressed gradients in every backward from now on.

        Residuals have the names of parameters, whatever buckets DDP makes. Buckets are exchanged one after another, and
        each is waited for: messages of two buckets at once may meet in another order on another rank, and then hang.
        """
        group = model.process_group
        self._exchange = CompressedExchange(self.config, group, {"dp_replicate": dist.get_world_size(group)})
        self._names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        model.register_comm_hook(self, _average_bucket)

    @property
    def bytes_sent(self) -> int:
        """The bytes that this rank has sent for the last bucket."""
        return self._attached().wire.bytes_sent

    def state_dict(self) -> dict[str, Any]:
        """Returns the residuals and factors of this rank, for its checkpoint."""
        return {"step": self._step, **self._attached().state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` returned on the same rank of as many; raises UserError if it does not fit."""
        self._step = int(state.get("step", 0))
        if problem := self._attached().load_state(state):
            raise UserError(f"load_state_dict: {problem}")

    def _attached(self) -> CompressedExchange:
        if self._exchange is None:
            raise UserError("the compressor has no model; call attach(model) first")
        return self._exchange

    def average(self, bucket: Any) -> Tensor:
        """Replaces the gradients in a bucket of DDP by their mean over ranks, and returns its buffer."""
        exchange = self._attached()
        parameters, gradients = bucket.parameters(), bucket.gradients()
        exchange.sum_over_ranks(
            {self._names[id(p)]: gradient for p, gradient in zip(parameters, gradients, strict=True)}, self._step
        )
        if bucket.is_last():
            self._step += 1
        return bucket.buffer().div_(exchange.wire.ranks)


def _average_bucket(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
    """Is torch's communication hook: it returns a future that is already done."""
    buffer = state.average(bucket)
    done = torch.futures.Future(devices=[] if buffer.device.type == "cpu" else [buffer.device])
    done.set_result(buffer)
    return done
