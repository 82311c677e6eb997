"""Says whether compression would pay on a network, from bytes, bandwidth and seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

import torch

from shoal.config.schema_distributed import CompressionConfig
from shoal.parallel.compression.exchange import build_method
from shoal.parallel.compression.wire import all_reduce_bytes

_BACKWARD = 2 / 3
"""The part of a step's computing during which DDP can already exchange gradients."""


@dataclass(frozen=True)
class Payoff:
    """The verdict, with the two times that it compares."""

    pays: bool
    plain_seconds: float
    """A step that exchanges gradients as they are, as far as possible during the backward."""
    compressed_seconds: float
    """A step that computes, then codes and exchanges."""
    pays_below: float
    """The bandwidth, in bytes per second, below which compression pays; 0 if it never does."""
    sentence: str


def would_pay(
    plain_bytes: float,
    compressed_bytes: float,
    bytes_per_second: float,
    compute_seconds: float,
    coding_seconds: float,
) -> Payoff:
    """Returns whether a step with compression is shorter. Bytes are what each rank sends in a step."""
    hidden = _BACKWARD * compute_seconds

    def seconds(speed: float) -> tuple[float, float]:
        exposed = max(plain_bytes / speed - hidden, 0.0)
        return compute_seconds + exposed, compute_seconds + coding_seconds + compressed_bytes / speed

    plain, compressed = seconds(bytes_per_second)
    saved = plain_bytes - compressed_bytes
    # plain = compressed where (plain_bytes − compressed_bytes) / speed = hidden + coding.
    limit = 0.0 if saved <= 0 else saved / (hidden + coding_seconds) if hidden + coding_seconds else inf
    pays = compressed < plain
    ratio = plain / compressed if compressed else 1.0
    verdict = f"{ratio:.1f} times as fast" if pays else "not faster"
    return Payoff(
        pays,
        plain,
        compressed,
        limit,
        f"a step takes {compressed:.3g} s instead of {plain:.3g} s at {bytes_per_second * 8 / 1e6:.4g} Mbit/s: "
        f"{verdict}; compression pays below {limit * 8 / 1e6:.3g} Mbit/s",
    )


def bytes_per_step(config: CompressionConfig, shapes: Iterable[torch.Size], ranks: int) -> tuple[int, int]:
    """Returns the bytes that each rank sends in a step for fp32 gradients of these shapes: plain, and compressed."""
    method, plain, compressed = build_method(config), 0, 0.0
    for shape in shapes:
        whole = all_reduce_bytes(4 * shape.numel(), ranks)
        plain += whole
        compressed += method.message_bytes(shape, ranks) if method.compresses(shape) else whole
    return plain, int(compressed)
