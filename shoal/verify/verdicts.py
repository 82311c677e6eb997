"""Prints verdicts: a table with one row for each layout, or all checks of a layout."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from rich.console import Console

from shoal.verify.prove import Outcome, Verdict, why_not_comparable

OUTCOMES: Mapping[Outcome, str] = {
    "same": "same training as on one device",
    "lossy": "not the same training as on one device, as this exchange means it; its own checks hold",
    "other work": "same training as on one device, but more or other work than promised",
    "not comparable": "cannot be compared with one device",
    "different": "NOT the same training as on one device",
    "left out": "left out",
}
"""How a verdict is printed with its checks."""

ANSWERS: Mapping[Outcome, tuple[str, str]] = {
    "same": ("yes", "yes"),
    "lossy": ("lossy", "yes"),
    "other work": ("yes", "NO"),
    "not comparable": ("cannot", "-"),
    "different": ("NO", "-"),
    "left out": ("cannot", "-"),
}
"""The answers in the table: is the training the same, and does the layout do its work?"""
_COLUMNS = (
    "same training: losses, gradients and weights equal those of one device, within rounding\n"
    "does its work: no rank computes, holds or sends more than its part; -v shows each check"
)
_ROW = "{:<18}  {:>9}  {:<13}  {:<13}  {}"


class Table:
    """Prints a row for each verdict as it comes, and the header before the first one."""

    def __init__(self) -> None:
        self._started = False

    def add(self, verdict: Verdict) -> None:
        """Prints the row of a verdict."""
        console = _console()
        if not self._started:
            self._started = True
            if verdict.frozen_statistics:
                console.print(say_frozen(verdict))
            console.print(_ROW.format("layout", "processes", "same training", "does its work", "").rstrip())
        same, work = ANSWERS[verdict.outcome]
        if verdict.outcome == "different" and not any(c.kind == "work" and not c.passed for c in verdict.checks):
            work = "yes"
        row = _ROW.format(verdict.layout, verdict.procs, same, work, _remark(verdict)).rstrip()
        console.print(row, style="red" if "NO" in (same, work) else None)

    def explain(self) -> None:
        """Prints what the columns mean."""
        _console().print(_COLUMNS)


class Waiting:
    """Shows on a terminal what is trained now, in a line that goes away."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()

    def show(self, what: str) -> None:
        """Shows that something is trained, in place of what was shown before."""
        self.hide()
        if self._is_shown:
            print(f"training: {what} …", end="", file=sys.stderr, flush=True)

    def hide(self) -> None:
        """Removes the line. Call it before anything else is printed."""
        if self._is_shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def print_verdict(verdict: Verdict) -> None:
    """Prints a title and one line for each check; failed checks are red on a terminal."""
    console = _console()
    result = OUTCOMES[verdict.outcome] + (f": {verdict.left_out}" if verdict.left_out else "")
    own = _own(verdict)
    console.print(f"{verdict.layout} on {verdict.procs} process{'es' * (verdict.procs > 1)}: {result}{own}")
    for check in verdict.checks:
        result, style = ("ok", None) if check.passed else ("FAILED", "red")
        console.print(f"  {result:6}  {check.name:15}  {check.detail}", style=style)
    if verdict.outcome == "not comparable":
        console.print(f"  {why_not_comparable(verdict)}")
    if verdict.float64:
        console.print(f"  {verdict.float64}")
    if verdict.frozen_statistics:
        console.print(f"  {say_frozen(verdict)}")


def say_frozen(verdict: Verdict) -> str:
    """Returns which batch norms the proof has changed, and what follows."""
    names = verdict.frozen_statistics
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"batch norms use frozen statistics for the proof ({shown}): in training each micro-batch has its own, so "
        "layouts with other micro-batches train otherwise"
    )


def _remark(verdict: Verdict) -> str:
    """Returns the reason if a layout is not proved, and whether it is the config's own."""
    failed = [check for check in verdict.checks if not check.passed]
    reason = why_not_comparable(verdict) if verdict.outcome == "not comparable" else verdict.left_out
    if failed:
        most_telling = next((check for check in failed if check.name == "gradients"), failed[0])
        detail = f"{most_telling.name}: {most_telling.detail}; -v shows all checks"
        reason = f"{reason} ({detail})" if reason else detail
    elif verdict.outcome == "lossy":
        reason = f"{verdict.lossy}: not the same training as on one device; its own checks hold"
    if verdict.float64:
        reason = f"{reason}; {verdict.float64}" if reason else verdict.float64
    return f"{reason}{_own(verdict)}".strip()


def _own(verdict: Verdict) -> str:
    return f" (this config's own layout: {verdict.own_layout})" if verdict.own_layout else ""


def _console() -> Console:
    return Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)
