"""A verdict as a table."""

from __future__ import annotations

import sys

from rich.console import Console

from shoal.verify.prove import Verdict


def print_verdict(verdict: Verdict) -> None:
    console = Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)
    word = "same" if verdict.passed else "NOT the same"
    own = f" (this config's own layout: {verdict.own})" if verdict.own else ""
    console.print(f"{verdict.layout} on {verdict.procs} against one device: {word}{own}")
    for check in verdict.checks:
        line = f"  {'ok' if check.passed else 'FAILED':6}  {check.name:15}  {check.detail}"
        console.print(line, style=None if check.passed else "red")
    if verdict.mixing and not verdict.passed:
        console.print(f"these modules mix samples, so that no layout can repeat another: {', '.join(verdict.mixing)}")
