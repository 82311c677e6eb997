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
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread, get_ident
from types import FrameType
from typing import Any, TextIO

import torch.distributed as dist

from shoal.processes.board import HUNG, store_of
from shoal.processes.group import LOST_PEERS
from shoal.processes.world import World

FRAMES = 8
"""Innermost frames of a main thread in the message; the rank's log has all of them."""

SHOWN = 8
"""Ranks that a message tells of one by one."""

Frame = tuple[str, int, str]
"""File, line, function."""


@dataclass(frozen=True)
class Sighting:
    """What one rank was doing when it last told."""

    rank: int
    host: str
    machine: str
    """Where the process number means this process."""
    pid: int
    marks: int
    """How many places the loop has told of. They are the same ones on all ranks, so more is further."""
    step: int
    phase: str
    started: bool
    """Whether its first step is behind it."""
    still_seconds: float
    """For how long it has not moved."""
    clock: str
    frames: Sequence[str] = ()
    """Of the thread that trains, innermost last."""
    collective: str = ""
    """What it waits for others in, as far as Python can see."""

    @classmethod
    def from_json(cls, text: str | bytes) -> Sighting:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        inside = f", in {self.collective}" if self.collective else ""
        return f"step {self.step}, {self.phase}{inside}, for {self.still_seconds:.0f} s"


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
        self._watched_thread = 0
        self._ended = Event()
        self._thread = Thread(target=self._watch, name="shoal-watchdog", daemon=True)

    def at(self, phase: str, step: int) -> None:
        """Called several times per step, so it does nothing but this."""
        self._place = (self._place[0] + 1, step, phase)

    def __enter__(self) -> Watchdog:
        self._watched_thread = get_ident()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join(10)  # no longer: it may just be asking a board that is gone

    # In the thread

    def _watch(self) -> None:
        with suppress(dist.DistError, OSError):  # whatever becomes of the board, this is never the cause of a failure
            if self.world.size == 1:
                self._watch_alone()
                return
            self._board = store_of(self.world, "watchdog").clone()  # for no two threads can share a connection
            with (self.log or Path(os.devnull)).open("a") as log:
                try:
                    self._watch_with_others(log)
                finally:
                    faulthandler.cancel_dump_traceback_later()

    def _watch_alone(self) -> None:
        warned_of = None
        while place := self._next_place():
            if self._still_seconds >= self.limit_seconds() and place != warned_of:
                here, warned_of = self._sighting(), place
                text = [f"shoal: warning: nothing moves: {here}", *here.frames]
                os.write(self.terminal, "\n  ".join(text).encode() + b"\n")

    def _watch_with_others(self, log: TextIO) -> None:
        while self._next_place():
            # Should this thread itself be kept from running, the stacks are written without Python's help.
            limit_seconds = self.limit_seconds()
            faulthandler.dump_traceback_later(limit_seconds, file=log)
            self._board.set(f"rank {self.world.rank}", self._sighting().to_json())
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
            others = self._sightings("rank")
            self._all_started = len(others) == self.world.size and all(other.started for other in others.values())
        return self.timeout_seconds if self.started and self._all_started else self.init_timeout_seconds

    def _frames(self) -> list[Frame]:
        """Of the thread that trains; while that waits for another to end, such as one that writes, of both."""
        threads = sys._current_frames()
        # Its own frame holds all of them: a circle, in which the loop's tensors would stay until garbage is collected.
        del threads[threading.get_ident()]
        innermost = threads.get(self._watched_thread)
        return stack_below(innermost) + stack_below(threads.get(joined_by(innermost)))

    def _sighting(self) -> Sighting:
        marks, step, phase = self._place
        frames = self._frames()
        return Sighting(
            rank=self.world.rank,
            host=socket.gethostname(),
            machine=this_machine(),
            pid=os.getpid(),
            marks=marks,
            step=step,
            phase=phase,
            started=self.started,
            still_seconds=self._still_seconds,
            clock=time.strftime("%H:%M:%S"),
            frames=[f"{_short(file)}:{line} in {function}" for file, line, function in frames[-FRAMES:]],
            collective=collective_of(frames),
        )

    def _sightings(self, kind: str) -> dict[int, Sighting]:
        """What ranks left on the board: as the `rank` they are, or `stuck` after they were called."""
        keys = [f"{kind} {rank}" for rank in range(self.world.size)]
        if not self._board.check(keys):
            keys = [key for key in keys if self._board.check([key])]
        found = [Sighting.from_json(text) for text in self._board.multi_get(keys)] if keys else []
        return {sighting.rank: sighting for sighting in found}

    def _end_hang(self, log: TextIO, limit_seconds: float) -> None:
        """Leaves word of where this rank is; whoever comes first reports. Does not return."""
        try:
            comes_first = self._board.add("hang", 1) == 1
            self._board.set(f"stuck {self.world.rank}", self._sighting().to_json())
            print(f"shoal: the run hangs; all threads of rank {self.world.rank}:", file=log, flush=True)
            faulthandler.dump_traceback(file=log)
            if comes_first:
                self._report(limit_seconds)
            end = time.monotonic() + 2 * self.grace_seconds
            while not self._board.check(["silent"]) and time.monotonic() < end:
                time.sleep(self.tick_seconds / 2)
            kill_here(json.loads(self._board.get("silent")))
            if comes_first:
                time.sleep(2 * self.tick_seconds)  # the board may be this process's, and the others look there
        finally:
            os._exit(LOST_PEERS)

    def _report(self, limit_seconds: float) -> None:
        answers: dict[int, Sighting] = {}
        end = time.monotonic() + self.grace_seconds
        while len(answers) < self.world.size and time.monotonic() < end:
            time.sleep(self.tick_seconds / 2)
            answers = self._sightings("stuck")
        last_seen = self._sightings("rank") | answers
        missing = not_arrived(answers, self.world.size)
        key = "timeout" if limit_seconds == self.timeout_seconds else "init_timeout"
        text = describe(missing, answers, last_seen, f"distributed.{key} = {limit_seconds:g} s")
        where = f"  the stacks of all threads are in {self.log.parent}/rank_<n>.log\n" if self.log else ""
        os.write(self.terminal, f"shoal: {text}{where}".encode())
        silent = [(seen.machine, seen.pid) for rank, seen in last_seen.items() if rank not in answers]
        told = {"who": _ranks(missing) if missing else "the run", "silent": silent}
        self._board.underlying_store.set(HUNG.format(self.world.attempt_name), json.dumps(told))
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


