"""Proves that several layouts of one config compute the same training as one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch

from shoal.config import Run, derive_batches
from shoal.config.mesh import data_size
from shoal.errors import UserError, one_line
from shoal.launch.spawn import run_function
from shoal.verify.compare import BOUNDS, Check, compare
from shoal.verify.exchange import (
    EXCHANGE,
    local_sgd_checks,
    lossless_checks,
    lossless_exchange,
    own_checks,
    own_exchange,
    says_exchange,
    without_exchange,
)
from shoal.verify.expected_work import Case, ExpectedWork, expected_work
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
from shoal.verify.trace import AVERAGES, Shared, Trace, trace, with_fp32_weights

Runner = Callable[[Run, int, int, Shared | None, bool], list[Trace]]
"""(run, number of processes, steps, what one device computed, in float64) → the trace of each rank."""


Outcome = Literal["same", "lossy", "other work", "not comparable", "different", "left out"]


@dataclass(frozen=True)
class Verdict:
    """The result of the checks of one layout."""

    layout: str
    procs: int
    checks: list[Check]
    mixing: list[str]
    """Modules that mix the samples of a batch, such as BatchNorm; with them no two layouts compute the same."""
    draws: list[str] = field(default_factory=list)
    """Modules that draw random numbers although dropout is off; every layout draws others."""
    own_layout: str | None = None
    """The description of the config's own layout, if this is that layout."""
    left_out: str = ""
    """The reason why the layout refused this model, if it did."""
    frozen_statistics: list[str] = field(default_factory=list)
    """Batch norms whose statistics were frozen for the proof."""
    float64: str = ""
    """What came of the proof in float64, if fp32 had found a difference."""
    lossy: str = ""
    """The method by which ranks exchange something else than gradients as they are, if this row is about it."""

    @property
    def outcome(self) -> Outcome:
        """The result in one word. Equal numbers and the promised work are judged separately."""
        failed = {check.kind for check in self.checks if not check.passed}
        if self.left_out:
            return "left out"
        if "exact" in failed or ("values" in failed and not (self.mixing or self.draws)):
            return "different"
        if "values" in failed:
            return "not comparable"
        if failed:
            return "other work"
        return "lossy" if self.lossy else "same"

    @property
    def passed(self) -> bool:
        return self.outcome in ("same", "lossy")

    def as_dict(self) -> dict[str, Any]:
        """Returns the verdict as plain data, for JSON."""
        return {
            **asdict(self),
            "outcome": self.outcome,
            "passed": self.passed,
            "own": self.own_layout is not None,
        }


def exit_code(verdicts: Sequence[Verdict], asked_by_name: bool) -> int:
    """Returns the exit code of `shoal verify`: 1 if a layout is not the same, 2 if a layout that was asked for by name
    refused, 3 if something else keeps a layout from being proved, 0 if all are proved."""
    outcomes = {verdict.outcome for verdict in verdicts}
    if "different" in outcomes:
        return 1
    if "left out" in outcomes and asked_by_name:
        return 2
    proved = {"same", "lossy"}
    return 0 if outcomes & proved and outcomes <= {*proved, "left out"} else 3


def in_new_processes(run: Run, procs: int, steps: int, shared: Shared | None, in_float64: bool) -> list[Trace]:
    """Trains in `procs` new processes and returns the trace of each rank."""
    return run_function(trace, (run, steps, shared, True, in_float64), procs, "spawn")


