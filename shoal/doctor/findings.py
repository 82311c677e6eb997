"""What a check returns, and the order in which findings are shown."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

from shoal.errors import UserError, one_line

Level = Literal["will break", "slow or surprising", "fine", "not checked"]
LEVELS: tuple[Level, ...] = ("will break", "slow or surprising", "not checked", "fine")
"""All levels, the worst first."""


@dataclass(frozen=True)
class Finding:
    """What one check has found."""

    level: Level
    check: str
    """The name of the check, which stays the same from version to version."""
    message: str
    """What was found, in one line."""
    fix: str = ""
    """What to do about it; empty if nothing has to be done."""
    source: str = ""
    """Where the fact is documented, for a row of the table of known-bad combinations."""
    host: str = ""
    """The name of the machine, if several were examined."""

    def as_dict(self) -> dict[str, str]:
        """Returns the finding as plain data, for JSON."""
        return asdict(self)


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """Returns the findings with the worst first, and otherwise in the order of the checks."""
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def exit_code(findings: Sequence[Finding]) -> int:
    """Returns the exit code of `shoal doctor`: 1 if something will break, else 0."""
    return int(any(finding.level == "will break" for finding in findings))


class TimeLimitReached(Exception):
    """A function has not returned in its time."""


Result = TypeVar("Result")


def within(limit_seconds: float, function: Callable[[], Result]) -> Result:
    """Calls a function in a thread of its own, and raises TimeLimitReached if it does not return in time.

    The thread is left behind then: a system call that hangs, for example on network storage, cannot be interrupted.
    """
    outcome: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()

    def call() -> None:
        try:
            outcome.put((function(), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=call, name="shoal doctor", daemon=True).start()
    try:
        result, error = outcome.get(timeout=limit_seconds)
    except queue.Empty:
        raise TimeLimitReached from None
    if error is not None:
        raise error
    return result


def run_check(check: str, limit_seconds: float, function: Callable[[], Sequence[Finding]]) -> list[Finding]:
    """Returns the findings of a check. A check that fails or takes too long is a finding itself, with the reason."""
    try:
        return list(within(limit_seconds, function))
    except TimeLimitReached:
        return [Finding("not checked", check, f"the check did not end within its limit of {limit_seconds:g} s")]
    except UserError as error:  # the run would end with the same line
        return [Finding("will break", check, *_split(one_line(error, limit=1000)))]
    except Exception as error:
        return [Finding("not checked", check, f"the check failed: {type(error).__name__}: {one_line(error)}")]


def _split(message: str) -> tuple[str, str]:
    """Returns what is wrong and what to do, which errors of shoal separate by a semicolon."""
    problem, _, fix = message.rpartition("; ")
    return (problem, fix) if problem else (message, "")
