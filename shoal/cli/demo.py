"""`shoal demo`: trains a small language model, to see shoal at work before anything is written for it."""

from __future__ import annotations

from shoal.cli.arguments import Debug, Overrides
from shoal.cli.train import train_config


def demo(overrides: Overrides = None, debug: Debug = False) -> None:
    """Train a small language model on this machine, to see how a run looks.

    It learns from the source code of Python's standard library, so nothing is downloaded, and takes about two minutes
    on a CPU. The run is written to runs/demo; run the command again and it resumes.
    """
    from shoal.config.shipped import shipped_config

    train_config(shipped_config("demo"), overrides or [], ["demo"])
