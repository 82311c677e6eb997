"""Compares a layout with one device: did it compute the same training, and did it do the work that it should?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, isfinite, isnan
from typing import Literal

import torch
from torch import Tensor

from shoal.quantised.layers import PARTS
from shoal.verify.expected_work import PLAIN_NAMES, ExpectedWork, Range
from shoal.verify.trace import Trace, norm

CheckKind = Literal["exact", "values", "work"]
"""What a check is about: `exact` holds whatever the model computes, `values` compares what the forward computes, and
`work` compares what each rank holds, computes and sends with what the layout promises."""


@dataclass(frozen=True)
class Check:
    """The result of one comparison, with the measured value in words."""

    name: str
    passed: bool
    detail: str
    kind: CheckKind = "values"


@dataclass(frozen=True)
class Bounds:
    """How much two layouts may differ because of rounding.

    For a gradient tensor: ‖g−g′‖ ≤ gradient·‖g‖ + floor·‖G‖, where G is the gradient of all parameters. For weights
    after some steps: ‖w−w′‖ ≤ weights·‖w−w₀‖ + floor·‖w‖. The floor is the precision of the stored numbers. Losses and
    gradient norms are sums, in which rounding averages out; without bounds of their own they have that of gradients.
    """

    gradient: float
    sgd_weights: float
    adamw_weights: float
    floor: float
    own_loss: float | None = None
    own_norm: float | None = None

    @property
    def loss(self) -> float:
        return self.own_loss or self.gradient

    @property
    def norm(self) -> float:
        return self.own_norm or self.gradient


BOUNDS = {
    "fp32": Bounds(1e-5, 1e-4, 1e-3, 1e-7),
    "bf16": Bounds(3e-2, 5e-2, 3e-1, 1e-3),
    "pure_bf16": Bounds(3e-2, 5e-2, 3e-1, 1e-3),
    "fp16": Bounds(3e-3, 1e-2, 1e-1, 1e-4),
    "fp8": Bounds(1e-1, 2e-1, 5e-1, 1e-2, own_loss=1e-2, own_norm=5e-2),
}
"""By the precision of matrix products. Only the bounds of fp32 prove equality; in half precision rounding is large.

