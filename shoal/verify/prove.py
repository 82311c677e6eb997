"""The equality prover: one config, several layouts, the same training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shoal.config import Run
from shoal.errors import UserError
from shoal.launch.spawn import run_function
from shoal.verify.compare import Check, compare
from shoal.verify.layouts import LAYOUTS, Layout, layout_case, layout_run, reference_run
from shoal.verify.own import OWN, own_layout
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
        checks = [{"name": c.name, "passed": c.passed, "detail": c.detail} for c in self.checks]
        return {
            "layout": self.layout,
            "procs": self.procs,
            "passed": self.passed,
            "checks": checks,
            "mixing": self.mixing,
            "own": self.own is not None,
        }


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
    own, why_not = _find_own(run, procs)
    chosen = _named(layouts, own, why_not, run, procs) if layouts else _fitting(own, run, procs)
    if not layouts and why_not:
        warn(f"this config's own layout is not among those that are proved: {why_not}")
    (reference,) = runner(reference_run(run, procs), 1, steps, None)
    verdicts = []
    for layout in chosen:
        ranks = procs if layout.several else 1
        its_run = layout_run(run, layout, procs)
        traces = runner(its_run, ranks, steps, reference.sgd_weights)
        promise = layout.promise(layout_case(its_run, layout, ranks, reference.shapes, reference.gradients.keys()))
        precision = run.config.training.mixed_precision
        checks = compare(reference, traces, promise, precision)
        words = own.about if own and own.name == layout.name else None
        verdicts.append(Verdict(layout.name, ranks, checks, reference.mixing, words))
        told(verdicts[-1])
    return verdicts


def _find_own(run: Run, procs: int) -> tuple[Layout | None, str | None]:
    """The config's own layout, and why it cannot be proved, if so."""
    try:
        own = own_layout(run, procs)
    except UserError as error:
        wanted = run.config.launch.processes
        return None, f"{error}" + (f"; try --procs {wanted}" if wanted not in (1, procs) else "")
    return own, own.unfit(run, procs)


def _fitting(own: Layout | None, run: Run, procs: int) -> list[Layout]:
    rows = {**LAYOUTS, **({own.name: own} if own else {})}
    return [layout for layout in rows.values() if not layout.unfit(run, procs)]


def _named(names: list[str], own: Layout | None, why_not: str | None, run: Run, procs: int) -> list[Layout]:
    rows = {**LAYOUTS, OWN: own}
    for name in names:
        if name not in rows:
            raise UserError(f"--strategies {name!r} is not one of {', '.join(rows)}")
        layout = rows[name]
        if reason := why_not if name == OWN or layout is None else layout.unfit(run, procs):
            raise UserError(f"--strategies {name}: {reason}")
    return [layout for layout in map(rows.get, names) if layout]
