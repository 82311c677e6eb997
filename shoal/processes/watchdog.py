"""Ends a run that hangs, and reports which ranks the others waited for and what those were doing."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import TextIO

import torch.distributed as dist

from shoal.processes.board import HANG_REPORT, board_section
from shoal.processes.flight_recorder import Flight, find_absent, format_ranks, read_flight
from shoal.processes.group import LOST_PEERS_EXIT_CODE
from shoal.processes.world import World

MAX_SHOWN = 8
"""The number of innermost frames of a thread, and of ranks, that a message shows; the logs have all of them."""

Frame = tuple[str, int, str]
"""The file, line and function of a stack frame."""


@dataclass(frozen=True)
class RankStatus:
    """What a rank was doing when it last posted its status."""

    rank: int
    machine: str
    """The machine on which `pid` is valid, as `machine_id` gives it."""
    pid: int
    progress: int
    """The number of calls of `Watchdog.at`. All ranks make the same calls, so a lower number is behind."""
    activity: str
    """The step and its phase."""
    unchanged_seconds: float
    """For how long neither its activity nor its stack has changed."""
    time_of_day: str
    frames: Sequence[str] = ()
    """The stack of the training thread, innermost frame last."""
    collective: str = ""
    """The collective in which it waits for other ranks, as far as Python can see; empty if in none."""

    def __str__(self) -> str:
        inside = f", in {self.collective}" if self.collective else ""
        return f"{self.activity}{inside}, for {self.unchanged_seconds:.0f} s"


class Watchdog:
    """Watches the training loop from a thread of its own, and ends the run if a rank makes no progress.

    The loop calls `at` at every phase; the thread posts the status of this rank on the board. If neither phase nor
    stack changes for `timeout_seconds` (`init_timeout_seconds` until all ranks have taken their first step), this rank
    hangs or waits for one that does. It then asks all ranks for their status, one rank reports which of them did not
    arrive, and all processes exit. In a run of one process the watchdog only warns.

    The thread uses no device and takes part in no collective. If the board is gone it does nothing, and torch's own
    timeouts remain.
    """

    def __init__(
        self,
        world: World,
        timeout_seconds: float,
        init_timeout_seconds: float,
        log: Path | None = None,
        terminal: int = 2,
    ):
        """Messages to the user go to the file descriptor `terminal`, stacks of all threads to the file `log`."""
        self.world, self.log, self.terminal = world, log, terminal
        self.timeout_seconds, self.init_timeout_seconds = timeout_seconds, init_timeout_seconds
        self.poll_seconds = min(1.0, timeout_seconds / 20, init_timeout_seconds / 20)
        self.answer_seconds = 1 + 3 * self.poll_seconds
        self.started = False
        """Set to True by the loop after its first step."""
        self._position = (0, 0, "joining the others")
        self._all_started = world.size == 1
        self._unchanged_seconds = 0.0
        self._observed: object = None
        self._ended = threading.Event()
        watch = self._watch_alone if world.size == 1 else self._watch_with_others
        self._thread = threading.Thread(target=watch, name="shoal-watchdog", daemon=True)

    def at(self, phase: str, step: int) -> None:
        """Notes that the loop enters a phase of a step. It runs several times per step, so it must stay cheap."""
        self._position = (self._position[0] + 1, step, phase)

    def __enter__(self) -> Watchdog:
        self._training_thread = threading.get_ident()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join(10)  # not forever, because it may be waiting for a board that is gone

    # What the watching thread runs

    def _watch_alone(self) -> None:
        warned_about = None
        while observed := self._observe():
            if self._unchanged_seconds >= self.limit_seconds() and observed != warned_about:
                status, warned_about = self._status(), observed
                with suppress(OSError):
                    text = [f"shoal: warning: no progress: {status}", *status.frames]
                    os.write(self.terminal, "\n  ".join(text).encode() + b"\n")

    def _watch_with_others(self) -> None:
        log_path = self.log or Path(os.devnull)
        # A board that fails must not make the watchdog the cause of a failure.
        with suppress(dist.DistError, OSError), log_path.open("a") as log, ExitStack() as at_exit:
            at_exit.callback(faulthandler.cancel_dump_traceback_later)
            self._board = board_section(self.world, "watchdog").clone()  # a connection is used by one thread only
            self._board.set_timeout(timedelta(seconds=10 + self.answer_seconds))
            while self._observe():
                # If another thread holds the GIL, this one cannot run; faulthandler then writes the stacks from C.
                limit_seconds = self.limit_seconds()
                faulthandler.dump_traceback_later(limit_seconds, file=log)
                self._post_status("status")
                if self._unchanged_seconds >= limit_seconds or self._board.check(["hang"]):
                    self._end_after_hang(log, limit_seconds)

    def _observe(self) -> object:
        """Waits `poll_seconds` and returns position and stack of the loop; None once the loop has ended."""
        if self._ended.wait(self.poll_seconds):
            return None
        before, self._observed = self._observed, (self._position, self._frames())
        # Polls are counted instead of reading a clock: a laptop that slept, or Ctrl-Z, must not look like a hang.
        self._unchanged_seconds = self._unchanged_seconds + self.poll_seconds if self._observed == before else 0.0
        return self._observed

    def limit_seconds(self) -> float:
        """Returns the timeout in force. The first step may compile, so it has another one, until all have taken it."""
        if self.started and not self._all_started:
            self._board.set(f"started {self.world.rank}", "")
            self._all_started = self._board.check([f"started {rank}" for rank in range(self.world.size)])
        return self.timeout_seconds if self.started and self._all_started else self.init_timeout_seconds

    def _frames(self) -> list[Frame]:
        """Returns the stack of the training thread, outermost frame first.

        If that thread waits for another one to end, such as one that writes a checkpoint, the stack of the other one
        follows. Lines of source are not looked up, because a file system may be what hangs.
        """
        threads = sys._current_frames()
        # This function's own frame refers to `threads`: a reference cycle that would keep the loop's tensors alive.
        del threads[threading.get_ident()]
        stack = _stack(threads.get(self._training_thread))
        joins = [frame for frame in stack if frame.f_code is threading.Thread.join.__code__]
        stack += _stack(threads.get(joins[0].f_locals["self"].ident) if joins else None)
        return [(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) for frame in stack]

    def _status(self) -> RankStatus:
        progress, step, phase = self._position
        frames = self._frames()
        return RankStatus(
            rank=self.world.rank,
            machine=machine_id(),
            pid=os.getpid(),
            progress=progress,
            activity=f"step {step}, {phase}",
            unchanged_seconds=self._unchanged_seconds,
            time_of_day=time.strftime("%H:%M:%S"),
            frames=[f"{_importable_path(file)}:{line} in {function}" for file, line, function in frames[-MAX_SHOWN:]],
            collective=collective_of(frames),
        )

    def _post_status(self, kind: str) -> None:
        """Posts what this rank does on the board: as its `status`, or as its `answer` once a hang was noticed."""
        self._board.set(f"{kind} of rank {self.world.rank}", json.dumps(asdict(self._status())))

    def _statuses(self, kind: str) -> dict[int, RankStatus]:
        """Returns what ranks have posted with `_post_status`, by rank."""
        ranks = [rank for rank in range(self.world.size) if self._board.check([f"{kind} of rank {rank}"])]
        return {rank: RankStatus(**json.loads(self._board.get(f"{kind} of rank {rank}"))) for rank in ranks}

    def _post_flight(self) -> None:
        """Posts what torch's flight recorder shows, and writes all of it beside the log."""
        from shoal.torch_private import dump_flight_recorders  # not above, because launchers import this module

        with suppress(ValueError, LookupError, TypeError, AttributeError):  # another torch may record something else
            dumps = dump_flight_recorders()
            self._board.set(f"flight of rank {self.world.rank}", read_flight(dumps).as_json())
            if self.log is not None:
                recorders = [json.loads(dump) for dump in dumps]
                (self.log.parent / f"flight_{self.world.rank}.json").write_text(json.dumps(recorders))

    def _flights(self) -> dict[int, Flight]:
        """Returns what ranks have posted with `_post_flight`, by rank."""
        ranks = [rank for rank in range(self.world.size) if self._board.check([f"flight of rank {rank}"])]
        return {rank: Flight.from_json(self._board.get(f"flight of rank {rank}")) for rank in ranks}

    def _end_after_hang(self, log: TextIO, limit_seconds: float) -> None:
        """Posts the status of this rank, kills silent processes and exits. The rank that is first reports the hang."""
        try:
            is_first = self._board.add("hang", 1) == 1
            self._post_status("answer")
            self._post_flight()
            print(f"shoal: the run hangs; all threads of rank {self.world.rank}:", file=log, flush=True)
            faulthandler.dump_traceback(file=log)
            if is_first:
                self._report(limit_seconds)
            kill_local_processes(json.loads(self._board.get("silent")))
            time.sleep(2 * self.poll_seconds)  # this process may keep the board, and other ranks still read it
        finally:
            os._exit(LOST_PEERS_EXIT_CODE)

    def _report(self, limit_seconds: float) -> None:
        time.sleep(self.answer_seconds)  # until all ranks that still can have answered
        answers = self._statuses("answer")
        last_statuses = self._statuses("status") | answers
        absent, lines = find_absent(self._flights())
        missing = find_missing_ranks(answers, self.world.size, absent)
        key = "timeout" if limit_seconds == self.timeout_seconds else "init_timeout"
        text = describe_hang(missing, answers, last_statuses, f"distributed.{key} = {limit_seconds:g} s", lines)
        log_line = ""
        if self.log:
            log_line = (
                f"  the stacks of all threads are in {self.log.parent}/rank_<n>.log, torch's records of collectives"
            )
            log_line += " in flight_<n>.json\n"
        os.write(self.terminal, f"shoal: {text}{log_line}".encode())
        silent = [(status.machine, status.pid) for rank, status in last_statuses.items() if rank not in answers]
        hang_report = json.dumps({"who": format_ranks(missing) if missing else "the run", "silent": silent})
        self._board.underlying_store.set(HANG_REPORT.format(self.world.attempt_name), hang_report)
        self._board.set("silent", json.dumps(silent))


