"""Checks of the disk that the run folder is on: whether it can be written, its space, and its speed."""

from __future__ import annotations

import errno
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

from shoal.doctor.conditions import NETWORK_FILE_SYSTEMS
from shoal.doctor.findings import Finding
from shoal.doctor.machine import Case

SLOW_BYTES_PER_SECOND = 50e6
"""A disk that writes slower than this is reported."""
_CHUNK_BYTES = 4 << 20
_PROBE_BYTES = 256 << 20
_PROBE_SECONDS = 2.0
_FEW_FILES = 10_000


@dataclass(frozen=True)
class DiskSpeed:
    """How fast a file was written to the disk itself, not only to memory."""

    bytes_per_second: float
    bytes_written: int


def check_disk(case: Case, checkpoint_bytes: int | None) -> list[Finding]:
    """Examines the disk of the run folder. `checkpoint_bytes` is the size of a checkpoint, if it is known."""
    folder = Path(case.config.output_dir if case.config else "runs")
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    where = f"experiment.output_dir = {str(folder)!r}" if case.config else f"the folder {existing}"
    if not existing.is_dir():
        return [Finding("will break", "disk", f"{where}: {existing} is not a folder", "choose another folder")]
    free = shutil.disk_usage(existing).free
    try:
        speed = measure_speed(existing, min(_PROBE_BYTES, free // 20))
    except OSError as error:
        text = f"{where} cannot be written ({error.strerror or error})"
        fix = "choose another folder in experiment.output_dir"
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return [Finding("will break", "disk", text, f"{fix}, or make room" if full else fix)]
    return [
        _judge_space(case, where, existing, free, checkpoint_bytes),
        _judge_speed(case, where, existing, speed, checkpoint_bytes),
    ]


def measure_speed(folder: Path, limit_bytes: int, limit_seconds: float = _PROBE_SECONDS) -> DiskSpeed:
    """Writes a file that nobody else sees, and removes it. Every few megabytes are flushed to the disk."""
    chunk, written, began = os.urandom(_CHUNK_BYTES), 0, time.perf_counter()
    with NamedTemporaryFile(dir=folder, prefix=".shoal-doctor-", buffering=0) as file:
        while written < max(_CHUNK_BYTES, limit_bytes) and time.perf_counter() - began < limit_seconds:
            file.write(chunk)
            os.fsync(file.fileno())
            written += len(chunk)
        seconds = time.perf_counter() - began
    return DiskSpeed(written / seconds, written)


def _judge_space(case: Case, where: str, existing: Path, free: int, checkpoint_bytes: int | None) -> Finding:
    says = f"{where} has {_in_gb(free)} free"
    if hasattr(os, "statvfs") and os.statvfs(existing).f_files > 0 and os.statvfs(existing).f_favail < _FEW_FILES:
        text = f"{where} has room for {os.statvfs(existing).f_favail:,} more files alone"
        return Finding("will break", "disk space", text, "remove files, or choose another experiment.output_dir")
    if checkpoint_bytes is None or case.config is None:
        return Finding("fine", "disk space", says)
    keep = case.config.checkpoint
    copies = keep.keep_last + keep.keep_best + 1  # the next one is written before an old one is removed
    needed = copies * checkpoint_bytes
    says += f"; a checkpoint takes about {_in_gb(checkpoint_bytes)}, and up to {copies} exist at a time"
    if free >= needed:
        return Finding("fine", "disk space", says)
    fix = "make room, lower checkpoint.keep_last or checkpoint.keep_best, or choose another experiment.output_dir"
    return Finding("will break", "disk space", f"{says}: {_in_gb(needed)}", fix)


def _judge_speed(case: Case, where: str, existing: Path, speed: DiskSpeed, checkpoint_bytes: int | None) -> Finding:
    kind = case.machine.file_system_of(str(existing))
    says = f"{where} ({kind or 'unknown file system'}) writes {speed.bytes_per_second / 1e6:,.0f} MB/s"
    if checkpoint_bytes is not None:
        says += f", a checkpoint in {_in_seconds(checkpoint_bytes / speed.bytes_per_second)}"
    if speed.bytes_per_second >= SLOW_BYTES_PER_SECOND:
        return Finding("fine", "disk speed", says)
    elsewhere = "a faster network storage" if kind in NETWORK_FILE_SYSTEMS else "a faster disk"
    fix = (
        f"choose {elsewhere} in experiment.output_dir, save less often (checkpoint.every), or set checkpoint.async_save"
    )
    return Finding("slow or surprising", "disk speed", f"{says}, less than {SLOW_BYTES_PER_SECOND / 1e6:.0f} MB/s", fix)


def _in_gb(size: float) -> str:
    if size < 1e5:
        return f"{size / 1e3:,.1f} kB"
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def _in_seconds(seconds: float) -> str:
    return f"about {seconds:.0f} s" if seconds >= 1 else "less than a second"
