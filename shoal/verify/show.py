"""Prints the verdict on a layout."""

from __future__ import annotations

import sys

from rich.console import Console

from shoal.verify.prove import Verdict


def print_verdict(verdict: Verdict) -> None:
    """Prints a title and one line for each check; failed checks are red on a terminal."""
    console = Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)
    result = "same training as on one device" if verdict.passed else "NOT the same training as on one device"
    own_layout = f" (this config's own layout: {verdict.own_layout})" if verdict.own_layout else ""
    console.print(f"{verdict.layout} on {verdict.procs} process{'es' * (verdict.procs > 1)}: {result}{own_layout}")
    for check in verdict.checks:
        line = f"  {'ok' if check.passed else 'FAILED':6}  {check.name:15}  {check.detail}"
        console.print(line, style=None if check.passed else "red")
    if verdict.mixing and not verdict.passed:
        console.print(
            f"these modules mix the samples of a batch, so layouts cannot compute the same: {', '.join(verdict.mixing)}"
        )
