"""The run lock: the file `run.lock` keeps two runs from writing into one folder.

The file names the run that holds the folder (the holder), which writes a heartbeat into it every few seconds. A second
run is refused while there are heartbeats. It takes over if the holder is a dead process of this machine, an earlier
attempt of the same job, or has written no heartbeat for a minute.

The clocks of two machines are never compared: the time since the last heartbeat is measured by the clock of the file
system, and a second run also watches the file itself. A holder keeps its file open and writes only into that, so that
it can never overwrite its successor's file, however long it was suspended.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from shoal.errors import UserError, printable
from shoal.weights.regular_files import read_regular

LOCK = "run.lock"
HEARTBEAT_SECONDS = 3.0
STALE_SECONDS = 60.0
"""After so long without a heartbeat a holder counts as dead."""
CLAIM_SECONDS = 10.0
"""After so long a run that has claimed a dead holder's folder, and has not taken it, counts as dead too."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a run folder, as it is written into the lock file."""

    host: str
    machine: str
    """Identifies the kernel's boot and the namespace of process ids, within which `pid` has a meaning."""
    pid: int
    process_started: str
    """The start time of the process, which distinguishes it from a later process with the same id."""
    job: str
    """The name of the job or launcher that may restart the run, or an empty string."""
    attempt: list[int]
    """How often the job was restarted: one count for each level of launchers, the outermost first."""
    started: str
    token: str

    @classmethod
    def of_this_process(cls, job: str = "", attempt: Sequence[int] = (0, 0, 0)) -> Holder:
        """Returns the holder that describes this process."""
        pid = os.getpid()
        started = _process_started(pid) or ""
        return cls(_host(), _machine(), pid, started, job, [*attempt], _now(), secrets.token_hex(8))

    @classmethod
    def parse(cls, text: str) -> Holder | None:
        """Returns the holder in the text of a lock file, or None if the text is incomplete. The file is not trusted."""
        try:
            fields = json.loads(text)
            fields.pop("heartbeat")
            holder = cls(**fields)
            holder.attempt > [0]  # noqa: B015  raises TypeError if it cannot be compared
            safe = isinstance(holder.pid, int) and re.fullmatch(r"[0-9a-f]{16}", holder.token)
            return holder if safe else None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def is_dead(self) -> bool:
        """Returns True if the process is certainly dead; nothing is known about processes of other machines."""
        on_this_machine = (self.host, self.machine) == (_host(), _machine())
        return on_this_machine and _process_started(self.pid) != self.process_started

    def is_earlier_attempt_of(self, other: Holder) -> bool:
        """Returns whether the other is a later attempt of the same job."""
        return bool(self.job) and self.job == other.job and other.attempt > self.attempt

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.started}"


