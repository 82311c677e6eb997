"""A verdict as a table."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from shoal.verify.prove import Verdict


def print_verdict(verdict: Verdict) -> None:
    word = "same" if verdict.passed else "NOT the same"
    own = f" (this config's own layout: {verdict.own})" if verdict.own else ""
    title = f"{verdict.layout} on {verdict.procs} against one device: {word}{own}"
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("measured", overflow="fold")
    for check in verdict.checks:
        table.add_row(
            check.name, "ok" if check.passed else "FAILED", check.detail, style=None if check.passed else "red"
        )
    console = Console(file=sys.stdout, highlight=False, soft_wrap=not sys.stdout.isatty())
    console.print(table)
    if verdict.mixing and not verdict.passed:
        console.print(f"these modules mix samples, so that no layout can repeat another: {', '.join(verdict.mixing)}")