AdamW's bound is the widest, because it divides a gradient by its size and so makes rounding errors of small gradients
larger. A model with jumps in its gradient may exceed all bounds of fp32 (float64.py).
"""


MISSING = 1e-4
"""A gradient of 0 is no rounding if the other one is more than this part of the whole gradient. In half precision the
floor alone would allow it."""
UPDATE_BOUND = 1e-5
"""How much an update alone may differ, relative to its norm, in every precision: weights, gradients and optimizer state
are those of one device, so nothing is rounded more than fp32 rounds."""
BF16_UPDATES = {"muon": 1e-2}
"""The bounds on the updates of optimizers that compute in bf16. torch's Muon makes matrices orthogonal in bf16, where
the last bit of a gradient in fp32 may move its update by 1/256."""
ROUNDED_OTHERWISE = 1e-3
"""The fraction of elements that may be rounded in another way by an update of weights in bf16. With other random bits,
half of them would be."""
BF16_STEP = 2.0**-7
"""The largest distance of two neighbours in bf16, relative to the larger one."""


def compare(reference: Trace, ranks: list[Trace], expected: ExpectedWork, precision: str) -> list[Check]:
    """Returns all checks of one layout; `reference` is the trace of one device."""
    bounds = BOUNDS[precision]
    reference, first = (packed_as_bytes(one) for one in (reference, ranks[0]))
    weights = {"weights, SGD": (reference.sgd_weights, first.sgd_weights)}
    if reference.adamw_weights:
        weights["weights, AdamW"] = (reference.adamw_weights, first.adamw_weights)
    problem = next((rank.desync for rank in ranks if rank.desync), "")
    different = [name for name, tensor in reference.start.items() if not torch.equal(tensor, first.start[name])]
    return [
        Check("ranks agree", not problem, problem or "all ranks have consistent samples and gradients", "exact"),
        _random_numbers(ranks),
        _equal_scalars("loss", reference.losses, [rank.losses for rank in ranks], bounds.loss),
        *_metrics(reference, ranks, precision),
        _equal_scalars("gradient norm", reference.grad_norms, [rank.grad_norms for rank in ranks], bounds.norm),
        _clipping(reference, ranks),
        Check(
            "initial weights",
            not different,
            f"{different[0]} and {len(different) - 1} other tensors differ" if different else "bit-equal",
            "exact",
        ),
        _gradients("gradients", reference.gradients, first.gradients, bounds),
        _gradients("later gradients", reference.later_gradients, first.later_gradients, bounds),
        *(_weights(name, reference, first, *tensors, bounds) for name, tensors in weights.items()),
        _untrained(reference, first, bounds),
        *_hook_tensors(reference, first, bounds),
        _equal_scalars("evaluation", reference.evaluation, [rank.evaluation for rank in ranks], bounds.loss),
        *_updates(reference, ranks),
        *_rounded_updates(reference, ranks),
        *_work(reference, ranks, expected),
        _collectives(reference, ranks, expected),
    ]


def _random_numbers(ranks: list[Trace]) -> Check:
    """Checks the seeds of dropout, which is off here: ranks that share samples must drop the same, others must not."""
    for a, one in enumerate(ranks):
        for b, other in enumerate(ranks[:a]):
            if (one.rng[0] == other.rng[0]) != (one.rng[1] == other.rng[1]):
                shared = one.rng[0] == other.rng[0]
                work = (
                    "the same samples and layers and other seeds" if shared else "other samples or layers and one seed"
                )
                return Check("random numbers", False, f"ranks {b} and {a} have {work}", "exact")
        if one.reuses_seeds:
            return Check("random numbers", False, f"rank {a} has one seed for several micro-batches", "exact")
    return Check(
        "random numbers", True, "ranks with the same samples have the same seeds, and others have not", "exact"
    )


def _equal_scalars(name: str, expected: list[float], by_rank: list[list[float]], bound: float) -> Check:
    worst, detail = 0.0, "equal on all ranks"
    for rank, values in enumerate(by_rank):
        for step, (a, b) in enumerate(zip(expected, values, strict=True)):
            error = abs(a - b) / max(abs(a), 1e-12) if isfinite(a) and isfinite(b) else inf
            if error > worst:
                worst, detail = error, f"{b:.7g} on rank {rank} at step {step + 1}, {a:.7g} on one device"
    return Check(name, worst <= bound, f"largest relative difference {worst:.1e}: {detail}")


def _metrics(reference: Trace, ranks: list[Trace], precision: str) -> list[Check]:
    """Compares the recipe's metrics, in fp32 alone: in half precision rounding decides which class is the first."""
    if precision != "fp32":
        return []
    checks = []
    for name in sorted({*reference.metrics, *(name for rank in ranks for name in rank.metrics)}):
        by_rank = [rank.metrics.get(name, []) for rank in ranks]
        expected = reference.metrics.get(name, [])
        if any(len(values) != len(expected) for values in by_rank):
            checks.append(Check(f"metric {name}", False, "it was measured in other steps than on one device"))
            continue
        # The mean of nothing is NaN, on one device too.
        steps = [i for i, a in enumerate(expected) if not (isnan(a) and all(isnan(values[i]) for values in by_rank))]
        compared = [[values[i] for i in steps] for values in (expected, *by_rank)]
        checks.append(_equal_scalars(f"metric {name}", compared[0], compared[1:], BOUNDS[precision].gradient))
    return checks


def _clipping(reference: Trace, ranks: list[Trace]) -> Check:
    """Checks that clipping was in force at the first step: a norm below the limit would prove nothing about it."""
    first = min((trace.grad_norms[0] for trace in (reference, *ranks) if trace.grad_norms), default=0.0)
    if not reference.max_norm:
        return Check("clipping", True, "the gradient of the first step is 0, so there is nothing to clip")
    detail = f"the gradient norm of the first step, {first:.7g}, is clipped to {reference.max_norm:.7g}"
    return Check("clipping", first > reference.max_norm, detail)


def _gradients(name: str, expected: dict[str, Tensor], got: dict[str, Tensor], bounds: Bounds) -> Check:
    if missing := expected.keys() ^ got.keys():
        return Check(name, False, f"{sorted(missing)[0]} has a gradient in only one of the two")
    whole = norm(expected)
    for key, tensor in expected.items():
        if bool(tensor.any()) != bool(got[key].any()) and (tensor - got[key]).norm() > MISSING * whole:
            return Check(name, False, f"{key} has a gradient of 0 in only one of the two")
    floor = bounds.floor * whole
    allowed = {key: bounds.gradient * tensor.norm().item() + floor for key, tensor in expected.items()}
    check = _within(name, expected, got, allowed)
    return check if check.passed else replace(check, detail=check.detail + _constant_factor(expected, got))


