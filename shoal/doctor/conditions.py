"""What the rows of `known_bad.py` look for: functions from a case to a text, empty if the row does not apply."""

from __future__ import annotations

import re
from collections.abc import Callable

from shoal.doctor.machine import Case, version_of
from shoal.processes.world import LOOPBACK

Condition = Callable[[Case], str]

NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "lustre", "gpfs", "cifs", "smb3", "beegfs", "ceph", "fuse.sshfs", "afs", "9p")
"""The types of file systems that are on another machine."""


def older(case: Case, package: str, than: str) -> bool:
    """Returns whether a package is installed and older than a version."""
    installed = version_of(case.machine.versions.get(package, ""))
    return bool(installed) and installed < version_of(than)


def named(case: Case, *packages: str) -> str:
    """Returns the names of packages with their versions."""
    return ", ".join(f"{name} {case.machine.versions[name]}" for name in packages)


def old_beside(package: str, version: str, other: str, other_version: str) -> Condition:
    """Returns a function that finds a package older than `version` beside another one from `other_version` on."""

    def found(case: Case) -> str:
        has_other = other in case.machine.versions and not older(case, other, other_version)
        return named(case, package, other) if older(case, package, version) and has_other else ""

    return found


def variable(name: str, *values: str, only_if: Callable[[Case], bool] = lambda case: True) -> Condition:
    """Returns a function that finds a variable with one of these values, or with any value if none are given."""

    def found(case: Case) -> str:
        value = case.machine.variables.get(name)
        return f"{name}={value}" if value is not None and (not values or value in values) and only_if(case) else ""

    return found


def first(*functions: Condition) -> Condition:
    """Returns a function that finds what the first of several finds."""
    return lambda case: next((text for function in functions if (text := function(case))), "")


def is_on_gpu(case: Case) -> bool:
    """Returns whether the run would use GPUs."""
    return case.on_gpu


def compiles(case: Case) -> bool:
    """Returns whether the config turns torch.compile on."""
    return case.config is not None and case.config.training.compile


def wants_tf32(case: Case) -> bool:
    """Returns whether the config turns TF32 on."""
    return case.config is not None and case.config.training.tf32


_TORCHAO_BUILDS: dict[tuple[int, ...], str] = {(0, 13): "2.8", (0, 14): "2.9", (0, 16): "2.10", (0, 17): "2.11"}
"""The version of torch that a release of torchao has its compiled kernels for."""


def torchao(case: Case) -> str:
    """Finds a torchao whose compiled kernels are for another torch."""
    wanted = _TORCHAO_BUILDS.get(version_of(case.machine.versions.get("torchao", ""))[:2])
    torch = version_of(case.machine.versions.get("torch", ""))[:2]
    return named(case, "torchao", "torch") if wanted and torch and torch != version_of(wanted) else ""


def torch_pins(case: Case) -> str:
    """Finds packages that require another version of torch than the one that is installed."""
    torch = version_of(case.machine.versions.get("torch", ""))
    wrong = [
        f"{package} {case.machine.versions.get(package, '')} for torch {pin}"
        for package, pin in case.machine.built_for_torch.items()
        if torch and version_of(pin) != torch
    ]
    return f"torch {case.machine.versions['torch']}, {', '.join(wrong)}" if wrong else ""


def driver(case: Case) -> str:
    """Finds an NVIDIA driver that is too old for torch's CUDA."""
    needed = {11: 450, 12: 525, 13: 580}.get(next(iter(version_of(case.machine.cuda)), 0))
    driver = version_of(case.machine.driver)
    if not needed or not driver or driver[0] >= needed:
        return ""
    return f"NVIDIA driver {case.machine.driver}, torch with CUDA {case.machine.cuda} (needs {needed} or newer)"


def cpu_build(case: Case) -> str:
    """Finds a torch without CUDA on a machine with NVIDIA GPUs."""
    machine = case.machine
    if machine.cuda or not machine.gpu_files:
        return ""
    return f"torch {machine.versions.get('torch', '')} without CUDA on a machine with {machine.gpu_files} NVIDIA GPUs"


def kernel(case: Case) -> str:
    """Finds a Linux kernel before 5.5."""
    old = case.machine.system == "Linux" and version_of(case.machine.kernel) < (5, 5)
    return f"Linux kernel {case.machine.kernel}" if case.machine.kernel and old else ""


def libraries(case: Case) -> str:
    """Finds CUDA libraries in LD_LIBRARY_PATH, if torch was installed with libraries of its own."""
    brings_its_own = any(name.startswith(("nvidia-cudnn", "nvidia-nccl")) for name in case.machine.versions)
    found = case.machine.path_libraries
    return f"LD_LIBRARY_PATH has {found[0]}" if brings_its_own and found else ""


def threads(case: Case) -> str:
    """Finds more OpenMP threads than cores."""
    value = case.machine.variables.get("OMP_NUM_THREADS", "")
    if not value.isdigit() or int(value) * case.procs <= case.machine.cores:
        return ""
    return f"OMP_NUM_THREADS={value} × {case.procs} processes on {case.machine.cores} cores"


