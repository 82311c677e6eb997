"""The equality prover: one config, several layouts, the same training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shoal.config import Run
from shoal.errors import UserError
from shoal.launch.functions import run_function
from shoal.verify.compare import Check, compare
from shoal.verify.layouts import LAYOUTS, layout_case, layout_run, reference_run
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
) -> list[Verdict]:
    """Compares each layout with one device; `told` hears of each verdict as it comes."""
    for name in layouts or ():
        if name not in LAYOUTS:
            raise UserError(f"--strategies {name!r} is not one of {', '.join(LAYOUTS)}")
        if reason := LAYOUTS[name].unfit(run, procs):
            raise UserError(f"--strategies {name}: {reason}")
    if steps < 2 or procs < 2:
        raise UserError(f"--steps {steps} --procs {procs}: a proof takes at least two of each")
    (reference,) = runner(reference_run(run, procs), 1, steps, None)
    verdicts = []
    for layout in (LAYOUTS[name] for name in layouts or LAYOUTS if not LAYOUTS[name].unfit(run, procs)):
        ranks = procs if layout.several else 1
        its_run = layout_run(run, layout, procs)
        traces = runner(its_run, ranks, steps, reference.sgd_weights)
        promise = layout.promise(layout_case(its_run, layout, ranks, reference.shapes, reference.gradients.keys()))
        precision = run.config.training.mixed_precision
        checks = compare(reference, traces, promise, precision)
        verdicts.append(Verdict(layout.name, ranks, checks, reference.mixing))
        told(verdicts[-1])
    return verdicts
