"""One folder, one run: who writes into a run folder says so in `run.lock`, and goes on saying so.

The file names its holder, which touches it every few seconds. A second run refuses while it is touched, and takes over
when the holder is a dead process of this machine, an earlier attempt of the same job, or silent for a minute.

No two machines' clocks are compared: how long a holder is silent is read from the file system's own clock and checked
by watching. A holder writes into its own file and never into a successor's, however long it was stopped in between.
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
from typing import Any, NoReturn

from shoal.errors import UserError

LOCK = "run.lock"
HEARTBEAT_SECONDS = 3.0
STALE_SECONDS = 60.0
"""A holder that was silent for so long is taken for gone."""


@dataclass(frozen=True)
class Holder:
    """Who holds a run folder, as far as others have to know."""

    host: str
    machine: str
    """Within which process ids mean the same: a boot of a kernel, and a container's view of it."""
    pid: int
    process_started: str
    """Tells a process from a later one of the same number."""
    job: str
    """What restarts it, or nothing."""
    attempt: list[int]
    """How often that was, the outermost first."""
    started: str
    token: str

    @classmethod
    def here(cls, job: str = "", attempt: Sequence[int] = (0, 0, 0)) -> Holder:
        pid = os.getpid()
        token = secrets.token_hex(8)
        return cls(_host(), _machine(), pid, _process_started(pid) or "", job, [*attempt], _now(), token)

    @classmethod
    def parse(cls, text: str) -> Holder | None:
        """None if it is not (yet) one: the file is not to be trusted."""
        try:
            fields = json.loads(text)
            fields.pop("heartbeat")
            holder = cls(**fields)
            holder.attempt > [0]  # noqa: B015  raises if it cannot be compared
            safe = isinstance(holder.pid, int) and re.fullmatch(r"[0-9a-f]{16}", holder.token)
            return holder if safe else None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def is_dead(self) -> bool:
        """Certainly: of another machine's processes we know nothing."""
        here = (self.host, self.machine) == (_host(), _machine())
        return here and _process_started(self.pid) != self.process_started

    def precedes(self, other: Holder) -> bool:
        """Whether the other is a later attempt of the same job."""
        return bool(self.job) and self.job == other.job and other.attempt > self.attempt

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.started}"


