"""Says whether compression would pay on a network, from bytes, bandwidth and seconds.

`compare_methods` compares all methods for the gradients of a model; `shoal doctor` and planners call it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    pays_while_computing: float
    """Compression pays as long as the computing of a step takes less than these seconds; 0 if it never does. A longer
    backward hides the exchange of gradients as they are."""
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
        max(0.0, (saved / bytes_per_second - coding_seconds) / _BACKWARD),
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


METHODS: Mapping[str, CompressionConfig] = {
    "fp16": CompressionConfig(method="fp16"),
    "bf16": CompressionConfig(method="bf16"),
    "int8": CompressionConfig(method="int8"),
    "powersgd, rank 8": CompressionConfig(method="powersgd", rank=8),
    "topk, ratio 0.01": CompressionConfig(method="topk", ratio=0.01),
}
"""The settings of compression that are compared, by the names under which they are shown."""

LOCAL_STEPS = 16
"""The `sync_every` of the row about local_sgd."""


@dataclass(frozen=True)
class Option:
    """One way to send less than all gradients in every step, compared with sending them as they are."""

    name: str
    setting: str
    """The line of a config that turns it on, below `distributed:`."""
    is_compression: bool
    """True for compressed gradients, false for weights that are exchanged once in many steps."""
    sent_bytes: float
    """What each rank sends in a step."""
    payoff: Payoff


@dataclass(frozen=True)
class Comparison:
    """What a network can carry of the gradients of a model."""

    plain_bytes: int
    """What each rank sends in a step if gradients are sent as they are."""
    plain_seconds: float
    """How long that takes, if nothing hides it."""
    options: tuple[Option, ...]
    """All methods, the one with the shortest step first."""


def compare_methods(
    shapes: Sequence[torch.Size],
    ranks: int,
    bytes_per_second: float,
    coding_seconds: Mapping[str, float],
    compute_seconds: float = 0.0,
    latency_seconds: float = 0.0,
) -> Comparison:
    """Compares all methods for fp32 gradients of these shapes on a network that sends so fast from each rank.

    `coding_seconds` has the seconds that coding and decoding all gradients takes, by the names of `METHODS`; a method
    that it leaves out is not compared. With `compute_seconds` = 0, `Payoff.pays_while_computing` still says up to which
    length of a step's computing a method pays. An exchange takes `latency_seconds` more than its bytes, so that small
    models gain nothing from fewer bytes.
    """
    plain = all_reduce_bytes(4 * sum(shape.numel() for shape in shapes), ranks)
    latency = latency_seconds * bytes_per_second  # as the bytes that could be sent in this time
    options = [
        Option(
            name,
            f"compression: {_inline(config)}",
            True,
            sent := bytes_per_step(config, shapes, ranks)[1],
            would_pay(plain + latency, sent + latency, bytes_per_second, compute_seconds, coding_seconds[name]),
        )
        for name, config in METHODS.items()
        if name in coding_seconds
    ]
    sent = plain // LOCAL_STEPS
    payoff = would_pay(plain + latency, (plain + latency) / LOCAL_STEPS, bytes_per_second, compute_seconds, 0.0)
    options.append(
        Option(f"local_sgd, {LOCAL_STEPS} steps", f"local_sgd: {{sync_every: {LOCAL_STEPS}}}", False, sent, payoff)
    )
    options.sort(key=lambda option: option.payoff.compressed_seconds)
    return Comparison(plain, (plain + latency) / bytes_per_second, tuple(options))


def _inline(config: CompressionConfig) -> str:
    """Returns a section as one line of YAML, or the method alone if nothing else is set."""
    keys = {key: value for key, value in config if key in config.model_fields_set}
    return config.method if len(keys) == 1 else "{" + ", ".join(f"{key}: {value}" for key, value in keys.items()) + "}"
