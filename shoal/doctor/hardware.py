"""Checks of what a machine computes with: versions, GPUs and their links, backends, compilers, CPU instructions."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory

from shoal.doctor.findings import Finding
from shoal.doctor.machine import Case, version_of

BUSY_GPU_MIB = 1024
"""A GPU with more memory in use, in MiB, counts as busy."""
_TOOL_SECONDS = 20.0
"""The time limit of a tool such as nvidia-smi, or of one compilation."""


def check_versions(case: Case) -> list[Finding]:
    """Compares the installed versions with those that shoal was made for."""
    versions = case.machine.versions
    findings = []
    for requirement in importlib.metadata.requires("shoal") or ():
        found = re.match(r"([\w.-]+)(\[[\w,]+\])?\s*>=\s*([\d.]+)", requirement)
        if not found or found[1] not in versions or version_of(versions[found[1]]) >= version_of(found[3]):
            continue
        breaks = "extra ==" not in requirement or case.uses(found[1])
        findings.append(
            Finding(
                "will break" if breaks else "slow or surprising",
                "versions",
                f"{found[1]} {versions[found[1]]} is older than {found[3]}, which shoal was made for",
                f"pip install -U '{found[1]}>={found[3]}'",
            )
        )
    names = [f"{name} {version}" for name, version in versions.items() if not name.startswith("nvidia-")]
    return findings or [Finding("fine", "versions", ", ".join(names))]


def check_gpus(case: Case) -> list[Finding]:
    """Looks at the GPUs that torch sees, and whether they are enough."""
    machine = case.machine
    if not machine.gpus:
        why = f"torch {machine.versions.get('torch', '')} has no CUDA" if not machine.cuda else "CUDA finds none"
        if case.config is not None and case.config.training.device == "cuda":
            fix = "set training.device: cpu, or run on a machine with a GPU"
            return [Finding("will break", "GPUs", f"training.device = cuda, but torch sees no GPU ({why})", fix)]
        return [Finding("not checked", "GPUs", f"torch sees no GPU ({why})")]
    kinds = ", ".join(f"{machine.gpus.count(kind)} × {kind}" for kind in dict.fromkeys(machine.gpus))
    findings = [Finding("fine", "GPUs", f"{kinds}, driver {machine.driver or 'unknown'}, CUDA {machine.cuda}")]
    if case.uses_nccl and case.procs > len(machine.gpus):
        findings.append(
            Finding(
                "will break",
                "GPUs",
                f"{case.procs} processes on {len(machine.gpus)} GPUs: NCCL needs one GPU for each process",
                "set launch.procs_per_node to the number of GPUs, or distributed.backend: gloo",
            )
        )
    return findings


def check_gpu_use(case: Case) -> list[Finding]:
    """Finds GPUs whose memory other processes use already."""
    if not case.machine.gpus:
        return []  # `check_gpus` says so
    text = _output(["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"])
    if text is None:
        return [Finding("not checked", "use of GPUs", "nvidia-smi is not there, or does not answer")]
    rows = [line.split(",") for line in text.splitlines() if line.count(",") == 1]
    busy = [f"GPU {row[0].strip()} ({int(row[1]):,} MiB)" for row in rows if int(row[1]) > BUSY_GPU_MIB]
    if not busy:
        return [Finding("fine", "use of GPUs", "no other process uses their memory")]
    fix = "end the other processes (nvidia-smi shows them), or choose GPUs by CUDA_VISIBLE_DEVICES in launch.env"
    return [Finding("slow or surprising", "use of GPUs", f"memory is in use on {', '.join(busy)}", fix)]


def check_gpu_links(case: Case) -> list[Finding]:
    """Looks at the paths between the GPUs of this machine."""
    import torch

    count = len(case.machine.gpus)
    if count == 0:
        return []  # `check_gpus` says so
    if count == 1:
        return [Finding("not checked", "links of GPUs", "there is one GPU")]
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    topology = _output(["nvidia-smi", "topo", "-m"]) or ""
    kinds = {word for line in topology.splitlines() if line.startswith("GPU") for word in line.split()[1 : count + 1]}
    says = f"links: {', '.join(sorted(kinds - {'X'}))}" if kinds else "nvidia-smi topo does not answer"
    if not apart:
        return [Finding("fine", "links of GPUs", f"all GPUs can read each other's memory ({says})")]
    return [
        Finding(
            "slow or surprising",
            "links of GPUs",
            f"{len(apart)} of {len(pairs)} pairs of GPUs cannot read each other's memory, for example {apart[0]} "
            f"({says}); what they exchange goes through host memory",
            "nothing, if the GPUs have no NVLink; else look at the IOMMU and ACS settings of the machine",
        )
    ]


def check_backends(case: Case) -> list[Finding]:
    """Asks torch for the backends of collectives."""
    import torch.distributed as dist

    if not dist.is_available():
        return [Finding("will break", "backends", "this torch has no torch.distributed", "install another torch")]
    missing = [] if dist.is_gloo_available() else ["gloo"]
    if case.uses_nccl and case.machine.gpus and not dist.is_nccl_available():
        missing.append("NCCL")
    if missing:
        text = f"this torch has no {' and no '.join(missing)}"
        return [Finding("will break", "backends", text, "install a torch that has it, from pytorch.org")]
    nccl = f"NCCL {case.machine.nccl}" if case.machine.nccl else "no NCCL"
    return [Finding("fine", "backends", f"gloo, {nccl}")]


def check_compiler(case: Case) -> list[Finding]:
    """Compiles a small program, and looks for ninja: torch.compile and DeepSpeed's operators need them."""
    compiles = case.config is not None and case.config.training.compile
    users = [*(["training.compile"] if compiles else []), *(["DeepSpeed"] if case.uses("deepspeed") else [])]
    problems = []
    if problem := _why_not_compiling(case):
        problems.append((problem, "install a C++ compiler, for example apt install g++, or set CXX"))
    if case.uses("deepspeed") and shutil.which("ninja", path=_path(case)) is None:
        problems.append(("ninja is not on the PATH", "pip install ninja"))
    if compiles and case.on_gpu and not Path(sysconfig.get_path("include"), "Python.h").is_file():
        problems.append(("Python.h is missing, which triton needs", "apt install python3-dev"))
    if not problems:
        return [Finding("fine", "compiler", f"{_compiler(case)} works" + (f", for {users[0]}" if users else ""))]
    if not users:
        why = "; this run does not need it" if case.config else "; training.compile and DeepSpeed need it"
        return [Finding("slow or surprising", "compiler", problem + why, fix) for problem, fix in problems]
    return [
        Finding("will break", "compiler", f"{problem}, and {' and '.join(users)} needs it", fix)
        for problem, fix in problems
    ]


