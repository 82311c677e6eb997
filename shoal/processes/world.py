"""The place of this process among all processes of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Addresses at which a machine reaches itself alone."""


@dataclass(frozen=True)
class World:
    """Which of the processes of a run this one is, and where they meet. `World()` is a run of one process.

    `shoal.processes.detect` finds it once, at the start; whoever needs it is handed it.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """The number of this process among those of its machine."""
    local_size: int = 1
    """The number of processes on this machine."""
    address: str = ""
    """Host name or IP address of the machine that keeps the board (see `shoal.processes.board`)."""
    port: int = 0
    launcher_keeps_board: bool = False
    """True if the launcher has opened the board, so that rank 0 must not."""
    job: str = ""
    """A name that stays the same when a launcher starts the run again; empty if no launcher would."""
    run_id: str = ""
    """The launcher's name for this start of the run. All ranks have the same one."""
    attempt: tuple[int, int, int] = (0, 0, 0)
    """How often the run was started again: by SLURM, by shoal's launcher, by torchrun."""
    launcher_pid: int | None = None
    """The process id of shoal's launcher, if that started this process."""
    group: Literal["to make", "made", "imagined"] = "to make"
    """The default process group: `made` by somebody else, or `imagined` by a planner on torch's fake backend."""
    found_by: str = "this process alone"
    """What the world was found from, for reports."""

    @property
    def node(self) -> int:
        """The number of this machine."""
        return self.rank // self.local_size

    @property
    def on_one_machine(self) -> bool:
        """True if no other machine takes part.

        Both conditions are needed: some clusters tell the first of several machines that it is itself `localhost`.
        """
        return self.size == self.local_size and self.address in LOOPBACK

    @property
    def was_restarted(self) -> bool:
        """True if a launcher started this process because an earlier attempt of the same job had ended."""
        return any(self.attempt)

    @property
    def attempt_name(self) -> str:
        """A name that all ranks of this attempt share, and no other attempt has."""
        return f"{self.run_id}, start {self.attempt[-1]}"