def _constant_factor(expected: dict[str, Tensor], got: dict[str, Tensor]) -> str:
    """Returns a hint if all gradients are wrong by the same factor, a typical mistake that Adam would hide."""
    scale = sum((expected[key] * got[key]).sum().item() for key in expected) / max(norm(expected) ** 2, 1e-30)
    if norm({key: got[key] - scale * expected[key] for key in expected}) > 1e-4 * norm(got):
        return ""
    return (
        f"; all gradients are {scale:.4g} times those of one device: a constant factor is missing, as if the recipe's "
        "loss were a mean and not the sum over the batch, or its count did not fit the loss"
    )


def _weights(
    name: str, reference: Trace, first: Trace, expected: dict[str, Tensor], got: dict[str, Tensor], bounds: Bounds
) -> Check:
    """Compares weights after some steps, without the rows whose gradient is rounding only."""
    relative = bounds.sgd_weights if name == "weights, SGD" else bounds.adamw_weights
    negligible = 1e-6 * norm(reference.gradients)
    kept = {key: _well_known_rows(key, reference, first, relative, negligible) for key in reference.gradients}
    expected, got, start = (
        {key: _rows(tensors[key])[rows] for key, rows in kept.items()} for tensors in (expected, got, reference.start)
    )
    allowed = {
        key: relative * (expected[key] - start[key]).norm().item() + bounds.floor * expected[key].norm().item()
        for key in kept
    }
    check = _within(name, expected, got, allowed)
    left_out = sum(int((~rows).sum()) for rows in kept.values())
    return replace(check, detail=f"{check.detail}; {left_out} rows left out" if left_out else check.detail)


def _well_known_rows(key: str, reference: Trace, first: Trace, relative: float, negligible: float) -> Tensor:
    """Returns the mask of the rows of a parameter whose gradient is more than rounding, and so their movement too.

    AdamW divides a gradient by its size, so it turns rounding errors into steps of full size. The gradient of a key's
    bias is nothing else, and where queries, keys and values have one bias it is a part of a tensor. A row is left out
    if its gradient is below its share of `negligible`, the norm of a whole tensor, or so near to its share of what the
    two gradients of this tensor differ by that its movement cannot be known to within `relative`. Whether gradients
    differ too much is judged elsewhere.
    """
    mask = torch.ones(len(_rows(reference.gradients[key])), dtype=torch.bool)
    for ours, theirs in (
        (reference.gradients, first.gradients),
        (reference.later_gradients, first.later_gradients),
    ):
        if key not in ours or key not in theirs:
            continue
        gradient, difference = ours[key], ours[key] - theirs[key]
        per_row, share = _rows(gradient).norm(dim=1), 1 / max(1, len(mask)) ** 0.5
        unused = (per_row == 0) & (_rows(theirs[key]).norm(dim=1) == 0)
        mask &= unused | ((per_row > share * negligible) & (per_row * relative >= share * difference.norm()))
    return mask


def _rows(tensor: Tensor) -> Tensor:
    """Returns a tensor as rows: those of its first dimension, or its elements if it has no other."""
    return tensor.reshape(-1, 1) if tensor.ndim < 2 else tensor.flatten(1)


def _untrained(reference: Trace, first: Trace, bounds: Bounds) -> Check:
    """Compares buffers, and parameters without a gradient in the first step, after the steps with SGD.

    What one device has not changed must be bit-equal. Other values may differ like weights, and by the precision of
    numbers around 1: the mean of an activation may be zero except for rounding.
    """
    names = reference.sgd_weights.keys() - reference.gradients.keys()
    if different := names - first.sgd_weights.keys():
        return Check("buffers", False, f"{min(different)} is missing")
    expected, got, allowed = {}, {}, {}
    for name in names:
        before, after = reference.start[name], reference.sgd_weights[name]
        expected[name], got[name] = after.double(), first.sgd_weights[name].double()
        moved = 0.0 if torch.equal(before, after) or not after.is_floating_point() else _distance(after, before)
        rounding = bounds.floor * (after.norm().item() + after.numel() ** 0.5) if moved else 0.0
        allowed[name] = bounds.sgd_weights * moved + rounding
    check = _within("buffers", expected, got, allowed)
    if check.passed:
        return replace(check, detail=check.detail if names else "the model has none")
    hint = "; if it depends on the samples of a batch, each rank has changed it by its own, and rank 0's value is kept"
    return replace(check, detail=check.detail + hint)