def _compiler(case: Case) -> str:
    return case.machine.variables.get("CXX") or "g++"


def _path(case: Case) -> str:
    return case.machine.variables.get("PATH", os.defpath)


def _why_not_compiling(case: Case) -> str:
    """Returns why a C++ program cannot be compiled; empty if it can."""
    compiler = _compiler(case)
    if shutil.which(compiler.split()[0], path=_path(case)) is None:
        return f"there is no compiler ({compiler} is not on the PATH)"
    with TemporaryDirectory(prefix="shoal-doctor-") as folder:
        source = Path(folder, "probe.cpp")
        source.write_text('#include <vector>\nextern "C" int probe() { return std::vector<int>(1).size(); }\n')
        command = [*compiler.split(), "-shared", "-fPIC", str(source), "-o", f"{folder}/probe.so"]
        try:
            variables = dict(case.machine.variables)
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_SECONDS, env=variables)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{compiler} cannot be run: {error}"
    first_line = next(iter(done.stderr.splitlines()), "")
    return f"{compiler} cannot compile: {first_line}" if done.returncode else ""


CPU_PROBE = """
import torch
for dtype in (torch.bfloat16, torch.float32):
    layer = torch.nn.Linear(256, 256, dtype=dtype)
    layer(torch.ones(64, 256, dtype=dtype)).float().sum().backward()
"""
_SAFE_ISA = "AVX512_CORE_BF16"


def check_cpu_instructions(case: Case, probe: str = CPU_PROBE) -> list[Finding]:
    """Computes with bf16 and fp32 matrices on the CPU in a process of its own, which a bad instruction may kill.

    Some virtual machines announce AMX and then trap on it; oneDNN would use it for bf16.
    """
    variables, check = dict(case.machine.variables), "CPU instructions"
    code = _exit_code(probe, variables)
    if code == 0:
        return [Finding("fine", check, "matrix products in bf16 and fp32 work")]
    if code is None:
        return [Finding("not checked", check, "a matrix product in bf16 did not end within 60 s")]
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    if code != -signal.SIGILL:
        return [Finding("not checked", check, f"the process that tried matrix products ended with {name}")]
    precision = case.config.training.mixed_precision if case.config else ""
    breaks = not case.on_gpu and precision in ("bf16", "pure_bf16", "fp8")
    cured = _exit_code(probe, {**variables, "ONEDNN_MAX_CPU_ISA": _SAFE_ISA}) == 0
    fix = f"set launch.env: {{ONEDNN_MAX_CPU_ISA: {_SAFE_ISA}}}" + (
        ", with which the same products work here" if cured else "; if that is not enough, train in fp32"
    )
    text = "a matrix product in bf16 on the CPU was killed by SIGILL: this machine announces instructions it lacks"
    return [Finding("will break" if breaks else "slow or surprising", check, text, fix)]


def _exit_code(program: str, variables: dict[str, str]) -> int | None:
    """Returns the exit code of a Python program, or None if it does not end in time."""
    command = [sys.executable, "-c", program]
    try:
        return subprocess.run(command, capture_output=True, timeout=60, env=variables).returncode
    except subprocess.TimeoutExpired:
        return None


def _output(command: list[str]) -> str | None:
    """Returns what a tool prints, or None if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
