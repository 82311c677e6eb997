"""The one exception that means "the user can fix this"."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unicodedata import category


class UserError(Exception):
    """A mistake that the user can correct. The message is one line: the key, the value, and what to do.

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


@contextmanager
def as_user_error(message: str, *errors: type[Exception]) -> Iterator[None]:
    """Turns these errors into a UserError: the message, a colon, and what the error says on one line.

    Of an OSError only the reason is repeated, because the message names the file.
    """
    try:
        yield
    except errors as error:
        raise UserError(f"{message}: {getattr(error, 'strerror', None) or one_line(error)}") from None