def prove(
    run: Run,
    procs: int = 2,
    layouts: list[str] | None = None,
    steps: int = 3,
    runner: Runner = in_new_processes,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
    on_warning: Callable[[str], None] = lambda line: None,
    on_start: Callable[[str], None] = lambda what: None,
) -> list[Verdict]:
    """Compares layouts with one device: those in `layouts`, or all that fit the config and the config's own.

    Calls `on_start` with what is trained next, `on_verdict` after each layout, and `on_warning` if the config's own
    layout cannot be proved. A layout that refuses the model when it is built or trained gets a verdict with the reason.
    """
    if steps < 2 or procs < 2:
        raise UserError(f"--steps {steps} --procs {procs}: both must be at least 2")
    original, method = run, says_exchange(run)
    if method:
        run = without_exchange(run)  # all layouts but one row are proved with gradients as they are
    own, why_own_missing = _find_own(run, procs)
    chosen = _choose(layouts, own, why_own_missing, run, procs, method)
    if not layouts and why_own_missing:
        on_warning(f"this config's own layout is not proved: {why_own_missing}")
    precision = run.config.training.mixed_precision
    if precision != "fp32":
        on_warning(
            f"one device and all layouts compute in {precision}, and are compared with the bounds of {precision}"
        )
    if run.config.training.cuda_graphs and not torch.cuda.is_available():
        on_warning("training.cuda_graphs is not in force without a GPU, so recordings are not part of the proof")
    if left_out := [choice.name for choice in run.callbacks if choice.name.partition(".")[0] not in AVERAGES]:
        on_warning(f"not part of the proof: the callbacks {', '.join(left_out)}")
    on_start("one device")
    (reference,) = runner(reference_run(run, procs), 1, steps, None, False)
    shared, float64 = reference.shared(), _Float64(runner, run, procs, steps)
    verdicts = []
    for number, candidate in enumerate(chosen, 1):
        new_run = candidate_run(run, candidate, procs)
        layout = layout_on(with_fp32_weights(new_run), procs)
        own_layout = own.description if own and own.name == candidate.name else None
        on_start(f"{candidate.name}, layout {number} of {len(chosen)}")
        try:
            traces = runner(new_run, layout.world_size, steps, shared, False)
        except UserError as refusal:  # the other layouts can still be proved
            verdicts.append(Verdict(candidate.name, layout.world_size, [], [], [], own_layout, str(refusal)))
            on_verdict(verdicts[-1])
            continue
        batches = derive_batches(new_run.config.training, data_size(layout.mesh))[0]
        has_objectives = bool(run.recipe_type(run.recipe_config).objectives())
        case = Case(
            layout,
            batches,
            reference.shapes,
            reference.gradients,
            reference.itemsizes,
            reference.multiplies_weights,
            has_objectives,
        )
        expected = expected_work(case)
        checks = compare(reference, traces, expected, layout.precision)
        why_float64 = ""
        if layout.precision == "fp32" and float64.may_decide(checks, reference, traces):
            on_start(f"{candidate.name} in float64, because it differs in fp32")
            checks, why_float64 = float64.repeat(checks, new_run, layout.world_size, expected)
        verdicts.append(
            Verdict(
                candidate.name,
                layout.world_size,
                checks,
                reference.mixing,
                reference.draws,
                own_layout,
                frozen_statistics=reference.frozen_statistics,
                float64=why_float64,
            )
        )
        on_verdict(verdicts[-1])
    if method and own is not None and not why_own_missing and (not layouts or EXCHANGE in layouts):
        on_start(EXCHANGE)
        verdicts.append(_prove_exchange(run, original, own, procs, steps, runner, reference))
        on_verdict(verdicts[-1])
    return verdicts


class _Float64:
    """Repeats a proof in float64 if the numbers differ in fp32, to tell rounding errors from a layout that is wrong."""

    def __init__(self, runner: Runner, run: Run, procs: int, steps: int):
        self._runner, self._run, self._procs, self._steps = runner, run, procs, steps
        self._reference: Trace | None = None

    def may_decide(self, checks: list[Check], reference: Trace, traces: list[Trace]) -> bool:
        """Returns whether a number differs in fp32 that could be equal, the model can be cast, and rounding can explain
        it: a gradient may jump where the model does not, so the losses of the first step have to agree in fp32."""
        differs = any(check.kind == "values" and not check.passed for check in checks)
        mixes = reference.mixing and not self._run.config.training.sync_batch_norm
        if not differs or mixes or reference.draws or reference.packed:
            return False
        loss = reference.losses[0]
        return all(abs(trace.losses[0] - loss) <= BOUNDS["fp32"].gradient * abs(loss) for trace in traces)

    def repeat(self, checks: list[Check], run: Run, size: int, expected: ExpectedWork) -> tuple[list[Check], str]:
        """Returns the checks with those of values from float64, and what came of it in words.

        All else stays as fp32 found it, and so does everything if the model cannot compute in float64.
        """
        try:
            if self._reference is None:
                (self._reference,) = self._runner(reference_run(self._run, self._procs), 1, self._steps, None, True)
            traces = self._runner(run, size, self._steps, self._reference.shared(), True)
        except Exception as error:  # a model may do anything with a type that it does not expect
            return checks, f"in float64, which would show whether it is rounding, it fails: {one_line(error, 100)}"
        again = compare(self._reference, traces, expected, "fp32")
        in_fp32 = {check.name: f"; in fp32 {check.detail}" for check in checks if not check.passed}
        values = [
            replace(check, detail=f"in float64 {check.detail}{in_fp32.get(check.name, '')}")
            for check in again
            if check.kind == "values"
        ]
        checks = [*values, *(check for check in checks if check.kind != "values")]
        if not all(check.passed for check in values):
            return checks, "it differs in float64, too, so it is not rounding"
        return checks, "proved in float64: what differs in fp32 is rounding"


