"""Finds out that some ranks do not take part in what all ranks have to call, before the others hang in a collective.

    if rank == 0:
        loop.save("out/last")      # under fsdp every rank holds a part: without the others this cannot be written

A rank that is slow and a rank that will never come look alike for a while. A rank that has left the run will certainly
not come. For the others there is a time limit, `JOIN_SECONDS`: ranks are together when a step ends, so between that and
a save they are apart by what each does alone. If rank 0 is the one that is missing, nobody can tell: it often does more
than the others (uploads, plots), so that it is waited for as long as collectives wait.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress

import torch.distributed as dist

from shoal.errors import UserError
from shoal.torch_private import default_store

WARN_SECONDS = 5.0
"""How long a call waits for other ranks before it prints whom it waits for."""
JOIN_SECONDS = 30.0
"""How long a call that rank 0 has made waits for other ranks."""
LOOK_SECONDS = 1.0
"""How often a call that waits looks which ranks are missing."""
_SHOWN_RANKS = 8


class RollCall:
    """Counts the ranks that have come to a call. All ranks make it, once, and then make their calls in one order."""

    def __init__(self, timeout_seconds: float):
        """All ranks of the default process group make one; its store is what they look at."""
        self._rank, self._size, self._timeout_seconds = dist.get_rank(), dist.get_world_size(), timeout_seconds
        store = default_store()
        number = store.add(f"roll calls made by rank {self._rank}", 1)  # so that no entry of an earlier one is read
        self._board = dist.PrefixStore(f"roll calls {number}", store)  # type: ignore[attr-defined]
        self._calls = 0

    def wait(self, call: str, reason: str = "") -> None:
        """Returns when all ranks have come here. Raises UserError with the ranks that are missing, if they are late.

        `call` and `reason` are for the message: such as `save(out/last)`, and why all ranks have to make the call.
        """
        self._calls += 1
        board, number = self._board, self._calls
        board.set(f"{number} by {self._rank}", "")
        if board.add(f"{number}", 1) == self._size:
            board.set(f"{number} by all", "")
        began, pause = time.monotonic(), 0.001
        limit_seconds, next_look, was_warned = self._timeout_seconds, LOOK_SECONDS, False
        while not board.check([f"{number} by all"]):
            time.sleep(pause)  # and not torch's `wait`, which would not let Python handle signals
            pause, waited = min(2 * pause, 0.25), time.monotonic() - began
            if waited < next_look:
                continue
            next_look = waited + LOOK_SECONDS
            missing = self._missing(number)  # asks once for each rank, so it is not done all the time
            if missing and 0 not in missing:
                limit_seconds = min(JOIN_SECONDS, self._timeout_seconds)
            if missing and (waited > limit_seconds or any(map(self._has_left, missing))):
                raise UserError(_describe(call, reason, missing, waited))
            if missing and waited > WARN_SECONDS and not was_warned:
                was_warned = True
                line = f"shoal: rank {self._rank} waits in {call} for {_ranks(missing)} (until {limit_seconds:g} s)"
                print(line, file=sys.stderr, flush=True)

    def leave(self) -> None:
        """Tells the others that this rank will come to no further call."""
        with suppress(dist.DistError):  # whoever keeps the board may have left before
            self._board.set(f"{self._rank} has left", "")

    def _missing(self, number: int) -> list[int]:
        return [rank for rank in range(self._size) if not self._board.check([f"{number} by {rank}"])]

    def _has_left(self, rank: int) -> bool:
        return bool(self._board.check([f"{rank} has left"]))


def _describe(call: str, reason: str, missing: list[int], waited_seconds: float) -> str:
    verb = "has" if len(missing) == 1 else "have"
    return (
        f"{call}: {_ranks(missing)} {verb} not called it ({waited_seconds:.0f} s later); {reason}all ranks must call it"
        + ("" if 0 in missing else ": take it out of `if rank == 0:`")
    )


def _ranks(ranks: list[int]) -> str:
    """Returns ranks in words; of many only the first."""
    more = f" and {len(ranks) - _SHOWN_RANKS} more" if len(ranks) > _SHOWN_RANKS else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_SHOWN_RANKS]))}{more}"