def gloo_interface(case: Case) -> str:
    """Finds an interface in GLOO_SOCKET_IFNAME that this machine does not have."""
    value = case.machine.variables.get("GLOO_SOCKET_IFNAME", "")
    missing = [name for name in value.split(",") if name and name not in case.machine.interfaces]
    return f"GLOO_SOCKET_IFNAME={value} (this machine has {', '.join(case.machine.interfaces)})" if missing else ""


def nccl_interface(case: Case) -> str:
    """Finds a filter in NCCL_SOCKET_IFNAME that leaves no interface of this machine."""
    value = case.machine.variables.get("NCCL_SOCKET_IFNAME", "")
    if not value or any(map(nccl_filter(value), case.machine.interfaces)):
        return ""
    return f"NCCL_SOCKET_IFNAME={value} (this machine has {', '.join(case.machine.interfaces)})"


def nccl_filter(value: str) -> Callable[[str], bool]:
    """Returns whether NCCL would use an interface: names are prefixes, `=` is for whole names, `^` excludes."""
    excludes = value.startswith("^")
    value = value.removeprefix("^")
    is_exact = value.startswith("=")
    names = tuple(name for name in value.removeprefix("=").split(",") if name)
    return lambda name: (name in names if is_exact else name.startswith(names)) is not excludes


def interfaces_differ(case: Case) -> str:
    """Finds that gloo and NCCL are not told the same interface, for a run on several machines."""
    gloo, nccl = (case.machine.variables.get(f"{name}_SOCKET_IFNAME", "") for name in ("GLOO", "NCCL"))
    if case.nodes < 2 or not case.uses_nccl or not (gloo or nccl):
        return ""
    agree = bool(gloo and nccl) and all(map(nccl_filter(nccl), gloo.split(",")))
    return "" if agree else f"GLOO_SOCKET_IFNAME={gloo or 'not set'}, NCCL_SOCKET_IFNAME={nccl or 'not set'}"


def loopback_interface(case: Case) -> str:
    """Finds the loopback interface as the network of several machines."""
    names = [name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if case.machine.variables.get(name) == "lo"]
    return f"{names[0]}=lo on {case.nodes} machines" if names and case.nodes > 1 else ""


def own_name_is_loopback(case: Case) -> str:
    """Finds that the name of this host leads to loopback, for a run on several machines."""
    addresses = case.machine.own_addresses
    if case.nodes < 2 or "GLOO_SOCKET_IFNAME" in case.machine.variables or not addresses:
        return ""
    loopback = [address for address in addresses if address.startswith("127.") or address == "::1"]
    return f"{case.machine.host} resolves to {', '.join(loopback)}" if len(loopback) == len(addresses) else ""


def local_master(case: Case) -> str:
    """Finds a master address that every machine understands as itself."""
    is_local = case.master_address in LOOPBACK or case.master_address.startswith("127.")
    return f"master address {case.master_address} on {case.nodes} machines" if case.nodes > 1 and is_local else ""


def pinned_memory(case: Case) -> str:
    """Finds a limit on pinned memory on a machine with InfiniBand."""
    limit = case.machine.locked_memory_bytes
    if not case.machine.infiniband or not case.uses_nccl or limit >= 1 << 30:
        return ""
    return f"{', '.join(case.machine.infiniband)} with ulimit -l {limit / 1024:.0f} KiB"


def visible_devices(case: Case) -> str:
    """Finds a CUDA_VISIBLE_DEVICES with a GPU twice, or with fewer GPUs than processes."""
    value = case.machine.variables.get("CUDA_VISIBLE_DEVICES")
    if value is None or not (case.machine.gpu_files or case.machine.gpus):
        return ""
    names = [name for name in value.split(",") if name.strip()]
    if len({*names}) < len(names):
        return f"CUDA_VISIBLE_DEVICES={value} names a GPU twice"
    too_few = len(names) < case.procs and (case.uses_nccl or not names)
    return f"CUDA_VISIBLE_DEVICES={value!r} for {case.procs} processes" if too_few else ""


def allocator(case: Case) -> str:
    """Finds two different settings of torch's allocator."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    values = [case.machine.variables.get(name) for name in names]
    if None in values or values[0] == values[1]:
        return ""
    return ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))


_CACHES = ("HF_HOME", "HF_HUB_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TMPDIR")


def shared_cache(case: Case) -> str:
    """Finds a folder for caches or temporary files on network storage."""
    for name in _CACHES:
        path = case.machine.variables.get(name, "")
        if path and (kind := case.machine.file_system_of(path)) in NETWORK_FILE_SYSTEMS:
            return f"{name}={path} is on {kind}"
    return ""


def arch_list(case: Case) -> str:
    """Finds entries of TORCH_CUDA_ARCH_LIST that DeepSpeed's `int()` cannot read."""
    value = case.machine.variables.get("TORCH_CUDA_ARCH_LIST", "")
    parts = [part for part in re.split(r"[;\s]+", value) if part]
    wrong = [part for part in parts if not re.fullmatch(r"\d+\.\d+(\+PTX)?", part)]
    has_deepspeed = "deepspeed" in case.machine.versions
    return f"TORCH_CUDA_ARCH_LIST={value} ({', '.join(wrong)})" if wrong and has_deepspeed else ""
