"""The one exception that means "the user can fix this"."""

from __future__ import annotations

from unicodedata import category


class UserError(Exception):
    """A mistake in what the user gave us, told in one line: the key, the value, what would be right.

    The command line prints it without a traceback and exits with code 2.
    """


def one_line(error: object, limit: int = 300) -> str:
    """Returns what an error says, on one line of at most `limit` characters that are safe to print."""
    return printable(" ".join(str(error).split()))[:limit] or type(error).__name__


def printable(text: str, keep: str = "") -> str:
    """Returns a text in which characters that could forge a line of a log, or command a terminal, are escaped.

    Names of files, runs and metrics, and messages of exceptions, come from outside. `keep` has characters to leave,
    such as the ends of lines of a text that has several.
    """
    if text.isprintable():
        return text
    safe = (c.isprintable() or c in keep or category(c) == "Zs" for c in text)  # Zs: spaces of all widths
    return "".join(c if is_safe else ascii(c)[1:-1] for c, is_safe in zip(text, safe, strict=True))
