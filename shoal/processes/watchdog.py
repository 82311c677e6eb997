"""A run that hangs ends, and says which rank the others waited for and what it was doing."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import TextIO

import torch.distributed as dist

from shoal.processes.board import HUNG, store_of
from shoal.processes.group import LOST_PEERS
from shoal.processes.world import World

SHOWN = 8
"""Innermost frames of a thread, and ranks one by one, that a message shows; the logs have all of them."""

Frame = tuple[str, int, str]
"""File, line, function."""


@dataclass(frozen=True)
class Sighting:
    """What one rank was doing when it last told."""

    rank: int
    machine: str
    """Where the process number means this process; it begins with the host's name."""
    pid: int
    marks: int
    """How many places the loop has told of. They are the same ones on all ranks, so more is further."""
    place: str
    """The step and its phase."""
    still_seconds: float
    """For how long it has not moved."""
    clock: str
    frames: Sequence[str] = ()
    """Of the thread that trains, innermost last."""
    collective: str = ""
    """What it waits for others in, as far as Python can see."""

    def __str__(self) -> str:
        inside = f", in {self.collective}" if self.collective else ""
        return f"{self.place}{inside}, for {self.still_seconds:.0f} s"


class Watchdog:
    """The loop tells where it is by `at`; a thread tells the others, and notices when this rank no longer moves.

    A rank that has not moved for `timeout_seconds` (`init_timeout_seconds` until all have taken their first step)
    waits for another, or is waited for. It calls all of them to say where they are, one reports who did not arrive,
    and all leave. A rank that has no others only warns.

    The thread has a connection of its own to the board, touches no device and takes part in no collective; where the
    board is gone it stays silent, and torch's own timeouts remain.
    """

    def __init__(
        self,
        world: World,
        timeout_seconds: float,
        init_timeout_seconds: float,
        log: Path | None = None,
        terminal: int = 2,
    ):
        """`terminal` is the file descriptor that messages to the user are written to."""
        self.world, self.log, self.terminal = world, log, terminal
        self.timeout_seconds, self.init_timeout_seconds = timeout_seconds, init_timeout_seconds
        self.tick_seconds = min(1.0, timeout_seconds / 20, init_timeout_seconds / 20)
        self.grace_seconds = 1 + 3 * self.tick_seconds
        self.started = False
        """Set by the loop when the first step is taken."""
        self._place = (0, 0, "joining the others")
        self._all_started = world.size == 1
        self._still_seconds = 0.0
        self._seen: object = None
        self._ended = threading.Event()
        watch = self._watch_alone if world.size == 1 else self._watch_with_others
        self._thread = threading.Thread(target=watch, name="shoal-watchdog", daemon=True)

    def at(self, phase: str, step: int) -> None:
        """Called several times per step, so it does nothing but this."""
        self._place = (self._place[0] + 1, step, phase)

    def __enter__(self) -> Watchdog:
        self._watched_thread = threading.get_ident()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join(10)  # no longer: it may just be asking a board that is gone

    # In the thread

    def _watch_alone(self) -> None:
        warned_of = None
        while place := self._next_place():
            if self._still_seconds >= self.limit_seconds() and place != warned_of:
                here, warned_of = self._sighting(), place
                with suppress(OSError):
                    text = [f"shoal: warning: nothing moves: {here}", *here.frames]
                    os.write(self.terminal, "\n  ".join(text).encode() + b"\n")

    def _watch_with_others(self) -> None:
        log_path = self.log or Path(os.devnull)
        # Whatever becomes of the board, this is never the cause of a failure.
        with suppress(dist.DistError, OSError), log_path.open("a") as log, ExitStack() as dumps:
            dumps.callback(faulthandler.cancel_dump_traceback_later)
            self._board = store_of(self.world, "watchdog").clone()  # for no two threads can share a connection
            self._board.set_timeout(timedelta(seconds=10 + self.grace_seconds))
            while self._next_place():
                # Should this thread itself be kept from running, the stacks are written without Python's help.
                limit_seconds = self.limit_seconds()
                faulthandler.dump_traceback_later(limit_seconds, file=log)
                self._tell("rank")
                if self._still_seconds >= limit_seconds or self._board.check(["hang"]):
                    self._end_hang(log, limit_seconds)

    def _next_place(self) -> object:
        """After a tick: what the loop told last, and its frames. None when it is over."""
        if self._ended.wait(self.tick_seconds):
            return None
        before, self._seen = self._seen, (self._place, self._frames())
        # In ticks and not by the clock: a machine that slept, or a run that was suspended by Ctrl-Z, does not hang.
        self._still_seconds = self._still_seconds + self.tick_seconds if self._seen == before else 0.0
        return self._seen

    def limit_seconds(self) -> float:
        """The short one when all ranks are through their first step: until then the slowest may still compile."""
        if self.started and not self._all_started:
            self._board.set(f"started {self.world.rank}", "")
            self._all_started = self._board.check([f"started {rank}" for rank in range(self.world.size)])
        return self.timeout_seconds if self.started and self._all_started else self.init_timeout_seconds

    def _frames(self) -> list[Frame]:
        """Of the thread that trains, outermost first; while that waits for another to end, such as a writer, of both.

        No lines of source are looked up: files may be what hangs.
        """
        threads = sys._current_frames()
        # Its own frame holds all of them: a circle, in which the loop's tensors would stay until garbage is collected.
        del threads[threading.get_ident()]
        stack = _stack(threads.get(self._watched_thread))
        joined = [frame.f_locals["self"].ident for frame in stack if frame.f_code is threading.Thread.join.__code__]
        stack = [*stack, *_stack(threads.get(joined[0]) if joined else None)]
        return [(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) for frame in stack]

    def _sighting(self) -> Sighting:
        marks, step, phase = self._place
        frames = self._frames()
        return Sighting(
            rank=self.world.rank,
            machine=this_machine(),
            pid=os.getpid(),
            marks=marks,
            place=f"step {step}, {phase}",
            still_seconds=self._still_seconds,
            clock=time.strftime("%H:%M:%S"),
            frames=[f"{_short(file)}:{line} in {function}" for file, line, function in frames[-SHOWN:]],
            collective=collective_of(frames),
        )

    def _tell(self, kind: str) -> None:
        """Leaves word on the board: as the `rank` this is, or `stuck` after it was called."""
        self._board.set(f"{kind} {self.world.rank}", json.dumps(asdict(self._sighting())))

    def _sightings(self, kind: str) -> dict[int, Sighting]:
        """What ranks left on the board by `_tell`."""
        ranks = [rank for rank in range(self.world.size) if self._board.check([f"{kind} {rank}"])]
        return {rank: Sighting(**json.loads(self._board.get(f"{kind} {rank}"))) for rank in ranks}

    def _end_hang(self, log: TextIO, limit_seconds: float) -> None:
        """Leaves word of where this rank is; whoever comes first reports. Does not return."""
        try:
            comes_first = self._board.add("hang", 1) == 1
            self._tell("stuck")
            print(f"shoal: the run hangs; all threads of rank {self.world.rank}:", file=log, flush=True)
            faulthandler.dump_traceback(file=log)
            if comes_first:
                self._report(limit_seconds)
            kill_here(json.loads(self._board.get("silent")))
            time.sleep(2 * self.tick_seconds)  # the board may be this process's, and the others look there
        finally:
            os._exit(LOST_PEERS)

    def _report(self, limit_seconds: float) -> None:
        time.sleep(self.grace_seconds)  # in which all that still can answer do
        answers = self._sightings("stuck")
        last_seen = self._sightings("rank") | answers
        missing = not_arrived(answers, self.world.size)
        key = "timeout" if limit_seconds == self.timeout_seconds else "init_timeout"
        text = describe(missing, answers, last_seen, f"distributed.{key} = {limit_seconds:g} s")
        where = f"  the stacks of all threads are in {self.log.parent}/rank_<n>.log\n" if self.log else ""
        os.write(self.terminal, f"shoal: {text}{where}".encode())
        silent = [(seen.machine, seen.pid) for rank, seen in last_seen.items() if rank not in answers]
        word = json.dumps({"who": _ranks(missing) if missing else "the run", "silent": silent})
        self._board.underlying_store.set(HUNG.format(self.world.attempt_name), word)
        self._board.set("silent", json.dumps(silent))


