"""Every row of the table of known-bad combinations is found where it is planted, and nowhere else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import ToyRun

from shoal.config import Run, load_run
from shoal.doctor.findings import Finding
from shoal.doctor.known_bad import KNOWN_BAD, check_known_bad
from shoal.doctor.machine import Case, Machine, version_of

HEALTHY = Machine(
    host="node-a",
    cores=64,
    kernel="6.8.0",
    versions={"torch": "2.13.0+cu130", "nvidia-cudnn-cu13": "9.20", "deepspeed": "0.19.8", "triton": "3.7.0"},
    variables={"OMP_NUM_THREADS": "8"},
    interfaces=("lo", "eth0", "eth1"),
    own_addresses=("10.0.0.7",),
    mounts=(("/", "ext4"), ("/shared", "lustre")),
    gpus=("H200",) * 8,
    gpu_files=8,
    cuda="13.0",
    driver="580.95.05",
    nccl="2.29.3",
)
"""A machine on which no row applies to a run with 8 processes on each of 2 machines."""


@pytest.fixture
def runs(toy: ToyRun) -> Callable[..., Run]:
    """Returns a function that loads the toy run with overrides, each set of them once."""
    return cache(lambda *keys: load_run(toy.folder / "run.yaml", keys))


def planted(case: dict[str, Any], **facts: Any) -> dict[str, Any]:
    return {"case": case, "facts": facts}


def variables(**values: str) -> dict[str, Any]:
    return planted({}, variables=values)


def versions(**installed: str) -> dict[str, Any]:
    return planted({}, versions={**HEALTHY.versions, **installed})


PLANTS: dict[str, list[dict[str, Any]]] = {
    "peft and transformers 5": [versions(peft="0.17.0", transformers="5.2.0")],
    "bitsandbytes and triton 3": [versions(bitsandbytes="0.44.1", triton="3.2.0")],
    "DeepSpeed and torch's elastic agent": [versions(deepspeed="0.14.0")],
    "torchao for another torch": [versions(torchao="0.16.0")],
    "packages for another torch": [planted({}, built_for_torch={"torchvision": "2.12.0"})],
    "driver older than CUDA": [planted({}, driver="570.86.10"), planted({}, driver="520.61.05", cuda="12.8")],
    "torch without CUDA": [planted({}, cuda="", gpus=())],
    "NCCL 2.29.2": [planted({}, nccl="2.29.2")],
    "Linux kernel before 5.5": [planted({}, kernel="5.4.0-150-generic")],
    "CUDA libraries in LD_LIBRARY_PATH": [planted({}, path_libraries=("/usr/local/cuda/lib64/libcudnn.so.9",))],
    "GLOO_SOCKET_IFNAME": [variables(GLOO_SOCKET_IFNAME="ens5", NCCL_SOCKET_IFNAME="e")],
    "NCCL_SOCKET_IFNAME": [
        planted({"nodes": 1}, variables={"NCCL_SOCKET_IFNAME": value})
        for value in ("ens", "=eth", "^lo,eth", "^=lo,eth0,eth1")
    ],
    "interfaces of gloo and NCCL": [
        variables(GLOO_SOCKET_IFNAME="eth0"),
        variables(GLOO_SOCKET_IFNAME="eth0", NCCL_SOCKET_IFNAME="=eth1"),
    ],
    "loopback between machines": [variables(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")],
    "own name is loopback": [planted({}, own_addresses=("127.0.1.1",))],
    "localhost as master address": [planted({"master_address": "localhost"})],
    "NCCL_TIMEOUT": [variables(NCCL_TIMEOUT="3600")],
    "transports of NCCL turned off": [
        variables(NCCL_P2P_DISABLE="1"),
        planted({}, variables={"NCCL_IB_DISABLE": "1"}, infiniband=("mlx5_0",)),
    ],
    "InfiniBand without pinned memory": [planted({}, infiniband=("mlx5_0",), locked_memory_bytes=65536)],
    "errors of NCCL ignored": [variables(TORCH_NCCL_ASYNC_ERROR_HANDLING="0")],
    "blocking waits of NCCL": [variables(TORCH_NCCL_BLOCKING_WAIT="1")],
    "TORCH_DISTRIBUTED_DEBUG": [variables(TORCH_DISTRIBUTED_DEBUG="DETAIL")],
    "more threads than cores": [variables(OMP_NUM_THREADS="16")],
    "CUDA_LAUNCH_BLOCKING": [variables(CUDA_LAUNCH_BLOCKING="1")],
    "PYTORCH_NO_CUDA_MEMORY_CACHING": [variables(PYTORCH_NO_CUDA_MEMORY_CACHING="1")],
    "two settings of the allocator": [
        variables(PYTORCH_ALLOC_CONF="expandable_segments:True", PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:128")
    ],
    "TORCH_COMPILE_DISABLE": [planted({"keys": ["training.compile=true"]}, variables={"TORCH_COMPILE_DISABLE": "1"})],
    "TF32 against the config": [
        variables(TORCH_ALLOW_TF32_CUBLAS_OVERRIDE="1"),
        planted({"keys": ["training.tf32=true"]}, variables={"NVIDIA_TF32_OVERRIDE": "0"}),
    ],
    "CUDA_VISIBLE_DEVICES": [
        variables(CUDA_VISIBLE_DEVICES="0,1,2"),
        variables(CUDA_VISIBLE_DEVICES="0,0,1,2,3,4,5,6"),
    ],
    "caches on network storage": [variables(HF_HOME="/shared/cache")],
    "TORCH_CUDA_ARCH_LIST and DeepSpeed": [variables(TORCH_CUDA_ARCH_LIST="8.0 9.0a 12.0+PTX")],
}
HARMLESS = [
    variables(GLOO_SOCKET_IFNAME="eth0", NCCL_SOCKET_IFNAME="eth"),
    variables(NCCL_SOCKET_IFNAME="^docker", GLOO_SOCKET_IFNAME="eth1"),
    variables(CUDA_VISIBLE_DEVICES="0,1,2,3,4,5,6,7"),
    variables(TORCH_CUDA_ARCH_LIST="8.0;9.0+PTX", CUDA_LAUNCH_BLOCKING="0", HF_HOME="/home/me"),
    variables(TORCH_COMPILE_DISABLE="1", NCCL_IB_DISABLE="1"),
    versions(peft="0.18.0", transformers="5.2.0", bitsandbytes="0.48.0", torchao="0.18.0", torchvision="0.28.0"),
    planted({}, built_for_torch={"torchvision": "2.13.0"}),
]


def findings_of(runs: Callable[..., Run], plant: dict[str, Any]) -> list[Finding]:
    run = runs(*plant["case"].get("keys", ()))
    options = {"run": run, "procs": 8, "nodes": 2, "master_address": "10.0.0.1", **plant["case"]}
    options.pop("keys", None)
    return check_known_bad(Case(replace(HEALTHY, **plant["facts"]), **options))


def test_every_row_is_planted_and_has_a_source() -> None:
    assert [row.name for row in KNOWN_BAD] == [*PLANTS]
    assert len(KNOWN_BAD) >= 15
    for row in KNOWN_BAD:
        assert row.source.startswith("https://"), row.name
        assert row.fix, row.name


def test_a_planted_row_is_found_and_no_other(runs: Callable[..., Run]) -> None:
    for name, plants in PLANTS.items():
        for plant in plants:
            found = findings_of(runs, plant)
            assert [finding.check for finding in found] == [f"known bad: {name}"], plant
    for plant in HARMLESS:
        assert [finding.level for finding in findings_of(runs, plant)] == ["fine"], plant


def test_a_package_breaks_only_runs_that_import_it(runs: Callable[..., Run]) -> None:
    old = {"versions": {**HEALTHY.versions, "deepspeed": "0.14.0"}}
    (unused,) = findings_of(runs, planted({}, **old))
    (used,) = findings_of(runs, planted({"keys": ["distributed.strategy=deepspeed"]}, **old))
    assert (unused.level, used.level) == ("slow or surprising", "will break")


def test_versions_are_compared_by_number() -> None:
    assert version_of("2.13.0+cu130") > version_of("2.9.1")
    assert version_of("unknown") == ()


def plant_package(folder: Path, name: str, version: str, *requires: str) -> None:
    """Installs the metadata of a package, as pip would; it comes before what is installed."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    lines = [f"Requires-Dist: {requirement}" for requirement in requires]
    (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines]))


