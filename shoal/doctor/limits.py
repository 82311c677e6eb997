"""Checks of what the system allows a run: shared memory, open files, processes."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from shoal.doctor.findings import Finding
from shoal.doctor.machine import Case

SHARED_MEMORY = "/dev/shm"
_DOCKER_DEFAULT_BYTES = 64 << 20
_ENOUGH_BYTES = 1 << 30
_USUAL_OPEN_FILES = 1024


def check_shared_memory(case: Case) -> list[Finding]:
    """Compares the size of /dev/shm with its users: workers of the data loader, and NCCL."""
    check = "shared memory"
    try:
        system = os.statvfs(SHARED_MEMORY)
    except (OSError, AttributeError):  # Windows has no statvfs
        return [Finding("not checked", check, f"there is no {SHARED_MEMORY}")]
    size, free = system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize
    says = f"{SHARED_MEMORY} has {_in_mib(size)}, {_in_mib(free)} free"
    workers = case.config.dataset.num_workers if case.config else 0
    users = [f"dataset.num_workers = {workers} in {case.procs} processes"] if workers else []
    users += ["NCCL"] if case.uses_nccl else []
    if free >= _ENOUGH_BYTES or (case.config is not None and not users):
        return [Finding("fine", check, says)]
    fix = (
        "enlarge it: docker run --shm-size=8g, or launch.kubernetes.shared_memory, or mount -o remount,size=8G /dev/shm"
    )
    if workers:
        fix += "; dataset.num_workers: 0 needs none"
    if users and free <= _DOCKER_DEFAULT_BYTES:
        text = f"{says}, and {' and '.join(users)} keep batches or buffers there: processes die with SIGBUS"
        return [Finding("will break", check, text, fix)]
    text = f"{says}; workers of the data loader and NCCL keep batches and buffers there"
    return [Finding("slow or surprising", check, text, fix)]


def check_open_files(case: Case) -> list[Finding]:
    """Compares the limit on open files with what a process of the run opens."""
    check = "open files"
    try:
        import resource
    except ImportError:
        return [Finding("not checked", check, "this system has no limits of this kind")]
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    loader = case.config.dataset if case.config else None
    workers, prefetch = (loader.num_workers, loader.prefetch) if loader else (0, 0)
    # A tensor that comes from a worker is an open file until it is used; a peer is a few sockets.
    needed = 128 + 4 * case.procs * case.nodes + workers * (16 + 16 * prefetch)
    if limit == resource.RLIM_INFINITY or limit >= max(_USUAL_OPEN_FILES, needed):
        return [Finding("fine", check, f"a process may open {'any number' if limit < 0 else f'{limit:,}'}")]
    fix = f"raise it before the run: ulimit -n {max(65536, needed) if hard < 0 else min(hard, max(65536, needed))}"
    if limit < needed:
        text = f"a process may open {limit:,} files, and one of this run needs about {needed:,}"
        return [Finding("will break", check, text, fix)]
    text = f"a process may open {limit:,} files, fewer than the usual {_USUAL_OPEN_FILES:,}"
    return [Finding("slow or surprising", check, text, fix)]


def check_processes(case: Case) -> list[Finding]:
    """Compares the limits on processes and threads with what the run starts."""
    workers = case.config.dataset.num_workers if case.config else 0
    threads = max(1, case.machine.cores // case.procs)
    needed = case.procs * (32 + threads + 4 * workers)  # a process has about 30 threads of torch and its backends
    left = {"ulimit -u": _left_for_user(), "the cgroup's pids.max": _left_in_cgroup()}
    known = {name: number for name, number in left.items() if number is not None}
    scarce = min(known, key=lambda name: known[name], default="")
    if not scarce or known[scarce] >= needed:
        whose = "the run" if case.config else f"a run with {case.procs} process{'es' if case.procs > 1 else ''}"
        return [Finding("fine", "processes", f"there is room for about {needed:,} threads, as {whose} needs")]
    text = f"{scarce} leaves {known[scarce]:,} processes and threads, and the run needs about {needed:,}"
    fix = "raise it (ulimit -u, docker run --pids-limit), or lower launch.procs_per_node or dataset.num_workers"
    return [Finding("will break", "processes", text, fix)]


def _left_for_user() -> int | None:
    """Returns how many threads this user may still start; None if there is no limit, as for root."""
    with suppress(ImportError):
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        if limit != resource.RLIM_INFINITY and os.getuid() != 0:
            return limit - _count_threads(os.getuid())
    return None


def _count_threads(user: int) -> int:
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            if folder.stat().st_uid == user:
                total += len([*(folder / "task").iterdir()])
    return total


def _left_in_cgroup() -> int | None:
    """Returns how many threads the cgroup of this process allows beside those that it has; None without a limit."""
    with suppress(OSError, ValueError):
        entries = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        for _, controllers, path in entries:
            if controllers not in ("", "pids"):
                continue
            root = "/sys/fs/cgroup" if not controllers else "/sys/fs/cgroup/pids"
            for folder in (Path(f"{root}{path}"), Path(root)):  # in a container the path is that of the host
                if (folder / "pids.max").is_file():
                    limit = (folder / "pids.max").read_text().strip()
                    used = int((folder / "pids.current").read_text())
                    return None if limit == "max" else int(limit) - used
    return None


def _in_mib(size: float) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
