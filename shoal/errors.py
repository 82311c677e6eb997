"""The one exception that means "the user can fix this"."""

from __future__ import annotations


class UserError(Exception):
    """A mistake in what the user gave us, told in one line: the key, the value, what would be right.

    The command line prints it without a traceback and exits with code 2.
    """


def one_line(error: object, limit: int = 300) -> str:
    """Returns what an error says, on one line of at most `limit` characters."""
    return " ".join(str(error).split())[:limit] or type(error).__name__