@pytest.mark.slow
def test_a_real_process_finds_planted_variables_and_packages(tmp_path: Path) -> None:
    plant_package(tmp_path, "peft", "0.17.0")
    plant_package(tmp_path, "torchvision", "0.20.0", "torch==2.5.0")
    plant_package(tmp_path, "nvidia_nccl_cu12", "2.29.3")
    (tmp_path / "libnccl.so.2").touch()
    planted_variables = {
        "GLOO_SOCKET_IFNAME": "absent0",
        "OMP_NUM_THREADS": "4000",
        "NCCL_TIMEOUT": "60",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "CUDA_LAUNCH_BLOCKING": "1",
        "TORCH_CUDA_ARCH_LIST": "9.0a",
        "LD_LIBRARY_PATH": str(tmp_path),
        "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
    }
    program = (
        "import json; from shoal.doctor.machine import Case, read_machine; "
        "from shoal.doctor.known_bad import check_known_bad; "
        "print(json.dumps([finding.check for finding in check_known_bad(Case(read_machine()))]))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **planted_variables}, check=True)
    found = {name.removeprefix("known bad: ") for name in json.loads(done.stdout)}
    assert found >= {
        "peft and transformers 5",
        "packages for another torch",
        "CUDA libraries in LD_LIBRARY_PATH",
        "GLOO_SOCKET_IFNAME",
        "more threads than cores",
        "NCCL_TIMEOUT",
        "TORCH_DISTRIBUTED_DEBUG",
        "CUDA_LAUNCH_BLOCKING",
        "TORCH_CUDA_ARCH_LIST and DeepSpeed",
    }


@pytest.mark.slow  # importing DeepSpeed takes seconds
def test_deepspeeds_own_parser_fails_on_the_planted_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row is a fact about the installed DeepSpeed; it can go when this test fails."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    builders = pytest.importorskip("deepspeed.ops.op_builder.builder")

    class Builder(builders.CUDAOpBuilder):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.jit_mode, self.name = True, "probe"

        def absolute_name(self) -> str:
            return "probe"

        def sources(self) -> list[str]:
            return []

    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0a")
    with pytest.raises(ValueError, match="invalid literal for int"):
        Builder().compute_capability_args()