def group_timeout_seconds(timeout_seconds: float, init_timeout_seconds: float) -> float:
    """Returns the timeout for torch's process groups in a run with a watchdog.

    It is a minute longer than the watchdog's, because torch would end the run without naming the missing rank.
    """
    return max(timeout_seconds, init_timeout_seconds) + 60


def machine_id() -> str:
    """Returns the host name and, on Linux, the namespace of process ids.

    Containers may have the same host name and still count their processes separately.
    """
    with suppress(OSError):
        return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"
    return socket.gethostname()


def kill_local_processes(processes: Sequence[tuple[str, int]]) -> None:
    """Kills those of the (machine, process id) pairs that are on this machine.

    Launchers send SIGTERM first, which a stopped process does not handle.
    """
    for machine, pid in processes:
        if machine == machine_id():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _stack(frame: FrameType | None) -> list[FrameType]:
    """Returns the frame and its callers, outermost first."""
    return [caller for caller, _ in walk_stack(frame)][::-1] if frame else []


def collective_of(frames: Sequence[Frame]) -> str:
    """Returns the collective that a thread with this stack waits in; empty if it is elsewhere.

    It is `backward` for all of a backward, because Python cannot see whether DDP waits inside of it.
    """
    for file, _, function in reversed(frames):
        path = file.replace(os.sep, "/")
        if path.endswith("torch/autograd/graph.py"):
            return "backward"
        in_torch_distributed = "/torch/distributed/" in path
        if in_torch_distributed and function != "wrapper":
            return function
        if not in_torch_distributed and not path.endswith("torch/_ops.py"):
            break
    return ""


