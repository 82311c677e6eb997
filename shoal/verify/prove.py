"""The equality prover: one config, several layouts, the same training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from shoal.config import Run, derive_batches
from shoal.config.mesh import data_size
from shoal.errors import UserError
from shoal.launch.spawn import run_function
from shoal.verify.compare import Check, compare
from shoal.verify.layouts import (
    LAYOUTS,
    OWN,
    Candidate,
    candidate_run,
    layout_on,
    own_candidate,
    reference_run,
    why_not,
)
from shoal.verify.promises import Case, promise_of
from shoal.verify.trace import Trace, trace

Runner = Callable[[Run, int, int, dict[str, Tensor] | None], list[Trace]]
"""(run, processes, steps, shared weights) → each rank's account."""


@dataclass(frozen=True)
class Verdict:
    """What was found out about one layout."""

    layout: str
    procs: int
    checks: list[Check]
    mixing: list[str]
    """Modules that mix samples, such as BatchNorm: with them no two layouts compute the same."""
    own: str | None = None
    """The layout in the config's words, if it is the one that the config asks for."""

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed, "own": self.own is not None}


def in_new_processes(run: Run, procs: int, steps: int, shared: dict[str, Tensor] | None) -> list[Trace]:
    return run_function(trace, (run, steps, shared), procs, "spawn")


def prove(
    run: Run,
    procs: int = 2,
    layouts: list[str] | None = None,
    steps: int = 3,
    runner: Runner = in_new_processes,
    told: Callable[[Verdict], None] = lambda verdict: None,
    warn: Callable[[str], None] = lambda line: None,
) -> list[Verdict]:
    """Compares each layout with one device; `told` hears of each verdict as it comes.

    Unless `layouts` are named these are all that fit, and the config's own; `warn` hears why that is missing.
    """
    if steps < 2 or procs < 2:
        raise UserError(f"--steps {steps} --procs {procs}: a proof takes at least two of each")
    own, missing = _find_own(run, procs)
    chosen = _choose(layouts, own, missing, run, procs)
    if not layouts and missing:
        warn(f"this config's own layout is not among those that are proved: {missing}")
    (reference,) = runner(reference_run(run, procs), 1, steps, None)
    verdicts = []
    for candidate in chosen:
        its_run = candidate_run(run, candidate, procs)
        layout = layout_on(its_run, procs)
        traces = runner(its_run, layout.world_size, steps, reference.sgd_weights)
        batches = derive_batches(its_run.config.training, data_size(layout.mesh))[0]
        promise = promise_of(Case(layout, batches, reference.shapes, reference.gradients))
        checks = compare(reference, traces, promise, layout.precision)
        words = own.about if own and own.name == candidate.name else None
        verdicts.append(Verdict(candidate.name, layout.world_size, checks, reference.mixing, words))
        told(verdicts[-1])
    return verdicts


def _find_own(run: Run, procs: int) -> tuple[Candidate | None, str | None]:
    """The config's own layout, and why it cannot be proved, if so."""
    try:
        own = own_candidate(run, procs)
    except UserError as error:
        wanted = run.config.launch.processes
        return None, f"{error}" + (f"; try --procs {wanted}" if wanted not in (1, procs) else "")
    return own, why_not(run, own, procs)


def _choose(
    names: list[str] | None, own: Candidate | None, missing: str | None, run: Run, procs: int
) -> list[Candidate]:
    """Those named, or else all that can run; `missing` is why the config's own cannot."""
    if not names:
        rows = {**LAYOUTS, **({own.name: own} if own else {})}
        return [row for row in rows.values() if not why_not(run, row, procs)]
    chosen = []
    for name in names:
        if name not in (*LAYOUTS, OWN):
            raise UserError(f"--strategies {name!r} is not one of {', '.join((*LAYOUTS, OWN))}")
        row = own if name == OWN else LAYOUTS[name]
        reason = missing if name == OWN else why_not(run, LAYOUTS[name], procs)
        if row is None or reason:
            raise UserError(f"--strategies {name}: {reason}")
        chosen.append(row)
    return chosen
