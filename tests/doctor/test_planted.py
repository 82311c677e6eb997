"""Problems that are planted for real are found: small /dev/shm, low limits, a taken port, a slow disk, …"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from planted import case_of, levels

from shoal.doctor import addresses, disk, hardware, limits
from shoal.doctor.findings import Finding, exit_code, ranked, run_check
from shoal.errors import UserError

PROGRAM = Path(__file__).parent / "planted.py"
WORKERS = {"dataset": {"num_workers": 2}}


def check_in_process(
    checks: str, keys: dict[str, Any] | None = None, nodes: int = 1, before: str = "", command: tuple[str, ...] = ()
) -> dict[str, Finding]:
    """Runs checks in a process; `command` starts it in namespaces, where the shell commands `before` run first."""
    words = [sys.executable, str(PROGRAM), checks, json.dumps(keys or {}), str(nodes)]
    shell = ("sh", "-c", f'{before}\nexec "$@"', "sh") if before else ()
    done = subprocess.run([*command, *shell, *words], capture_output=True, text=True)
    if done.returncode and command and "shoal" not in done.stderr:
        pytest.skip(f"NOT TESTED: this machine does not allow {' '.join(command)}: {done.stderr}")
    assert done.returncode == 0, done.stderr
    return {finding.check: finding for finding in (Finding(**one) for one in json.loads(done.stdout))}


def in_namespaces(*kinds: str) -> tuple[str, ...]:
    """Returns a command that starts another one in namespaces of its own, or skips the test loudly."""
    if shutil.which("unshare") is None or os.getuid() != 0:
        pytest.skip("NOT TESTED: namespaces need root and unshare")
    return ("unshare", *(f"--{kind}" for kind in kinds))


def test_small_shared_memory_a_full_disk_and_a_name_that_is_not_found(tmp_path: Path) -> None:
    disk_folder = tmp_path / "disk"
    disk_folder.mkdir()
    before = (
        "mount -t tmpfs -o size=16m tmpfs /dev/shm && hostname nowhere-to-be-found.invalid && "
        f"mount -t tmpfs -o size=200m tmpfs {disk_folder}"
    )
    keys = {**WORKERS, "experiment": {"output_dir": str(disk_folder / "run")}}
    found = check_in_process(
        "shared memory,name of this host,disk", keys, 2, f"set -e\n{before}", in_namespaces("mount", "uts")
    )
    assert found["shared memory"].level == "will break"
    assert "/dev/shm has 16 MiB" in found["shared memory"].message
    assert "dataset.num_workers" in found["shared memory"].fix
    assert found["name of this host"].level == "will break"
    assert "nowhere-to-be-found.invalid" in found["name of this host"].message
    assert found["disk space"].level == "will break"  # 4 checkpoints of 100 MB do not fit into 200 MB
    assert "checkpoint.keep_last" in found["disk space"].fix
    assert found["disk speed"].level in ("fine", "slow or surprising")
    assert not [*disk_folder.iterdir()]


def test_a_machine_in_order_is_fine(tmp_path: Path) -> None:
    case = case_of({"experiment": {"output_dir": str(tmp_path / "run")}})
    found = disk.check_disk(case, 1000)
    assert levels(found)["disk space"] == "fine"
    assert not [*tmp_path.iterdir()]  # the probe is gone, and no run folder was made
    assert levels(limits.check_shared_memory(case)) == {"shared memory": "fine"}  # no worker uses it
    assert levels(limits.check_processes(case)) == {"processes": "fine"}
    assert levels(addresses.check_master(case)) == {"master port": "fine"}


@contextlib.contextmanager
def file_limit(number: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("limit", "keys", "level"),
    [
        (100, {}, "will break"),
        (512, {}, "slow or surprising"),
        (512, {"dataset": {"num_workers": 16}}, "will break"),
        (4096, {"dataset": {"num_workers": 16}}, "fine"),
    ],
)
def test_a_low_limit_of_open_files(limit: int, keys: dict[str, Any], level: str) -> None:
    with file_limit(limit):
        (found,) = limits.check_open_files(case_of(keys))
    assert found.level == level
    assert level == "fine" or "ulimit -n" in found.fix


def test_a_taken_port_and_a_master_that_is_not_found() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        found = addresses.check_master(case_of({}, master_port=port, master_address="nowhere.invalid"))
    assert levels(found) == {"master address": "will break", "master port": "will break"}
    assert f"launch.master_port = {port}" in found[-1].message
    (free,) = addresses.check_master(case_of({}, master_port=port))
    assert (free.level, free.message) == ("fine", f"port {port} is free")


@pytest.mark.parametrize(
    ("keys", "level"),
    [
        ({}, "slow or surprising"),
        ({"training": {"max_steps": 1, "compile": True}}, "will break"),
        ({"distributed": {"strategy": "deepspeed"}}, "will break"),
    ],
)
def test_a_missing_compiler(tmp_path: Path, keys: dict[str, Any], level: str) -> None:
    found = hardware.check_compiler(case_of(keys, facts={"variables": {"PATH": str(tmp_path)}}))
    assert {finding.level for finding in found} == {level}
    assert "not on the PATH" in found[0].message
    assert ("pip install ninja" in [finding.fix for finding in found]) is ("distributed" in keys)


def test_a_compiler_that_cannot_compile(tmp_path: Path) -> None:
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho 'fatal error: no headers' >&2\nexit 1\n")
    broken.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/bin:/usr/bin"}
    (found,) = hardware.check_compiler(
        case_of({"training": {"max_steps": 1, "compile": True}}, facts={"variables": variables})
    )
    assert found.level == "will break"
    assert "fatal error: no headers" in found.message


def test_a_cpu_that_announces_instructions_it_lacks() -> None:
    """The probe is killed as an AMX instruction would kill it, unless oneDNN is kept from using it."""
    probe = (
        "import os, signal\n"
        "if os.environ.get('ONEDNN_MAX_CPU_ISA') != 'AVX512_CORE_BF16': os.kill(os.getpid(), signal.SIGILL)\n"
    )
    variables = {name: value for name, value in os.environ.items() if name != "ONEDNN_MAX_CPU_ISA"}
    bf16 = {"training": {"max_steps": 1, "mixed_precision": "bf16"}}
    (found,) = hardware.check_cpu_instructions(case_of(bf16, facts={"variables": variables}), probe)
    assert found.level == "will break"
    assert "SIGILL" in found.message
    assert "ONEDNN_MAX_CPU_ISA: AVX512_CORE_BF16" in found.fix
    assert "with which the same products work here" in found.fix
    (in_fp32,) = hardware.check_cpu_instructions(case_of({}, facts={"variables": variables}), probe)
    assert in_fp32.level == "slow or surprising"
    cured = {**variables, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    (fine,) = hardware.check_cpu_instructions(case_of(bf16, facts={"variables": cured}), probe)
    assert fine.level == "fine"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in ("/proc/nowhere/run", str(file / "run")):
        (found,) = disk.check_disk(case_of({"experiment": {"output_dir": folder}}), None)
        assert found.level == "will break", folder
        assert "experiment.output_dir" in found.message
        assert "make room" not in found.fix


def test_no_gpu_for_a_run_that_needs_one() -> None:
    (found,) = hardware.check_gpus(case_of({"training": {"max_steps": 1, "device": "cuda"}}))
    assert found.level == "will break"
    assert "training.device" in found.fix
    (backends,) = hardware.check_backends(case_of({"training": {"max_steps": 1, "device": "cuda"}}, procs=2))
    assert backends.level == "fine"  # the GPU is what is missing
    (skipped,) = hardware.check_gpus(case_of({}))
    assert skipped.level == "not checked"
    shared = case_of({}, procs=4, facts={"gpus": ("H200", "H200"), "cuda": "13.0"})
    assert shared.uses_nccl
    assert "4 processes on 2 GPUs" in hardware.check_gpus(shared)[-1].message
    for check in (hardware.check_gpu_use, hardware.check_gpu_links):
        assert check(case_of({})) == []  # one line about GPUs is enough


def test_old_versions(tmp_path: Path) -> None:
    old = case_of(
        {"distributed": {"strategy": "deepspeed"}}, facts={"versions": {"torch": "2.5.1", "deepspeed": "0.16.0"}}
    )
    found = hardware.check_versions(old)
    assert {finding.message.split()[0]: finding.level for finding in found} == {
        "torch": "will break",
        "deepspeed": "will break",
    }
    assert "pip install -U 'torch>=" in found[0].fix


def test_a_check_that_hangs_or_fails_says_so() -> None:
    hang = threading.Event()
    (late,) = run_check("slow", 0.1, lambda: [Finding("fine", "slow", "")] if hang.wait(20) else [])
    hang.set()
    assert (late.level, "limit of 0.1 s" in late.message) == ("not checked", True)

    def fail() -> list[Finding]:
        raise ValueError("no such thing")

    (failed,) = run_check("broken", 5, fail)
    assert failed == Finding("not checked", "broken", "the check failed: ValueError: no such thing")

    def refuse() -> list[Finding]:
        raise UserError("training.x = 3: it is wrong; use 4")

    (refused,) = run_check("refused", 5, refuse)
    assert refused == Finding("will break", "refused", "training.x = 3: it is wrong", "use 4")
    assert [one.level for one in ranked([late, refused])] == ["will break", "not checked"]
    assert (exit_code([late, failed]), exit_code([late, refused])) == (0, 1)


class Throttle:
    """A group of processes that may write little to the disk of a folder, or start few threads (cgroup v1)."""

    def __init__(self, controller: str):
        self.folder = Path("/sys/fs/cgroup", controller, f"shoal-test-{uuid.uuid4().hex[:6]}")

    def __enter__(self) -> Throttle:
        try:
            self.folder.mkdir()
        except OSError as error:
            pytest.skip(f"NOT TESTED: {self.folder} cannot be made: {error}")
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def limit(self, file: str, value: str) -> None:
        try:
            (self.folder / file).write_text(value)
        except OSError as error:
            self.folder.rmdir()
            pytest.skip(f"NOT TESTED: {file} = {value}: {error}")

    @property
    def join(self) -> str:
        """The shell command that puts a process into the group."""
        return f"echo $$ > {self.folder}/cgroup.procs"


@pytest.mark.slow
def test_a_slow_disk(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    with Throttle("blkio") as throttle:
        throttle.limit("blkio.throttle.write_bps_device", f"{os.major(device)}:{os.minor(device)} {4 << 20}")
        keys = {"experiment": {"output_dir": str(tmp_path / "run")}}
        found = check_in_process("disk", keys, before=throttle.join)
    assert found["disk speed"].level == "slow or surprising"
    speed = float(found["disk speed"].message.split("writes ")[1].split()[0])
    assert 2 <= speed <= 8  # of 4.2 MB/s
    assert "checkpoint.every" in found["disk speed"].fix


@pytest.mark.slow
def test_a_group_that_may_start_few_threads() -> None:
    with Throttle("pids") as throttle:
        throttle.limit("pids.max", "20")
        found = check_in_process("processes", WORKERS, before=throttle.join)
    assert found["processes"].level == "will break"
    assert "pids.max" in found["processes"].message
