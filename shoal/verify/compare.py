"""When two layouts computed the same training, and when a layout did the work it promises."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from shoal.verify.trace import Trace


@dataclass(frozen=True)
class Check:
    """One question asked of a layout, and the answer in words."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Bounds:
    """How far apart rounding may take two layouts.

    A gradient tensor: ‖g−g′‖ ≤ gradient·‖g‖ + floor·‖G‖, G being all of them. Weights after some steps:
    ‖w−w′‖ ≤ weights·‖w−w₀‖ + floor·‖w‖: what is stored in fp32 cannot be compared more finely than it is stored.
    """

    gradient: float
    sgd_weights: float
    adamw_weights: float
    floor: float


BOUNDS = {
    "fp32": Bounds(1e-5, 1e-4, 1e-3, 1e-7),
    "bf16": Bounds(3e-2, 5e-2, 3e-1, 1e-3),
    "pure_bf16": Bounds(3e-2, 5e-2, 3e-1, 1e-3),
    "fp16": Bounds(3e-3, 1e-2, 1e-1, 1e-4),
    "fp8": Bounds(1e-1, 2e-1, 5e-1, 1e-2),
}
"""By the precision that matrix products are computed in. The half types are bounds of rounding, not of proof."""


@dataclass(frozen=True)
class Range:
    low: float
    high: float

    @classmethod
    def exactly(cls, value: float) -> Range:
        return cls(value, value)

    def __str__(self) -> str:
        return f"{self.high:.2f}" if self.low in (0, self.high) else f"{self.low:.2f} to {self.high:.2f}"


@dataclass(frozen=True)
class Promise:
    """What a layout says it costs a rank, as shares of what one device has."""

    parameter_bytes: float
    flops: Range | None
    """None if they cannot be counted."""
    collectives: dict[str, Range]
    """By kind: what a step sends, as a share of the bytes of all parameters that are trained."""
    others: frozenset[str] = frozenset()
    """Other kinds it may use."""
    state_bytes: float | None = None
    """What the optimizer keeps, where that is split otherwise than the parameters."""
    needs: frozenset[str] = frozenset()
    """Those of them that it has to use."""


def compare(reference: Trace, ranks: list[Trace], promise: Promise, precision: str) -> list[Check]:
    """All checks of one layout against one device."""
    bounds = BOUNDS[precision]
    first = ranks[0]
    weights = {"weights, SGD": (reference.sgd_weights, first.sgd_weights, bounds.sgd_weights)}
    if reference.adamw_weights:
        weights["weights, AdamW"] = (reference.adamw_weights, first.adamw_weights, bounds.adamw_weights)
    return [
        _desync(ranks),
        _equal_scalars("loss", reference.losses, ranks, [rank.losses for rank in ranks], bounds.gradient),
        _equal_scalars("gradient norm", reference.grad_norms, ranks, [r.grad_norms for r in ranks], bounds.gradient),
        _same_start(reference, first),
        _gradients("gradients", reference.gradients, first.gradients, bounds),
        _gradients("gradients later", reference.later_gradients, first.later_gradients, bounds),
        *(_weights(name, reference, *tensors_and_bound, bounds.floor) for name, tensors_and_bound in weights.items()),
        *_work(reference, ranks, promise),
    ]


def _desync(ranks: list[Trace]) -> Check:
    found = next((rank.desync for rank in ranks if rank.desync), "")
    return Check("ranks agree", not found, found or "samples and gradients, over all ranks")


def _equal_scalars(name: str, expected: list[float], ranks: list[Trace], got: list[list[float]], bound: float) -> Check:
    worst, where = 0.0, "equal on all ranks"
    for rank, values in enumerate(got):
        for step, (a, b) in enumerate(zip(expected, values, strict=True)):
            error = abs(a - b) / max(abs(a), 1e-12) if isfinite(a) and isfinite(b) else float("inf")
            if error > worst:
                worst, where = error, f"{b:.7g} on rank {rank} at step {step + 1}, {a:.7g} on one device"
    return Check(name, worst <= bound, f"{worst:.1e}: {where}")


def _same_start(reference: Trace, layout: Trace) -> Check:
    different = [name for name, tensor in reference.start.items() if not torch.equal(tensor, layout.start[name])]
    detail = f"{different[0]} and {len(different) - 1} more differ" if different else "bit-equal"
    return Check("first weights", not different, detail)