def _hook_tensors(reference: Trace, first: Trace, bounds: Bounds) -> list[Check]:
    """Compares what callbacks keep, such as an average of the weights, if they keep anything."""
    expected, got = reference.hook_tensors, first.hook_tensors
    if not expected and not got:
        return []
    if missing := expected.keys() ^ got.keys():
        return [Check("callbacks", False, f"{min(missing)} is kept in only one of the two")]
    allowed = {}
    for key, tensor in expected.items():
        start = reference.start.get(key.split("/", 2)[-1])
        moved = _distance(tensor, start) if start is not None and start.shape == tensor.shape else 0.0
        allowed[key] = bounds.sgd_weights * moved + bounds.floor * tensor.double().norm().item()
    return [_within("callbacks", expected, got, allowed)]


def _distance(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).norm().item()


def _updates(reference: Trace, ranks: list[Trace]) -> list[Check]:
    """Checks the update by itself: from weights and gradients of one device, and again after loading a state."""
    return [check for name in reference.updates for check in _updates_of(name, reference, ranks)]


def _updates_of(optimizer: str, reference: Trace, ranks: list[Trace]) -> list[Check]:
    """Checks the updates of one optimizer. The names of its checks end with its name, which is empty for AdamW."""
    suffix = f", {optimizer}" if optimizer else ""
    trained, one = reference.gradients, reference.updates[optimizer]
    by_rank = [rank.updates[optimizer] for rank in ranks]
    first = by_rank[0]
    norms = _equal_scalars(f"update norm{suffix}", one.norms, [updates.norms for updates in by_rank], UPDATE_BOUND)
    if missing := one.moments.keys() ^ first.moments.keys():
        state = Check(f"optimizer state{suffix}", False, f"{sorted(missing)[0]} is kept in only one of the two")
    else:
        allowed = {key: UPDATE_BOUND * moment.double().norm().item() + 1e-30 for key, moment in one.moments.items()}
        state = _within(f"optimizer state{suffix}", one.moments, first.moments, allowed)
    updates = {
        f"update alone{suffix}": (reference.start, one.updated, first.updated),
        f"resumed update{suffix}": (one.updated, one.resumed, first.resumed),
    }
    skips = "an update with an infinite gradient is {}skipped".format("" if first.skips_infinite else "NOT ")
    checks = [norms, Check(f"skipping{suffix}", first.skips_infinite, skips)]
    for name, (before, expected, got) in updates.items():
        allowed = {
            key: BF16_UPDATES.get(optimizer, UPDATE_BOUND) * (expected[key] - before[key]).norm().item()
            + 2 * torch.finfo(expected[key].dtype).eps * expected[key].norm().item()
            for key in trained
        }
        checks.append(_within(name, expected, got, allowed))
    return [replace(check, kind="exact") for check in (*checks, state)]


def _rounded_updates(reference: Trace, ranks: list[Trace]) -> list[Check]:
    """Checks the update of weights in bf16 by itself, if the config asks for them.

    All layouts round an element with the same random bits. So an element differs only if the last bit of fp32, in which
    the norms of two layouts may differ, decides how it is rounded; then it differs by one step of bf16, of its size
    before or after the update.
    """
    one, first = reference.rounded_updates, ranks[0].rounded_updates
    if one is None or first is None:
        return []
    checks = []
    for name, before, expected, got in (
        ("update in bf16", reference.start, one.updated, first.updated),
        ("resumed update in bf16", one.updated, one.resumed, first.resumed),
        ("optimizer state in bf16", one.moments, one.moments, first.moments),
    ):
        if missing := expected.keys() ^ got.keys():
            checks.append(Check(name, False, f"{min(missing)} is in only one of the two"))
            continue
        total = different = too_far = 0
        for key in expected:
            a, b, size = expected[key].double(), got[key].double(), before[key].double().abs()
            total, different = total + a.numel(), different + int((a != b).sum())
            too_far += int(((a - b).abs() > BF16_STEP * torch.maximum(a.abs(), size)).sum())
        detail = f"{different} of {total} elements differ" + f", {too_far} by more than one step" * bool(too_far)
        checks.append(Check(name, not too_far and different <= max(2, ROUNDED_OTHERWISE * total), detail))
    skips = f"an update with an infinite gradient is {'' if first.skips_infinite else 'NOT '}skipped"
    checks.append(Check("skipping in bf16", first.skips_infinite, skips))
    return [replace(check, kind="exact") for check in checks]


def _within(name: str, expected: dict[str, Tensor], got: dict[str, Tensor], allowed: dict[str, float]) -> Check:
    """Checks that no tensor differs by more than `allowed`, and names the worst one."""
    errors = {
        key: (expected[key] - got[key]).double().norm().item() / max(bound, 1e-30) for key, bound in allowed.items()
    }
    worst = max(errors, key=lambda key: inf if isnan(errors[key]) else errors[key], default="-")
    error = errors.get(worst, 0.0)
    return Check(name, error <= 1, f"{error:.2g} × the allowed difference, worst tensor {worst}")


