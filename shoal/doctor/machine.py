"""The facts about a machine that the checks look at, read once. Reading them changes nothing and never fails."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from shoal.config import Run
from shoal.config.schema import Config

PACKAGES = (
    *("shoal", "torch", "numpy", "triton", "transformers", "peft", "accelerate", "safetensors", "tokenizers"),
    *("deepspeed", "bitsandbytes", "torchao", "torchvision", "torchaudio", "xformers", "flash-attn"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
)
"""The packages whose versions are shown."""

_LIBRARIES = ("libcudnn.so", "libnccl.so", "libcublas.so", "libcudart.so")


@dataclass(frozen=True)
class Machine:
    """What a machine is and has."""

    host: str = ""
    cores: int = 1
    system: str = "Linux"
    kernel: str = ""
    """The release of the kernel, such as `5.15.0-105-generic`."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """The versions of installed packages, by name; and `python`."""
    built_for_torch: Mapping[str, str] = field(default_factory=dict)
    """The one version of torch that a package requires, by the name of the package."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """The environment variables, with those of `launch.env`."""
    interfaces: tuple[str, ...] = ()
    """The names of the network interfaces."""
    own_addresses: tuple[str, ...] = ()
    """The addresses that the name of this host resolves to."""
    mounts: tuple[tuple[str, str], ...] = ()
    """Where file systems are mounted, and their types."""
    gpus: tuple[str, ...] = ()
    """The names of the GPUs that torch sees."""
    gpu_files: int = 0
    """The number of NVIDIA GPUs that the driver has made device files for."""
    cuda: str = ""
    """The version of CUDA that torch was built with; empty for a build without CUDA."""
    driver: str = ""
    """The version of the NVIDIA driver."""
    nccl: str = ""
    """The version of NCCL that torch uses."""
    infiniband: tuple[str, ...] = ()
    """The names of the InfiniBand and RoCE adapters."""
    locked_memory_bytes: float = float("inf")
    """The limit on memory that a process may pin (`ulimit -l`)."""
    path_libraries: tuple[str, ...] = ()
    """CUDA libraries in the folders of LD_LIBRARY_PATH, which are loaded instead of those that torch has."""

    def file_system_of(self, path: str) -> str:
        """Returns the type of the file system that a path is on; empty if it is not known."""
        absolute = Path(path).expanduser().absolute()
        inside = [(where, kind) for where, kind in self.mounts if f"{absolute}/".startswith(f"{where.rstrip('/')}/")]
        return max(inside, key=lambda mount: len(mount[0]), default=("", ""))[1]


@dataclass(frozen=True)
class Case:
    """What is examined: a machine, and the run that is to use it, if a config was given."""

    machine: Machine
    run: Run | None = None
    procs: int = 1
    """The number of processes on this machine."""
    nodes: int = 1
    """The number of machines."""
    master_address: str = ""
    """The address at which all machines meet; empty for one machine."""
    master_port: int = 0
    """The port at which all processes meet; 0 for any that is free."""
    opens_port: bool = True
    """True if the run would open the port on this machine; false if a launcher has opened it already."""

    @property
    def config(self) -> Config | None:
        return self.run.config if self.run else None

    @cached_property
    def on_gpu(self) -> bool:
        """True if the run would use GPUs."""
        device = self.config.training.device if self.config else "auto"
        return device == "cuda" or (device == "auto" and bool(self.machine.gpus))

    @property
    def uses_nccl(self) -> bool:
        """True if several processes would exchange tensors by NCCL."""
        backend = self.config.distributed.backend if self.config else "auto"
        return self.on_gpu and backend != "gloo" and self.procs * self.nodes > 1

    def uses(self, package: str) -> bool:
        """Returns whether the run imports a package that is optional for shoal."""
        if self.run is None or self.config is None:
            return False
        if package == "deepspeed":
            return self.config.distributed.strategy == "deepspeed"
        tree = self.run.tree()
        model = tree.get("model") or {}
        quantised = any(str(model.get(key, False)) == "True" for key in ("load_in_4bit", "load_in_8bit"))
        return {
            "bitsandbytes": quantised or self.config.training.optimizer.name.endswith(("_8bit", "_32bit")),
            "peft": bool(tree.get("lora")),
            "torchao": self.config.training.mixed_precision == "fp8",
        }.get(package, False)


def read_machine(variables: Mapping[str, str] = os.environ) -> Machine:
    """Returns the facts about this machine. What cannot be read is left empty."""
    import torch

    cuda = torch.version.cuda or ""
    gpus: tuple[str, ...] = ()
    with suppress(Exception):  # a driver that is too old raises RuntimeError, and only then says so
        gpus = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    nccl = ""
    if cuda and torch.distributed.is_available() and torch.distributed.is_nccl_available():
        with suppress(Exception):
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return Machine(
        host=socket.gethostname(),
        cores=available_cores(),
        system=platform.system(),
        kernel=platform.release(),
        versions=_read_versions(),
        built_for_torch=_read_torch_pins(),
        variables=dict(variables),
        interfaces=tuple(name for _, name in socket.if_nameindex()) if hasattr(socket, "if_nameindex") else (),
        own_addresses=_own_addresses(),
        mounts=_read_mounts(),
        gpus=gpus,
        gpu_files=len([path for path in _list("/dev") if re.fullmatch(r"nvidia\d+", path)]),
        cuda=cuda,
        driver=_read_driver(),
        nccl=nccl,
        infiniband=tuple(sorted(_list("/sys/class/infiniband"))),
        locked_memory_bytes=_locked_memory(),
        path_libraries=_path_libraries(variables.get("LD_LIBRARY_PATH", "")),
    )


def version_of(text: str) -> tuple[int, ...]:
    """Returns the numbers at the beginning of a version, so that versions can be compared."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def available_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _read_torch_pins() -> dict[str, str]:
    pins = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            for requirement in importlib.metadata.requires(name) or ():
                if found := re.match(r"torch\s*\(?==\s*([\w.]+)\)?\s*$", requirement):
                    pins[name] = found[1]
    return pins


def _own_addresses() -> tuple[str, ...]:
    with suppress(OSError):
        return tuple(sorted({str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}))
    return ()


def _read_mounts() -> tuple[tuple[str, str], ...]:
    with suppress(OSError):
        lines = Path("/proc/self/mounts").read_text().splitlines()
        fields = [line.split(" ") for line in lines]
        return tuple((one[1].replace("\\040", " "), one[2]) for one in fields if len(one) > 2)
    return ()


def _read_driver() -> str:
    with suppress(OSError):
        found = re.search(r"Module\s+(\d+(\.\d+)+)", Path("/proc/driver/nvidia/version").read_text())
        return found[1] if found else ""
    return ""


def _locked_memory() -> float:
    with suppress(ImportError, OSError):  # Windows has no module of this name
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return float("inf") if soft == resource.RLIM_INFINITY else soft
    return float("inf")


def _path_libraries(path: str) -> tuple[str, ...]:
    folders = [folder for folder in path.split(":") if folder]
    return tuple(
        f"{folder}/{name}" for folder in folders for name in sorted(_list(folder)) if name.startswith(_LIBRARIES)
    )


def _list(folder: str) -> list[str]:
    """Returns the names in a folder; none if it cannot be read."""
    with suppress(OSError):
        return [path.name for path in Path(folder).iterdir()]
    return []
