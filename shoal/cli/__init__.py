"""The command line: one file for each command."""

from shoal.cli.main import main

__all__ = ["main"]