class RunLock:
    """The lock of one run folder. Call `check` before each operation that two runs must not do at once."""

    def __init__(self, output_dir: str | Path, job: str = "", attempt: Sequence[int] = (0, 0, 0)):
        """`job` names the job or launcher that may restart this run, and `attempt` says how often it has."""
        self.folder = Path(output_dir)
        self.path = self.folder / LOCK
        self.holder = Holder.of_this_process(job, attempt)
        self._own_path = self.folder / f".{LOCK}.{self.holder.token}"
        self._file: int | None = None
        self._claim_seen: tuple[float | None, float] = (None, 0.0)
        """The modification time of another run's claim, and since when this run has seen it, by its own clock."""
        self._stop = threading.Event()
        self._heartbeat_thread: threading.Thread | None = None

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Takes the lock, or raises UserError if the holder writes a heartbeat."""
        self._file = os.open(self._own_path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            self._write_heartbeat()
            while not self._link(self.path):
                stale_text = self._watch_holder()
                if stale_text is not None and self._replace(stale_text):
                    break
        except BaseException:
            self._close()
            raise
        finally:
            self._own_path.unlink(missing_ok=True)
        self._heartbeat_thread = threading.Thread(target=self._write_heartbeats, name="run lock", daemon=True)
        self._heartbeat_thread.start()

    def release(self) -> None:
        """Stops the heartbeats and removes the lock file, unless another run has taken over."""
        self._stop.set()
        if self._heartbeat_thread:
            self._heartbeat_thread.join()
        if self._file is not None:
            if self._holds_lock():
                self.path.unlink(missing_ok=True)
            self._close()

    def check(self) -> None:
        """Raises UserError if another run has taken over the folder, as happens if this one was suspended for long."""
        if self._holds_lock() or self._restore_deleted_file():
            return
        raise UserError(
            f"{self.folder} was taken over by {Holder.parse(_read(self.path)) or 'another run'} while this run was "
            "suspended; this run ends without another save, and the other one resumes from the last checkpoint"
        )

    def _watch_holder(self) -> str | None:
        """Watches the holder of the lock. Returns the text of its file once it counts as dead, or None if the file has
        gone or changed hands meanwhile. Raises UserError if it writes a heartbeat."""
        text, seen = _read(self.path), _modified_at(self.path)
        holder = Holder.parse(text)
        silent_seconds = self._file_system_seconds() - seen if seen else 0.0
        if holder and holder.is_earlier_attempt_of(self.holder):  # a launcher ends a process before it restarts it
            return text
        # Only a new heartbeat proves that the holder lives: a killed process exists for a while, and a modification
        # time in the future or long ago may come from another clock. So the file is always watched for two heartbeats.
        silent_seconds = min(max(silent_seconds, 0), STALE_SECONDS)
        wait_seconds = max(STALE_SECONDS - silent_seconds, 2.5 * HEARTBEAT_SECONDS)
        watched_since, has_reported = time.monotonic(), False
        while (watched_seconds := time.monotonic() - watched_since) < wait_seconds:
            if not has_reported and watched_seconds > 2.5 * HEARTBEAT_SECONDS:
                left = f"{wait_seconds - watched_seconds:.0f} s"
                who = holder or "an unknown run"
                line = printable(f"shoal: {self.folder} is held by {who}, without a heartbeat; waiting {left}")
                print(line, file=sys.stderr)
                has_reported = True
            if holder and holder.is_dead():
                return text
            if not self.path.exists():
                return None
            time.sleep(0.1)
            if (modified := _modified_at(self.path)) != seen:
                current = Holder.parse(_read(self.path))
                if current is None or holder is None or current.token != holder.token:
                    return None  # released, or taken by another run: the caller tries again
                silent_seconds = max(0.0, self._file_system_seconds() - modified) if modified else 0.0
                raise UserError(
                    f"experiment.output_dir = {str(self.folder)!r} is in use by {current}, last seen "
                    f"{silent_seconds:.0f} s ago; wait for it, stop it, or choose another experiment.output_dir"
                )
        return text

    def _replace(self, stale_text: str) -> bool:
        """Replaces the lock file of a dead holder by this run's, and returns whether it could.

        Of several runs that try at once, one succeeds: only the run that makes the claim file for this very holder may
        replace its lock file, and it first checks that the lock file is still that holder's.
        """
        holder = Holder.parse(stale_text)
        claim = self.folder / f".{LOCK}.after.{holder.token if holder else 'nobody'}"
        if not self._link(claim):
            # The age of the file would not do: it is below zero for as long as a clock was set back.
            now, claimed_at = time.monotonic(), _modified_at(claim)
            if claimed_at != self._claim_seen[0]:
                self._claim_seen = claimed_at, now
            elif now - self._claim_seen[1] > CLAIM_SECONDS:  # the run that made it has died
                claim.unlink(missing_ok=True)
            time.sleep(0.05)
            return False
        try:
            current = Holder.parse(_read(self.path))
            same = current.token == holder.token if current and holder else current is holder
            if takes_over := same and self.path.exists():
                self._own_path.replace(self.path)
            return takes_over
        finally:
            claim.unlink(missing_ok=True)

    def _link(self, path: Path) -> bool:
        """Links this run's file to `path` and returns whether it could, that is, whether `path` did not exist.

        A hard link is used because it is atomic on network file systems too.
        """
        try:
            os.link(self._own_path, path)
            return True
        except FileExistsError:  # or a network file system has lost the answer and repeated the request
            return self._own_path.stat().st_nlink > 1
        except OSError:  # the file system has no hard links
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return False
            if path == self.path:
                self._own_path.replace(path)
            return True

    def _restore_deleted_file(self) -> bool:
        """Writes the lock file again if someone deleted it, and returns whether this run still holds the folder.

        If another run has taken the folder meanwhile, there is a file again, and it is left alone.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = os.open(self._own_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            os.write(file, self._text())
            if self._link(self.path):
                self._file = file  # the old descriptor stays open, because the heartbeat thread may be using it
                return True
            os.close(file)
        except OSError:  # the save that follows will report why nothing can be written
            return not self.path.exists()
        finally:
            self._own_path.unlink(missing_ok=True)
        return False

    def _holds_lock(self) -> bool:
        """Returns whether the lock file names this run."""
        holder = Holder.parse(_read(self.path))
        return holder is not None and holder.token == self.holder.token

    def _write_heartbeats(self) -> None:
        """Writes a heartbeat at each interval until the lock is released."""
        while not self._stop.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):  # such as a full disk; if another run takes over, `check` notices it
                self._write_heartbeat()

    def _write_heartbeat(self) -> None:
        """Writes the current time into this run's file, which is open and may have lost its name.

        The text always has the same length and is written by one call, so that readers never see half of it.
        """
        assert self._file is not None
        os.lseek(self._file, 0, os.SEEK_SET)
        os.write(self._file, self._text())
        os.utime(self._file)

    def _text(self) -> bytes:
        """Returns the content of the lock file."""
        return json.dumps({**asdict(self.holder), "heartbeat": _now()}, indent=1).encode()

    def _file_system_seconds(self) -> float:
        """Returns the current time by the clock of the file system that the folder is on."""
        os.utime(self._own_path)
        return self._own_path.stat().st_mtime

    def _close(self) -> None:
        """Closes this run's file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _host() -> str:
    return socket.gethostname()


def _machine() -> str:
    """Returns the ids of the kernel's boot and of the process namespace, or an empty string where there are none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _process_started(pid: int) -> str | None:
    """Returns the start time of a process of this machine in the kernel's units; None if it is dead or a zombie."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else fields[18]
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "unknown"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _read(path: Path) -> str:
    """Returns the beginning of a file, or an empty string if it cannot be read."""
    try:
        return read_regular(path, 10_000).decode("utf-8", errors="replace")
    except (OSError, ValueError):
        return ""


def _modified_at(path: Path) -> float | None:
    """Returns the modification time of a file, or None if there is none.

    The file is opened first, which makes network file systems ask the server.
    """
    try:
        file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe in its place is not waited for
    except OSError:
        return None
    try:
        return os.fstat(file).st_mtime
    finally:
        os.close(file)