def group_timeout_seconds(timeout_seconds: float, init_timeout_seconds: float) -> float:
    """Returns the timeout for torch's process groups in a run with a watchdog.

    It is a minute longer than the watchdog's own: torch would end the run without saying who was waited for.
    """
    return max(timeout_seconds, init_timeout_seconds) + 60


def this_machine() -> str:
    """Containers may share a name and still number their processes each for itself."""
    with suppress(OSError):
        return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"
    return socket.gethostname()


def kill_here(silent: Sequence[tuple[str, int]]) -> None:
    """Ends those of (machine, process) that are here: launchers ask first, which a stopped process does not hear."""
    for machine, pid in silent:
        if machine == this_machine():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _stack(frame: FrameType | None) -> list[FrameType]:
    return [below for below, _ in walk_stack(frame)][::-1] if frame else []


def collective_of(frames: Sequence[Frame]) -> str:
    """What a thread with these frames waits for others in; empty if it is elsewhere.

    Inside of a backward Python cannot see whether DDP waits there.
    """
    for file, _, function in reversed(frames):
        place = file.replace(os.sep, "/")
        if place.endswith("torch/autograd/graph.py"):
            return "backward"
        is_collective = "/torch/distributed/" in place
        if is_collective and function != "wrapper":
            return function
        if not is_collective and not place.endswith("torch/_ops.py"):
            break
    return ""


