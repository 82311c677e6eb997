"""The places where `shoal launch` can start a run, one module each.

A module has `submit(run, launch, dry_run) -> int`. It starts or submits the run and returns the exit code for the
user's shell; with `dry_run` it only prints what it would submit.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from shoal.config import Run

TARGETS = {"local": "shoal.launch.targets.local"}
"""The module of each `launch.target`."""


@dataclass(frozen=True)
class Launch:
    """What the user has typed after `shoal launch`."""

    config: Path
    """The config file of the run."""
    overrides: tuple[str, ...] = ()
    """The values that replace those of the file, such as `training.max_steps=50`; options such as `--nodes` are among
    them, as `launch.nodes=2`."""

    @property
    def command(self) -> list[str]:
        """The words after `shoal` that train the same run: every process or machine of a target runs them."""
        return ["train", str(self.config), *self.overrides]


class Target(Protocol):
    """What the module of a target has."""

    def submit(self, run: Run, launch: Launch, dry_run: bool) -> int: ...


def open_target(name: str) -> Target:
    """Returns the module of a target."""
    return cast(Target, import_module(TARGETS[name]))