def _prove_exchange(
    run: Run, original: Run, own: Candidate, procs: int, steps: int, runner: Runner, reference: Trace
) -> Verdict:
    """Returns the verdict about the compression or local_sgd of a config; `run` is the config without it."""
    method, compression = says_exchange(original), original.config.distributed.compression
    plain, shared, checks = candidate_run(run, own, procs), reference.shared(), list[Check]()
    layout = layout_on(plain, procs)
    try:
        traces = runner(own_exchange(plain, original), layout.world_size, steps, shared, False)
        if method == "local_sgd":
            checks += local_sgd_checks(reference, traces)
        else:
            checks += own_checks(traces, compression)
            if (lossless := lossless_exchange(plain, original)) is not None:
                traces = runner(lossless, layout.world_size, steps, shared, False)
            batches = derive_batches(plain.config.training, data_size(layout.mesh))[0]
            multiplies = reference.multiplies_weights
            case = Case(layout, batches, reference.shapes, reference.gradients, multiplies_weights=multiplies)
            expected = expected_work(case)
            checks += lossless_checks(reference, traces, expected, method, layout.precision)
    except UserError as refusal:
        return Verdict(EXCHANGE, layout.world_size, [], [], [], None, str(refusal), lossy=method)
    return Verdict(
        EXCHANGE,
        layout.world_size,
        checks,
        reference.mixing,
        reference.draws,
        frozen_statistics=reference.frozen_statistics,
        lossy=method,
    )


def _find_own(run: Run, procs: int) -> tuple[Candidate | None, str | None]:
    """Returns the config's own layout, and the reason why it cannot be proved or None."""
    try:
        own = own_candidate(run, procs)
    except UserError as error:
        processes = run.config.launch.processes
        return None, f"{error}" + (f"; try --procs {processes}" if processes not in (1, procs) else "")
    return own, why_not(run, own, procs)


def _choose(
    names: list[str] | None,
    own: Candidate | None,
    why_own_missing: str | None,
    run: Run,
    procs: int,
    exchange: str = "",
) -> list[Candidate]:
    """Returns the candidates with these names, or all that can run; raises a UserError if a named one cannot.

    The row about the exchange is no candidate; it may be named if the config has one.
    """
    if not names:
        rows = {**LAYOUTS, **({own.name: own} if own else {})}
        return [row for row in rows.values() if not why_not(run, row, procs)]
    chosen = []
    for name in names:
        if name == EXCHANGE:
            if why_own_missing or not exchange:
                missing = why_own_missing or "the config sets neither distributed.compression nor local_sgd"
                raise UserError(f"--strategies {name}: {missing}")
            continue
        if name not in (*LAYOUTS, OWN):
            raise UserError(f"--strategies {name}: unknown layout; use one of {', '.join((*LAYOUTS, OWN, EXCHANGE))}")
        row, reason = (own, why_own_missing) if name == OWN else (LAYOUTS[name], why_not(run, LAYOUTS[name], procs))
        if row is None or reason:
            raise UserError(f"--strategies {name}: {reason}")
        chosen.append(row)
    return chosen


def why_not_comparable(verdict: Verdict) -> str:
    """Returns the reason why the numbers of two layouts cannot be the same for this model."""
    reasons = []
    if verdict.mixing:
        names = ", ".join(verdict.mixing)
        reasons.append(f"these modules mix the samples of a micro-batch, so layouts compute other numbers: {names}")
    if verdict.draws:
        first, others = verdict.draws[0], len(verdict.draws) - 1
        drew = f"{first} draws" if not others else f"{first} and {others} more draw"
        reasons.append(
            f"{drew} random numbers in the forward, and every layout draws others; turn that off for the proof, such "
            "as a dropout in the config"
        )
    return "; ".join(reasons)
