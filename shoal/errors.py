"""The one exception that means "the user can fix this"."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """A mistake that the user can correct. The message is one line: the key, the value, and what to do.

    The command line prints it without a traceback and exits with code 2.
    """


def one_line(error: object, limit: int = 300) -> str:
    """Returns what an error says, on one line of at most `limit` characters."""
    return printable(" ".join(str(error).split()))[:limit] or type(error).__name__


def printable(text: str) -> str:
    """Returns text without control characters: names in files are not trusted and must not reach the terminal as
    commands."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


@contextmanager
def as_user_error(message: str, *errors: type[Exception]) -> Iterator[None]:
    """Turns these errors into a UserError: the message, a colon, and what the error says on one line.

    Of an OSError only the reason is repeated, because the message names the file.
    """
    try:
        yield
    except errors as error:
        raise UserError(f"{message}: {getattr(error, 'strerror', None) or one_line(error)}") from None