def not_arrived(answers: Mapping[int, Sighting], size: int) -> list[int]:
    """The ranks that the others wait for. None if nobody can be told from the others."""
    if silent := [rank for rank in range(size) if rank not in answers]:
        return silent
    furthest = max(answer.marks for answer in answers.values())
    behind = [rank for rank in answers if answers[rank].marks < furthest]
    busy = [rank for rank in answers if not answers[rank].collective]
    # On GPUs ranks wait for the device, wherever that is read, and not in a collective.
    return [rank for rank in behind if rank in busy] or behind or (busy if len(busy) < size else [])


def describe(
    missing: Sequence[int], answers: Mapping[int, Sighting], last_seen: Mapping[int, Sighting], limit: str
) -> str:
    """Those that did not arrive one by one; of the others, those that wait in the same place together."""
    nobody = f"nothing moved within {limit}, and no rank is behind the others"
    lines = [
        f"the run hangs: {_ranks(missing)} did not arrive within {limit}" if missing else f"the run hangs: {nobody}"
    ]
    together: dict[tuple[str, ...], list[int]] = {}
    for rank in [rank for rank in answers if rank not in missing]:
        together.setdefault((answers[rank].place, *answers[rank].frames), []).append(rank)
    for ranks in [*([rank] for rank in missing[:SHOWN]), *[*together.values()][:SHOWN]]:
        seen = last_seen.get(ranks[0])
        if seen is None:
            lines.append(f"  rank {ranks[0]} has not even come")
            continue
        process = f" ({seen.machine.split()[0]}, process {seen.pid})" if len(ranks) == 1 else ""
        silent = "" if ranks[0] in answers else f"silent since {seen.clock}, when it was in "
        lines += [f"  {_ranks(ranks)}{process}: {silent}{seen}", *(f"    {frame}" for frame in seen.frames)]
    return "\n".join(lines) + "\n"


def _ranks(ranks: Collection[int]) -> str:
    """`rank 3`, `ranks 0, 2-7`."""
    # Ranks that follow each other are as far from their places in the list.
    by_distance = groupby(enumerate(sorted(ranks)), lambda place: place[1] - place[0])
    spans = [[rank for _, rank in span] for _, span in by_distance]
    said = ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {said}"


def _short(file: str) -> str:
    """A path as one would import it."""
    folder = max((path for path in sys.path if path and file.startswith(path + os.sep)), key=len, default=file)
    return file.removeprefix(folder + os.sep)
