"""Which of the processes of a run this one is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""The addresses that only processes of the same machine can reach."""


@dataclass(frozen=True)
class World:
    """Which of the processes of a run this one is, and where they meet. `World()` is a run of one process.

    `shoal.processes.detect` finds it once, at the start, and it is passed to all code that needs it.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """The rank of this process among those of its machine."""
    local_size: int = 1
    """The number of processes on this machine."""
    address: str = ""
    """The host name or IP address of the machine that has the board (see `shoal.processes.board`)."""
    port: int = 0
    launcher_keeps_board: bool = False
    """True if the launcher has opened the board, so rank 0 must not open it."""
    job: str = ""
    """A name that stays the same when a launcher restarts the run; empty if no launcher would."""
    run_id: str = ""
    """The launcher's name for this start of the run, equal on all ranks."""
    attempt: tuple[int, int, int] = (0, 0, 0)
    """How often the run was restarted by SLURM, by shoal's launcher and by torchrun."""
    launcher_pid: int | None = None
    """The process id of shoal's launcher, or None if another launcher started this process."""
    environment: str = "no launcher"
    """What started this process, as `shoal.processes.environments` names it."""
    starts: int = 0
    """The number of processes that this process has to start on its machine; 0 if it is a rank itself.

    If it is not 0, `rank` and `size` count machines.
    """
    hosts: tuple[str, ...] = ()
    """The names of all machines in their order, if a scheduler has told them."""
    notes: tuple[str, ...] = ()
    """What the user should know about the environment, as warnings."""
    group: Literal["to make", "made", "imagined"] = "to make"
    """The state of the default process group.

    `to make`: shoal will make it. `made`: somebody else has. `imagined`: a planner made it with torch's fake backend,
    and the other ranks do not exist.
    """

    @property
    def node(self) -> int:
        """The index of this machine among the machines of the run."""
        return self.rank // self.local_size

    @property
    def on_one_machine(self) -> bool:
        """True if no other machine takes part.

        Both conditions are needed: on some clusters the first of several machines gets `localhost` as address.
        """
        return self.size == self.local_size and self.address in LOOPBACK

    @property
    def was_restarted(self) -> bool:
        """True if a launcher restarted this run after an earlier attempt had ended."""
        return any(self.attempt)

    @property
    def attempt_name(self) -> str:
        """A name that is equal on all ranks of an attempt and different for every attempt."""
        return f"{self.run_id}, start {self.attempt[-1]}"
