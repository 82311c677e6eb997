"""A command line whose `--help` shows no type for itself: it is a switch, and takes no value."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class _WithoutType:
    """Shows `--help` as other switches are shown, which say so by an empty `metavar`."""

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # type: ignore[misc]  # of the class beside this one
        if option is not None:
            option.metavar = ""
        return option


class Command(_WithoutType, TyperCommand):
    """A command of `shoal`."""


class Group(_WithoutType, TyperGroup):
    """`shoal` itself, or a command that has commands."""


class App(typer.Typer):
    """Commands of `shoal`, as `typer.Typer` takes them."""

    def __init__(self, **options: Any):
        super().__init__(cls=Group, **options)

    def command(self, name: str | None = None, **options: Any) -> Any:
        """Returns a decorator that adds a function as a command."""
        return super().command(name, cls=Command, **options)
