"""The command line. Each command has a file."""

from shoal.cli.main import main

__all__ = ["main"]