def find_missing_ranks(answers: Mapping[int, RankStatus], size: int, absent: Sequence[int] = ()) -> list[int]:
    """Returns the ranks that the others wait for; an empty list if no rank differs from the others.

    `absent` are those that the flight recorders show to be missing from a collective.
    """
    if silent := [rank for rank in range(size) if rank not in answers]:
        return silent
    if absent:
        return [*absent]
    furthest = max(answer.progress for answer in answers.values())
    behind = [rank for rank in answers if answers[rank].progress < furthest]
    active = [rank for rank in answers if not answers[rank].collective]
    # With GPUs, ranks wait where they read from the device and not in a collective, so both conditions may be needed.
    return [rank for rank in behind if rank in active] or behind or (active if len(active) < size else [])


def describe_hang(
    missing: Sequence[int],
    answers: Mapping[int, RankStatus],
    last_statuses: Mapping[int, RankStatus],
    limit: str,
    collectives: Sequence[str] = (),
) -> str:
    """Returns the message of a hang: first each missing rank, then the others, grouped by what they do.

    `collectives` are sentences of the flight recorders.
    """
    lines = [f"the run hangs: no progress within {limit}, and no rank is behind the others"]
    if missing:
        lines = [f"the run hangs: {format_ranks(missing)} did not arrive within {limit}"]
    lines += [f"  {sentence}" for sentence in collectives[:MAX_SHOWN]]
    waiting: dict[tuple[str, ...], list[int]] = {}
    for rank in [rank for rank in answers if rank not in missing]:
        waiting.setdefault((answers[rank].activity, *answers[rank].frames), []).append(rank)
    for ranks in [*([rank] for rank in missing[:MAX_SHOWN]), *[*waiting.values()][:MAX_SHOWN]]:
        status = last_statuses.get(ranks[0])
        if status is None:
            lines.append(f"  rank {ranks[0]} has not reported since the start")
            continue
        process = f" ({status.machine.split()[0]}, process {status.pid})" if len(ranks) == 1 else ""
        silent = "" if ranks[0] in answers else f"silent since {status.time_of_day}, last seen in "
        lines += [f"  {format_ranks(ranks)}{process}: {silent}{status}", *(f"    {frame}" for frame in status.frames)]
    return "\n".join(lines) + "\n"


def _importable_path(file: str) -> str:
    """Returns the path of a file relative to the folder that it is imported from."""
    folder = max((path for path in sys.path if path and file.startswith(path + os.sep)), key=len, default=file)
    return file.removeprefix(folder + os.sep)
