"""Proves what can be proved of compression and local_sgd, which do not compute the same training as one device.

- With settings that lose nothing (`ratio: 1.0`, full rank) topk and PowerSGD must equal one device, as ddp does. fp16,
  bf16 and int8 must equal it within a bound of their rounding.
- With the config's own settings, at every step: what was sent and what is kept is what there was (conservation).
- The weights after every average of local_sgd are those of the formula, from the weights of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.config import Run
from shoal.config.schema_distributed import CompressionConfig
from shoal.parallel.compression.exchange import CompressedExchange
from shoal.parallel.compression.local_sgd import LocalSGD
from shoal.verify.compare import Check, compare
from shoal.verify.expected_work import ALLOWED, ExpectedWork
from shoal.verify.layouts import with_changes
from shoal.verify.trace import Trace

EXCHANGE = "exchange"
"""The name of the row about compression or local_sgd."""
_LOSSLESS: Mapping[str, dict[str, Any]] = {
    "topk": {"ratio": 1.0, "min_compression": 0.0},
    "powersgd": {"rank": 1 << 20, "min_compression": 0.0},
}
_BOUNDS = {"fp16": "fp16", "bf16": "bf16", "int8": "fp8"}
"""The precision whose bounds hold for gradients that were rounded so."""
_ROUNDING = {"fp16": 2.0**-10, "bf16": 2.0**-7}
"""What two roundings may change of a sum, relative to the gradients."""
_CONSERVED = 1e-5
_KINDS = ("allreduce", "_allgather_base", "allgather", "alltoall_base", "send", "recv", "broadcast")


def says_exchange(run: Run) -> str:
    """Returns the method that a config exchanges by, if it is not the plain one."""
    distributed = run.config.distributed
    if distributed.local_sgd is not None:
        return "local_sgd"
    return "" if distributed.compression.method == "none" else distributed.compression.method


def without_exchange(run: Run) -> Run:
    """Returns the run with gradients as they are."""
    return with_changes(run, {"compression": {"method": "none"}, "local_sgd": None})


def own_exchange(run: Run, original: Run) -> Run:
    """Returns a run with the exchange of the original, from the first step on; local_sgd averages every other step."""
    distributed = original.config.distributed
    if distributed.local_sgd is not None:
        return with_changes(run, {"local_sgd": {**distributed.local_sgd.model_dump(), "sync_every": 2}})
    return with_changes(run, {"compression": {**distributed.compression.model_dump(), "start_step": 0}})


def lossless_exchange(run: Run, original: Run) -> Run | None:
    """Returns a run with settings that lose nothing; None for methods that have none."""
    compression = original.config.distributed.compression
    if compression.method not in _LOSSLESS:
        return None
    changes = {**compression.model_dump(), "start_step": 0, **_LOSSLESS[compression.method]}
    return with_changes(run, {"compression": changes})


class Watch:
    """Notes at every exchange what is not as it should be, in one number. All ranks have one."""

    def __init__(self, exchange: CompressedExchange | LocalSGD):
        self.errors: list[float] = []
        self._exchange, self._velocities = exchange, dict[str, Tensor]()
        if isinstance(exchange, LocalSGD):
            exchange.on_average = self._note_average
        else:
            exchange.on_exchange = self._note_exchange

    def _note_exchange(
        self, before: Mapping[str, Tensor], residuals_before: Mapping[str, Tensor], after: Mapping[str, Tensor]
    ) -> None:
        """Compares gradients and residuals of all ranks before an exchange with the sum and residuals after it."""
        exchange = self._exchange
        assert isinstance(exchange, CompressedExchange)
        scale = exchange.loss_scale() if exchange.loss_scale else 1.0
        lost, size = 0.0, 0.0
        for name, gradient in before.items():
            zero = torch.zeros_like(gradient, dtype=torch.float32)
            then, now = (residuals.get(name, zero) * scale for residuals in (residuals_before, exchange.residuals))
            sums = torch.stack([gradient.double(), (now.to(gradient.device) - then.to(gradient.device)).double()])
            sizes = torch.stack([gradient.double().square().sum(), now.double().square().sum().to(gradient.device)])
            dist.all_reduce(sums, group=exchange.wire.group)
            dist.all_reduce(sizes, group=exchange.wire.group)
            lost += (after[name].double() + sums[1] - sums[0]).square().sum().item()
            size += sizes.sum().item()
        self.errors.append((lost / size) ** 0.5 if size else 0.0)

    def _note_average(self, weights: Mapping[str, Tensor], anchor: Mapping[str, Tensor]) -> None:
        """Computes the outer step from the weights of all ranks in float64, and compares it with the new anchor."""
        exchange = self._exchange
        assert isinstance(exchange, LocalSGD)
        config, lost, moved = exchange.config, 0.0, 0.0
        for name, start in anchor.items():
            mean = weights[name].double()
            dist.all_reduce(mean, group=exchange.wire.group)
            change = start.double() - mean / exchange.ranks
            velocity = config.outer_momentum * self._velocities.get(name, torch.zeros_like(change)) + change
            self._velocities[name] = velocity
            end = start.double() - config.outer_lr * (change + config.outer_momentum * velocity)
            lost += (exchange.anchor[name].double() - end).square().sum().item()
            moved += (end - start.double()).square().sum().item() + 1e-14 * end.square().sum().item()
        self.errors.append((lost / moved) ** 0.5 if moved else 0.0)


def lossless_checks(
    reference: Trace, ranks: list[Trace], expected: ExpectedWork, method: str, precision: str
) -> list[Check]:
    """Returns the checks of a layout whose exchange loses nothing, or no more than it rounds."""
    anything = replace(expected, collectives=dict.fromkeys(_KINDS, ALLOWED))
    if method == "powersgd":
        anything = replace(anything, flops=None)  # its own matrix products would count
    return compare(reference, ranks, anything, _BOUNDS.get(method, precision))


def own_checks(ranks: list[Trace], config: CompressionConfig) -> list[Check]:
    """Returns the checks of the config's own compression."""
    first = ranks[0]
    problem = next((rank.desync for rank in ranks if rank.desync), "")
    checks = [Check("ranks agree", not problem, problem or "all ranks have the same gradients", "exact")]
    if config.feeds_back or config.method in _ROUNDING:
        bound = _CONSERVED if config.feeds_back else _ROUNDING[config.method]
        kind = "conservation" if config.feeds_back else "rounding"
        checks.append(_errors(kind, ranks, bound, "what was sent and what is kept differs from what there was by"))
    sent, promised, plain = first.wire_bytes
    detail = f"a rank sends {sent:,} bytes in a step, {promised:,} were promised, and {plain:,} without compression"
    checks.append(Check("bytes sent", 0 < sent <= 1.01 * promised + 4096, detail, "work"))
    return checks


def local_sgd_checks(reference: Trace, ranks: list[Trace]) -> list[Check]:
    """Returns the checks of local_sgd."""
    problem = next((rank.desync for rank in ranks if rank.desync), "")
    first = ranks[0]
    different = [name for name, tensor in reference.start.items() if not torch.equal(tensor, first.start[name])]
    return [
        Check("ranks agree", not problem, problem or "all ranks have the same weights after an average", "exact"),
        Check("initial weights", not different, f"{different[0]} differs" if different else "bit-equal", "exact"),
        _errors("averages", ranks, 1e-4, "weights after an average differ from the formula, relative to the move, by"),
    ]


def _errors(name: str, ranks: list[Trace], bound: float, words: str) -> Check:
    errors = [error for rank in ranks for error in rank.exchange_errors]
    worst = max((error if error == error else inf for error in errors), default=inf)
    detail = f"in {len(ranks[0].exchange_errors)} exchanges {words} at most {worst:.1e}, allowed {bound:.1e}"
    return Check(name, worst <= bound, detail, "exact")
