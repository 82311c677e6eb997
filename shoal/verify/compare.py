"""When two layouts computed the same training, and when a layout did the work it promises."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, isfinite, isnan

import torch
from torch import Tensor

from shoal.verify.promises import Promise, Range
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


def compare(reference: Trace, ranks: list[Trace], promise: Promise, precision: str) -> list[Check]:
    """All checks of one layout against one device."""
    bounds = BOUNDS[precision]
    first = ranks[0]
    weights = {"weights, SGD": (reference.sgd_weights, first.sgd_weights, bounds.sgd_weights)}
    if reference.adamw_weights:
        weights["weights, AdamW"] = (reference.adamw_weights, first.adamw_weights, bounds.adamw_weights)
    return [
        _desync(ranks),
        _equal_scalars("loss", reference.losses, [rank.losses for rank in ranks], bounds.gradient),
        _equal_scalars("gradient norm", reference.grad_norms, [rank.grad_norms for rank in ranks], bounds.gradient),
        _same_start(reference, first),
        _gradients("gradients", reference.gradients, first.gradients, bounds),
        _gradients("gradients later", reference.later_gradients, first.later_gradients, bounds),
        *(_weights(name, reference, *tensors_and_bound, bounds) for name, tensors_and_bound in weights.items()),
        *_work(reference, ranks, promise),
    ]


def _desync(ranks: list[Trace]) -> Check:
    found = next((rank.desync for rank in ranks if rank.desync), "")
    return Check("ranks agree", not found, found or "samples and gradients, over all ranks")


def _equal_scalars(name: str, expected: list[float], by_rank: list[list[float]], bound: float) -> Check:
    worst, where = 0.0, "equal on all ranks"
    for rank, values in enumerate(by_rank):
        for step, (a, b) in enumerate(zip(expected, values, strict=True)):
            error = abs(a - b) / max(abs(a), 1e-12) if isfinite(a) and isfinite(b) else inf
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
    floor = bounds.floor * _norm(expected)
    allowed = {key: bounds.gradient * tensor.norm().item() + floor for key, tensor in expected.items()}
    check = _within(name, expected, got, allowed)
    return check if check.passed else replace(check, detail=check.detail + _constant_factor(expected, got))


def _constant_factor(expected: dict[str, Tensor], got: dict[str, Tensor]) -> str:
    """The signature of a wrong scale: all gradients are off by one number. Adam would hide it."""
    scale = sum((expected[key] * got[key]).sum().item() for key in expected) / max(_norm(expected) ** 2, 1e-30)
    rest = _norm({key: got[key] - scale * expected[key] for key in expected})
    if rest > 1e-4 * _norm(got):
        return ""
    return f"; all are {scale:.4g} times one device's: a factor was forgotten"


def _weights(
    name: str, reference: Trace, expected: dict[str, Tensor], got: dict[str, Tensor], relative: float, bounds: Bounds
) -> Check:
    # A gradient that is zero but for rounding, such as a key bias's: AdamW makes steps of full size out of it.
    rounding = 1e-6 * _norm(reference.gradients)
    allowed = {
        key: relative * (expected[key] - reference.start[key]).norm().item()
        + bounds.floor * expected[key].norm().item()
        for key, gradient in reference.gradients.items()
        if gradient.norm().item() > rounding
    }
    return _within(name, expected, got, allowed)


def _within(name: str, expected: dict[str, Tensor], got: dict[str, Tensor], allowed: dict[str, float]) -> Check:
    """Whether every tensor is as near to the expected one as is allowed; the worst is named."""
    errors = {key: (expected[key] - got[key]).norm().item() / max(bound, 1e-30) for key, bound in allowed.items()}
    worst = max(errors, key=lambda key: inf if isnan(errors[key]) else errors[key], default="-")
    error = errors.get(worst, 0.0)
    return Check(name, error <= 1, f"{error:.1e} of the bound, worst {worst}")


def _work(reference: Trace, ranks: list[Trace], promise: Promise) -> list[Check]:
    """Equal numbers are not enough: sharded the wrong way, every rank computes everything and is still right."""
    shares = (
        ("parameter bytes", "parameter_bytes", promise.parameter_bytes, 0.01),
        ("optimizer bytes", "state_bytes", promise.state_bytes, 0.01),
        ("matmul FLOPs", "flops", promise.flops, 0.05 * (promise.flops or 0)),
    )
    checks = []
    for name, counted, promised, slack in shares:
        if promised is not None:
            got = max(getattr(rank, counted) for rank in ranks) / max(getattr(reference, counted), 1)
            detail = f"{got:.2f} of one device's on a rank, promised {promised:.2f}"
            checks.append(Check(name, got <= promised + slack, detail))
    return [*checks, _collectives(reference, ranks, promise)]


def _collectives(reference: Trace, ranks: list[Trace], promise: Promise) -> Check:
    gradient_bytes = max(sum(tensor.nbytes for tensor in reference.gradients.values()), 1)
    small = 0.02 + 4096 / gradient_bytes  # counts, losses and flags travel too
    kinds = {kind for rank in ranks for kind in rank.collective_bytes}
    told, passed = [], True
    for kind in sorted(kinds | {kind for kind, promised in promise.collectives.items() if promised.low}):
        sent = max(rank.collective_bytes.get(kind, 0) for rank in ranks) / gradient_bytes
        promised = promise.collectives.get(kind, Range(0, 0))
        if promised.high == inf:
            passed = passed and sent >= promised.low
            told.append(f"{kind.strip('_')} {sent:.2f}, which depends on the batch")
        elif sent > small or promised.high:
            slack = small + 0.02 * promised.high
            passed = passed and promised.low - slack <= sent <= promised.high + slack
            told.append(f"{kind.strip('_')} {sent:.2f} of the parameters' bytes a step, promised {promised}")
    return Check("collectives", passed, "; ".join(told) or "none")


def _norm(named: dict[str, Tensor]) -> float:
    return float(torch.stack([tensor.double().norm() for tensor in named.values()]).norm()) if named else 0.0