class Lease:
    """Of one run folder. `check` before each thing that two writers must not do at once."""

    def __init__(self, output_dir: str | Path, job: str = "", attempt: Sequence[int] = (0, 0, 0)):
        """`job` names what would start this run again, and `attempt` says how often it has."""
        self.folder = Path(output_dir)
        self.path = self.folder / LOCK
        self.holder = Holder.here(job, attempt)
        self._own = self.folder / f".{LOCK}.{self.holder.token}"
        self._file: int | None = None
        self._stop = threading.Event()
        self._heart: threading.Thread | None = None

    def __enter__(self) -> Lease:
        self.take()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def take(self) -> None:
        """Takes the folder, or raises UserError when its holder gives a sign of life."""
        self._file = os.open(self._own, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            self._beat()
            while not self._place(self.path):
                before = self._wait_for_the_end()
                if before is not None and self._replace(before):
                    break
        except BaseException:
            self._close()
            raise
        finally:
            self._own.unlink(missing_ok=True)
        self._heart = threading.Thread(target=self._keep_beating, name="run folder's lease", daemon=True)
        self._heart.start()

    def release(self) -> None:
        self._stop.set()
        if self._heart:
            self._heart.join()
        if self._file is not None:
            if self._is_ours():
                self.path.unlink(missing_ok=True)
            self._close()

    def check(self) -> None:
        """Raises UserError if another run has taken the folder over, as one does after this one stood still."""
        if self._is_ours() or self._put_back():
            return
        other = Holder.parse(_read(self.path))
        raise UserError(
            f"{self.folder} was taken over by {other or 'another run'} while this run stood still; this one saves "
            "nothing more and ends, the other goes on from the last checkpoint"
        )

    def _wait_for_the_end(self) -> str | None:
        """Watches the present holder: the text of its file once it is gone, None if the file is, UserError if alive."""
        text, seen = _read(self.path), _touched(self.path)
        holder = Holder.parse(text)
        silent_seconds = self._file_system_seconds() - seen if seen else 0.0
        if holder and holder.precedes(self.holder):  # a launcher starts again only what it has ended
            return text
        # Only a beat is a sign of life: a process that was just killed is there a while longer, and a time from the
        # future or long ago may be another clock's. So in any case we watch for two beats.
        silent_seconds = min(max(silent_seconds, 0), STALE_SECONDS)
        wait_seconds = max(STALE_SECONDS - silent_seconds, 2.5 * HEARTBEAT_SECONDS)
        watched_since, told = time.monotonic(), False
        while (watched_seconds := time.monotonic() - watched_since) < wait_seconds:
            if not told and watched_seconds > 2.5 * HEARTBEAT_SECONDS:
                left = f"{wait_seconds - watched_seconds:.0f} s"
                who = holder or "an unknown run"
                print(f"shoal: {self.folder} was in use by {who}, which is silent; waiting {left}", file=sys.stderr)
                told = True
            if holder and holder.is_dead():
                return text
            if not self.path.exists():
                return None
            time.sleep(0.1)
            if (touched := _touched(self.path)) != seen:
                now = Holder.parse(_read(self.path))
                if now is None or holder is None or now.token != holder.token:
                    return None  # released, or somebody else's by now: look again
                self._refuse(now, max(0.0, self._file_system_seconds() - touched) if touched else 0.0)
        return text

    def _refuse(self, holder: Holder, silent_seconds: float) -> NoReturn:
        raise UserError(
            f"experiment.output_dir = {str(self.folder)!r} is in use by {holder}, last seen {silent_seconds:.0f} s "
            "ago; wait for it, stop it, or choose another experiment.output_dir"
        )

    def _replace(self, before: str) -> bool:
        """Puts our file in the place of a holder that is gone. Of all who try at once, one succeeds.

        Only who owns the claim to this very predecessor may replace it, and looks again once it does.
        """
        holder = Holder.parse(before)
        claim = self.folder / f".{LOCK}.after.{holder.token if holder else 'nobody'}"
        if not self._place(claim):
            claimed = _touched(claim)
            if claimed and self._file_system_seconds() - claimed > 10:  # whoever made it died just then
                claim.unlink(missing_ok=True)
            time.sleep(0.05)
            return False
        try:
            now = Holder.parse(_read(self.path))
            same = now.token == holder.token if now and holder else now is holder
            if same and self.path.exists():
                self._own.replace(self.path)
                return True
            return False
        finally:
            claim.unlink(missing_ok=True)

    def _place(self, path: Path) -> bool:
        """Makes `path` ours unless it is there. A link, because only that is atomic on network file systems too."""
        try:
            os.link(self._own, path)
            return True
        except FileExistsError:
            return self._own.stat().st_nlink > 1  # a network file system may lose the answer and ask again
        except OSError:  # a file system without links
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return False
            if path == self.path:
                self._own.replace(path)
            return True

    def _put_back(self) -> bool:
        """Someone deleted the file. Whoever took the folder since then has made another."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = os.open(self._own, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            os.write(file, self._text())
            if self._place(self.path):
                self._file = file  # the old one stays open: the other thread may be writing to its number
                return True
            os.close(file)
        except OSError:  # what keeps us from writing will be said by the save
            return not self.path.exists()
        finally:
            self._own.unlink(missing_ok=True)
        return False

    def _is_ours(self) -> bool:
        holder = Holder.parse(_read(self.path))
        return holder is not None and holder.token == self.holder.token

    def _keep_beating(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):  # a full disk; who took over meanwhile is noticed at the next save
                self._beat()

    def _beat(self) -> None:
        """Writes into our own file, wherever its name went: text of the same length, at once."""
        assert self._file is not None
        os.pwrite(self._file, self._text(), 0)
        os.utime(self._file)

    def _text(self) -> bytes:
        fields: dict[str, Any] = {**asdict(self.holder), "heartbeat": _now()}
        return json.dumps(fields, indent=1).encode()

    def _file_system_seconds(self) -> float:
        """The present on the clock that stamps files here."""
        os.utime(self._own)
        return self._own.stat().st_mtime

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _host() -> str:
    return socket.gethostname()


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _process_started(pid: int) -> str | None:
    """When a process of this machine began, in its own units; None if there is none, or only its remains."""
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
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(10_000)
    except OSError:
        return ""


def _touched(path: Path) -> float | None:
    """When the file was last written. Opened first, which makes network file systems ask the server."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return None