def _gradients(name: str, expected: dict[str, Tensor], got: dict[str, Tensor], bounds: Bounds) -> Check:
    if missing := expected.keys() ^ got.keys():
        return Check(name, False, f"{sorted(missing)[0]} has a gradient in one layout alone")
    whole = _norm(expected)
    worst, worst_name = 0.0, "-"
    for key, tensor in expected.items():
        allowed = bounds.gradient * tensor.norm().item() + bounds.floor * whole
        error = (tensor - got[key]).norm().item() / max(allowed, 1e-30)
        if not error <= worst:
            worst, worst_name = error, key
    detail = f"{worst:.1e} of the bound, worst {worst_name}"
    if not worst <= 1:
        detail += _constant_factor(expected, got)
    return Check(name, worst <= 1, detail)


def _constant_factor(expected: dict[str, Tensor], got: dict[str, Tensor]) -> str:
    """The signature of a wrong scale: all gradients are off by one number. Adam would hide it."""
    scale = sum((expected[key] * got[key]).sum().item() for key in expected) / max(_norm(expected) ** 2, 1e-30)
    rest = _norm({key: got[key] - scale * expected[key] for key in expected})
    if rest > 1e-4 * _norm(got):
        return ""
    return f"; all are {scale:.4g} times one device's: a factor was forgotten"


def _weights(
    name: str, reference: Trace, expected: dict[str, Tensor], got: dict[str, Tensor], relative: float, floor: float
) -> Check:
    worst, worst_name = 0.0, "-"
    for key in reference.gradients:
        if _gradient_is_rounding(reference, key):
            continue
        moved = (expected[key] - reference.start[key]).norm().item()
        allowed = relative * moved + floor * expected[key].norm().item()
        error = (expected[key] - got[key]).norm().item() / max(allowed, 1e-30)
        if not error <= worst:
            worst, worst_name = error, key
    return Check(name, worst <= 1, f"{worst:.1e} of the bound, worst {worst_name}")


def _gradient_is_rounding(reference: Trace, name: str) -> bool:
    """A gradient that is zero but for rounding, such as a key bias's: AdamW makes steps of full size out of it."""
    return reference.gradients[name].norm().item() <= 1e-6 * _norm(reference.gradients)


def _work(reference: Trace, ranks: list[Trace], promise: Promise) -> list[Check]:
    """Equal numbers are not enough: sharded the wrong way, every rank computes everything and is still right."""
    parameters = max(rank.parameter_bytes for rank in ranks) / max(reference.parameter_bytes, 1)
    flops = max(rank.flops for rank in ranks) / max(reference.flops, 1)
    checks = [_share("parameter bytes", parameters, promise.parameter_bytes, 0.01)]
    if promise.state_bytes is not None:
        state = max(rank.state_bytes for rank in ranks) / max(reference.state_bytes, 1)
        checks.append(_share("optimizer bytes", state, promise.state_bytes, 0.01))
    if promise.flops is not None:
        checks.append(_share("matmul FLOPs", flops, promise.flops.high, 0.05 * promise.flops.high))
    return [*checks, _collectives(reference, ranks, promise)]


def _collectives(reference: Trace, ranks: list[Trace], promise: Promise) -> Check:
    gradient_bytes = max(sum(tensor.nbytes for tensor in reference.gradients.values()), 1)
    small = 0.02 + 4096 / gradient_bytes  # counts, losses and flags travel too
    kinds = {kind for rank in ranks for kind in rank.collective_bytes}
    told, passed = [], True
    for kind in sorted(kinds | promise.needs | promise.collectives.keys() - promise.others):
        sent = max(rank.collective_bytes.get(kind, 0) for rank in ranks) / gradient_bytes
        promised = promise.collectives.get(kind, Range(0, 0))
        if kind in promise.others:
            passed = passed and (sent > 0 or kind not in promise.needs)
            told.append(f"{kind.strip('_')} {sent:.2f}, which depends on the batch")
            continue
        if sent <= small and not promised.high:
            continue
        slack = small + 0.02 * promised.high
        passed = passed and promised.low - slack <= sent <= promised.high + slack
        told.append(f"{kind.strip('_')} {sent:.2f} of the parameters' bytes a step, promised {promised}")
    return Check("collectives", passed, "; ".join(told) or "none")


def _share(name: str, got: float, promised: float, slack: float) -> Check:
    return Check(name, got <= promised + slack, f"{got:.2f} of one device's on a rank, promised {promised:.2f}")


def _norm(named: dict[str, Tensor]) -> float:
    return float(torch.stack([tensor.double().norm() for tensor in named.values()]).norm()) if named else 0.0