def stack_below(frame: FrameType | None) -> list[Frame]:
    """Outermost first. No lines of source are looked up: files may be what hangs."""
    frames = []
    while frame:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return frames[::-1]


def joined_by(frame: FrameType | None) -> int:
    """The thread whose end is waited for here, or 0."""
    while frame and frame.f_code.co_filename == threading.__file__:
        if frame.f_code.co_name == "join":
            return frame.f_locals["self"].ident or 0
        frame = frame.f_back
    return 0


def collective_of(frames: Sequence[Frame]) -> str:
    """What a thread with these frames waits for others in; empty if it is elsewhere.

    Inside of a backward Python cannot see whether DDP waits there.
    """
    for file, _, function in reversed(frames):
        place = file.replace(os.sep, "/")
        if place.endswith("torch/autograd/graph.py"):
            return "backward"
        if "/torch/distributed/" in place:
            if function != "wrapper":
                return function
        elif not place.endswith("torch/_ops.py"):
            return ""
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
    if missing:
        lines = [f"the run hangs: {_ranks(missing)} did not arrive within {limit}"]
    else:
        lines = [f"the run hangs: nothing moved within {limit}, and no rank is behind the others"]
    for rank in missing[:SHOWN]:
        seen = last_seen.get(rank)
        if seen is None:
            lines.append(f"  rank {rank} has not even come")
            continue
        silent = "" if rank in answers else f"silent since {seen.clock}, when it was in "
        lines.append(f"  rank {rank} ({seen.host}, process {seen.pid}): {silent}{seen}")
        lines += [f"    {frame}" for frame in seen.frames]
    groups: dict[tuple[Any, ...], list[Sighting]] = {}
    for rank in answers:
        if rank not in missing:
            seen = answers[rank]
            groups.setdefault((seen.step, seen.phase, *seen.frames), []).append(seen)
    for group in list(groups.values())[:SHOWN]:
        first = group[0]
        at = f" ({first.host}, process {first.pid})" if len(group) == 1 else ""
        lines.append(f"  {_ranks([seen.rank for seen in group])}{at}: {first}")
        lines += [f"    {frame}" for frame in first.frames]
    return "\n".join(lines) + "\n"


def _ranks(ranks: Collection[int]) -> str:
    """`rank 3`, `ranks 0, 2-7`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    said = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {said}"


def _short(file: str) -> str:
    """A path as one would import it."""
    for folder in sorted((folder for folder in sys.path if folder), key=len, reverse=True):
        if file.startswith(folder + os.sep):
            return file[len(folder) + 1 :]
    return file
