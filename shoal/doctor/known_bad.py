"""A table of combinations that are known to fail or to be slow, each with where it is documented.

A row has a function that looks at a case and returns what it has found, such as `peft 0.17.0, transformers 5.2.0`, or
an empty text. docs/doctor.md shows the table; `tests/doctor/test_known_bad.py` plants every row.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.doctor import conditions
from shoal.doctor.conditions import Condition
from shoal.doctor.findings import Finding, Level
from shoal.doctor.machine import Case

_NCCL_ENV = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_NCCL_HELP = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
_TORCH_CUDA = "https://docs.pytorch.org/docs/stable/notes/cuda.html"
_TORCH_DISTRIBUTED = "https://docs.pytorch.org/docs/stable/distributed.html"
_TORCH_NCCL = "https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html"


@dataclass(frozen=True)
class KnownBad:
    """A row of the table."""

    name: str
    level: Level
    found: Condition
    """Returns what was found, or an empty text if the row does not apply."""
    consequence: str
    """What happens then."""
    fix: str
    source: str
    package: str = ""
    """The row is only `slow or surprising` for a run that does not import this package."""

    def finding(self, case: Case) -> Finding | None:
        """Returns the finding if the row applies to the case, else None."""
        if not (found := self.found(case)):
            return None
        level = "slow or surprising" if self.package and not case.uses(self.package) else self.level
        return Finding(level, f"known bad: {self.name}", f"{found}: {self.consequence}", self.fix, self.source)


def check_known_bad(case: Case) -> list[Finding]:
    """Returns a finding for each row that applies, or one that says that none does."""
    findings = [finding for row in KNOWN_BAD if (finding := row.finding(case))]
    if not findings:
        return [Finding("fine", "known bad", f"none of {len(KNOWN_BAD)} known-bad combinations")]
    return findings


KNOWN_BAD: tuple[KnownBad, ...] = (
    # Versions
    KnownBad(
        "peft and transformers 5",
        "will break",
        conditions.old_beside("peft", "0.18", "transformers", "5"),
        "peft cannot be imported, because transformers 5 has no HybridCache",
        "pip install -U 'peft>=0.18'",
        "https://github.com/huggingface/transformers/issues/44351",
        package="peft",
    ),
    KnownBad(
        "bitsandbytes and triton 3",
        "will break",
        conditions.old_beside("bitsandbytes", "0.45", "triton", "3.2"),
        "bitsandbytes cannot be imported, because triton has no triton.ops",
        "pip install -U 'bitsandbytes>=0.48'",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1492",
        package="bitsandbytes",
    ),
    KnownBad(
        "DeepSpeed and torch's elastic agent",
        "will break",
        conditions.old_beside("deepspeed", "0.14.1", "torch", "2.4"),
        "deepspeed cannot be imported, because torch has renamed a logger",
        "pip install -U 'deepspeed>=0.19.8'",
        "https://github.com/deepspeedai/DeepSpeed/issues/5337",
        package="deepspeed",
    ),
    KnownBad(
        "torchao for another torch",
        "slow or surprising",
        conditions.torchao,
        "torchao leaves out its compiled kernels, or ends the process when it is imported",
        "install the torchao of this torch, as the table in the source says",
        "https://github.com/pytorch/ao/issues/2919",
    ),
    KnownBad(
        "packages for another torch",
        "slow or surprising",
        conditions.torch_pins,
        "compiled operators are missing, for example `operator torchvision::nms does not exist`; whatever imports the "
        "package fails",
        "install the version of each package that belongs to this torch, or uninstall the package",
        "https://github.com/pytorch/vision#installation",
    ),
    KnownBad(
        "driver older than CUDA",
        "will break",
        conditions.driver,
        "torch does not see the GPUs",
        "update the driver, or install torch for an older CUDA",
        "https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html",
    ),
    KnownBad(
        "torch without CUDA",
        "slow or surprising",
        conditions.cpu_build,
        "the run would train on the CPU",
        "install torch with CUDA, by the command of the source",
        "https://pytorch.org/get-started/locally/",
    ),
    KnownBad(
        "NCCL 2.29.2",
        "will break",
        lambda case: f"NCCL {case.machine.nccl}" if case.machine.nccl.startswith("2.29.2") else "",
        "collectives may hang, a regression that 2.29.3 mends",
        "install another NCCL, for example pip install -U nvidia-nccl-cu13",
        "https://github.com/pytorch/pytorch/pull/174338",
    ),
    KnownBad(
        "Linux kernel before 5.5",
        "slow or surprising",
        conditions.kernel,
        "processes may hang, as Accelerate warns",
        "update the kernel",
        "https://github.com/huggingface/accelerate/blob/main/src/accelerate/utils/other.py",
    ),
    KnownBad(
        "CUDA libraries in LD_LIBRARY_PATH",
        "slow or surprising",
        conditions.libraries,
        "it is loaded instead of the one that torch brings, and torch may refuse it (`cuDNN version incompatibility`)",
        "unset LD_LIBRARY_PATH, or take this folder out of it",
        "https://github.com/pytorch/pytorch/issues/80637",
    ),
    # Networks
    KnownBad(
        "GLOO_SOCKET_IFNAME",
        "will break",
        conditions.gloo_interface,
        "gloo finds no address and the process group cannot be made",
        "correct the name, for example in launch.env, or unset it",
        _TORCH_DISTRIBUTED,
    ),
    KnownBad(
        "NCCL_SOCKET_IFNAME",
        "will break",
        lambda case: conditions.nccl_interface(case) if case.uses_nccl or not case.config else "",
        "NCCL finds no interface; names are prefixes, `=eth0` is exactly eth0",
        "correct the name, for example in launch.env, or unset it",
        _NCCL_ENV,
    ),
    KnownBad(
        "interfaces of gloo and NCCL",
        "slow or surprising",
        conditions.interfaces_differ,
        "gloo and NCCL may take different networks, and one of them may not lead to the other machines",
        "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME together in launch.env",
        _TORCH_DISTRIBUTED,
    ),
    KnownBad(
        "loopback between machines",
        "will break",
        conditions.loopback_interface,
        "other machines cannot be reached over the loopback interface",
        "name the network between the machines, for example eth0, in launch.env",
        _TORCH_DISTRIBUTED,
    ),
    KnownBad(
        "own name is loopback",
        "will break",
        conditions.own_name_is_loopback,
        "gloo tells the other machines the address of its own host name, and they connect to themselves",
        "set GLOO_SOCKET_IFNAME in launch.env, or correct the line of this host in /etc/hosts",
        "https://github.com/aws-samples/aws-do-eks/pull/69",
    ),
    KnownBad(
        "localhost as master address",
        "will break",
        conditions.local_master,
        "every machine waits for itself",
        "set launch.master_addr to an address of machine 0 that the others can reach",
        _TORCH_DISTRIBUTED,
    ),
    KnownBad(
        "NCCL_TIMEOUT",
        "slow or surprising",
        conditions.variable("NCCL_TIMEOUT"),
        "neither NCCL nor torch reads it, so the timeout is unchanged",
        "set distributed.timeout",
        _TORCH_DISTRIBUTED,
    ),
    KnownBad(
        "transports of NCCL turned off",
        "slow or surprising",
        conditions.first(
            conditions.variable("NCCL_P2P_DISABLE", "1"),
            conditions.variable("NCCL_SHM_DISABLE", "1"),
            conditions.variable("NCCL_IB_DISABLE", "1", only_if=lambda case: bool(case.machine.infiniband)),
        ),
        "GPUs exchange over a slower path; it is meant for finding faults",
        "unset it, or remove it from launch.env",
        _NCCL_ENV,
    ),
    KnownBad(
        "InfiniBand without pinned memory",
        "will break",
        conditions.pinned_memory,
        "NCCL cannot register memory with the adapter",
        "raise it: ulimit -l unlimited, or docker run --ulimit memlock=-1",
        _NCCL_HELP,
    ),
    KnownBad(
        "errors of NCCL ignored",
        "slow or surprising",
        conditions.first(
            conditions.variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
            conditions.variable("NCCL_ASYNC_ERROR_HANDLING", "0"),
        ),
        "a rank that lost its peers hangs instead of ending, until shoal's watchdog ends it",
        "unset it",
        _TORCH_NCCL,
    ),
    KnownBad(
        "blocking waits of NCCL",
        "slow or surprising",
        conditions.first(
            conditions.variable("TORCH_NCCL_BLOCKING_WAIT", "1"), conditions.variable("NCCL_BLOCKING_WAIT", "1")
        ),
        "the host waits for the GPU in every collective",
        "unset it; shoal finds hangs by distributed.timeout",
        _TORCH_NCCL,
    ),
    KnownBad(
        "TORCH_DISTRIBUTED_DEBUG",
        "slow or surprising",
        conditions.variable("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "detail"),
        "every collective is checked by another one before it; it is meant for finding faults",
        "unset it, or use INFO",
        _TORCH_DISTRIBUTED,
    ),
    # The environment of a process
    KnownBad(
        "more threads than cores",
        "slow or surprising",
        conditions.threads,
        "threads of all processes wait for each other",
        "unset OMP_NUM_THREADS (shoal's launcher then divides the cores), or lower it",
        "https://github.com/pytorch/pytorch/blob/main/torch/distributed/run.py",
    ),
    KnownBad(
        "CUDA_LAUNCH_BLOCKING",
        "slow or surprising",
        conditions.variable("CUDA_LAUNCH_BLOCKING", "1"),
        "the host waits for every kernel; it is meant for finding faults",
        "unset it",
        _TORCH_CUDA,
    ),
    KnownBad(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "slow or surprising",
        conditions.variable("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", only_if=conditions.is_on_gpu),
        "every tensor is a cudaMalloc of its own; it is meant for finding faults",
        "unset it",
        _TORCH_CUDA,
    ),
    KnownBad(
        "two settings of the allocator",
        "slow or surprising",
        conditions.allocator,
        "they are two names of one setting, and torch reads only one of them",
        "set PYTORCH_ALLOC_CONF alone; the other is its old name",
        _TORCH_CUDA,
    ),
    KnownBad(
        "TORCH_COMPILE_DISABLE",
        "slow or surprising",
        conditions.variable("TORCH_COMPILE_DISABLE", "1", only_if=conditions.compiles),
        "training.compile = true has no effect",
        "unset it, or set training.compile: false",
        "https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/config.py",
    ),
    KnownBad(
        "TF32 against the config",
        "slow or surprising",
        conditions.first(
            conditions.variable("NVIDIA_TF32_OVERRIDE", "0", only_if=conditions.wants_tf32),
            conditions.variable(
                "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1", only_if=lambda case: not conditions.wants_tf32(case)
            ),
        ),
        "it overrides training.tf32 without a word",
        "unset it, and set training.tf32",
        _TORCH_CUDA,
    ),
    KnownBad(
        "CUDA_VISIBLE_DEVICES",
        "will break",
        conditions.visible_devices,
        "each process needs a GPU of its own",
        "list as many GPUs as launch.procs_per_node, each once",
        "https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables",
    ),
    KnownBad(
        "caches on network storage",
        "slow or surprising",
        conditions.shared_cache,
        "file locks may not work there: processes wait for ever, or read files that are half written",
        "set it to a folder on a local disk of each machine, in launch.env",
        "https://github.com/huggingface/huggingface_hub/pull/4228",
    ),
    KnownBad(
        "TORCH_CUDA_ARCH_LIST and DeepSpeed",
        "will break",
        conditions.arch_list,
        "DeepSpeed cannot read such an entry, and its operators cannot be built",
        "set it to the number of your GPUs alone, such as 9.0, in launch.env",
        "https://github.com/deepspeedai/DeepSpeed/pull/8619",
        package="deepspeed",
    ),
)
"""All rows."""