def _work(reference: Trace, ranks: list[Trace], expected: ExpectedWork) -> list[Check]:
    """Checks that the ranks share the work. Equal results are not enough: every rank could compute everything."""
    rows = (
        ("parameter bytes", "parameter_bytes", expected.parameter_bytes, 0.01),
        ("optimizer bytes", "state_bytes", expected.state_bytes, 0.01),
        ("matmul FLOPs", "flops", expected.flops, 0.05 * (expected.flops or 0)),
    )
    checks = _packed(ranks) + _compiled(ranks)
    for name, attribute, fraction, tolerance in rows:
        if fraction is not None:
            measured = max(getattr(rank, attribute) for rank in ranks) / max(getattr(reference, attribute), 1)
            detail = f"{measured:.2f} of one device on the rank with the most, expected at most {fraction:.2f}"
            checks.append(Check(name, measured <= fraction + tolerance, detail, "work"))
    return checks


def packed_as_bytes(trace: Trace) -> Trace:
    """Returns the trace with the tensors of quantised layers as bytes. They may be kept in a floating-point dtype, in
    which some bytes are not numbers, and so not equal to themselves."""
    names = {f"{layer}.{part}" for layer in trace.packed for part in PARTS}

    def as_bytes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: t.view(torch.uint8) if name in names else t for name, t in tensors.items()}

    return replace(trace, start=as_bytes(trace.start), sgd_weights=as_bytes(trace.sgd_weights)) if names else trace


def _packed(ranks: list[Trace]) -> list[Check]:
    """Checks that the weights of quantised layers, if there are some, have as few bits as their scheme says."""
    layers = {name: sizes for rank in ranks for name, sizes in rank.packed.items()}
    if not layers:
        return []
    wrong = [name for name, (nbytes, weights, bits) in layers.items() if nbytes * 8 > weights * bits + 64]
    bits = 8 * sum(nbytes for nbytes, _, _ in layers.values()) / sum(weights for _, weights, _ in layers.values())
    worst = f", too many in {wrong[0]}" if wrong else ""
    detail = f"{len(layers)} layers with {bits:.2f} bits a weight, besides their scales{worst}"
    return [Check("quantised weights", not wrong, detail, "work")]


def _compiled(ranks: list[Trace]) -> list[Check]:
    """Checks that blocks are compiled, if they are to be."""
    works = [rank.compiled for rank in ranks if rank.compiled is not None]
    if not works:
        return []
    eager_calls, graphs, breaks = max(w.eager_calls for w in works), min(w.graphs for w in works), works[0].breaks
    if eager_calls:
        detail = f"{eager_calls} calls of blocks ran uncompiled on the rank with the most"
    elif not graphs:
        detail = "nothing was compiled on the rank with the least"
    else:
        detail = (
            f"{graphs} graph{'s' * (graphs != 1)}, {breaks or 'no'} break{'s' * (breaks != 1)}; not compiled where "
        )
        detail += "operations are counted"
    return [Check("compiled blocks", graphs > 0 and not eager_calls, detail, "work")]


def _collectives(reference: Trace, ranks: list[Trace], expected: ExpectedWork) -> Check:
    gradient_bytes = max(sum(tensor.nbytes for tensor in reference.gradients.values()), 1)
    negligible = 0.02 + 4096 / gradient_bytes  # counts, losses and flags are sent too
    kinds = {kind for rank in ranks for kind in rank.collective_bytes}
    details, passed = [], True
    for kind in sorted(kinds | {kind for kind, allowed in expected.collectives.items() if allowed.low}):
        sent = max(rank.collective_bytes.get(kind, 0) for rank in ranks) / gradient_bytes
        name, allowed = PLAIN_NAMES.get(kind, kind), expected.collectives.get(kind, Range(0, 0))
        if allowed.high == inf:
            passed = passed and sent >= allowed.low
            details.append(f"{name} {sent:.2f} (depends on the batch)")
        elif sent > negligible or allowed.high:
            tolerance = negligible + 0.02 * allowed.high
            passed = passed and allowed.low - tolerance <= sent <= allowed.high + tolerance
            details.append(f"{name} {sent:.2f} (expected {allowed})")
    unit = "bytes sent per step, relative to the bytes of all trained parameters: "
    return Check("collectives", passed, unit + "; ".join(details) if details else "none", "work")
