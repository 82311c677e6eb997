"""The keys of `launch.slurm`, `launch.kubernetes` and `launch.ray`: what each target needs besides the common keys."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from shoal.config.section import NonNegative, Positive, Section

number_as_text = BeforeValidator(lambda value: str(value) if type(value) in (int, float) else value)
"""Reads the number in `time: 60` or `cpu: 16` as the text that the cluster takes."""
Line = Annotated[str, Field(min_length=1, pattern=r"^[^\r\n\x00]+$")]
"""A text without line ends: a line of a file."""
Word = Annotated[str, Field(min_length=1, pattern=r"^[^\s\x00]+$")]
"""A text without spaces."""
Quantity = Annotated[str, number_as_text, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|[kKMGTP]i?)?$")]
"""An amount as Kubernetes writes it."""
JobName = Annotated[str, Field(max_length=40, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")]
"""The name of a job; pods have longer names, of at most 63 letters."""
KubernetesName = Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
"""A name of lower-case letters, digits and dashes, which Kubernetes accepts for all objects."""
SecretKey = Annotated[str, Field(pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[-._a-zA-Z0-9]+$")]
"""`<name of the secret>/<key>`."""


class SlurmConfig(Section):
    job_name: Line | None = None
    """The name of the job. Default: `experiment.name`."""
    partition: Word | None = None
    """The partition, or several with commas between them."""
    account: Word | None = None
    """The account that is charged."""
    qos: Word | None = None
    """The quality of service."""
    time: Annotated[str, number_as_text, Field(pattern=r"^(\d+-)?\d+(:\d+){0,2}$")] | None = None
    """The time limit: minutes, `hours:minutes:seconds` or `days-hours`. Default: that of the partition."""
    gpus_per_node: NonNegative | None = None
    """GPUs on each machine. Default: `launch.procs_per_node`, or none with `training.device: cpu`."""
    gres: Word | None = None
    """The GPUs as a generic resource, such as `gpu:a100:8`, instead of `gpus_per_node`."""
    cpus_per_task: Positive | None = None
    """CPU cores on each machine, for all processes together."""
    constraint: Line | None = None
    """The features that machines must have."""
    options: list[Line] = []  # noqa: RUF012, pydantic copies it
    """Further options of sbatch, such as `--exclusive` or `--mem=0`."""
    modules: list[Word] = []  # noqa: RUF012, pydantic copies it
    """Environment modules to load, as `module load` takes them."""
    setup: list[Line] = []  # noqa: RUF012, pydantic copies it
    """Shell lines that the job runs before it trains, such as `source venv/bin/activate`."""
    container_image: Line | None = None
    """A container image to train in, for clusters with the pyxis plugin (`srun --container-image`)."""
    container_mounts: list[Line] = []  # noqa: RUF012, pydantic copies it
    """Folders to mount in the container, such as `/data:/data`. The working folder is always mounted."""
    python: Line | None = None
    """The Python that has shoal on the machines of the cluster. Default: the one that runs this command; in a
    container `python3`."""
    warning_seconds: Positive = 120
    """How long before the time limit the run saves and stops. Longer than a step and a save."""
    requeue: bool = True
    """Put the job back into the queue when it stopped before its time limit, or when a machine failed; it resumes."""

    def contradictions(self) -> Sequence[tuple[bool, str]]:
        return (
            (
                self.gres is not None and self.gpus_per_node is not None,
                f"gres = {self.gres} and gpus_per_node = {self.gpus_per_node} both ask for GPUs; leave one of them out",
            ),
            (
                bool(self.container_mounts) and self.container_image is None,
                "container_mounts have no effect without a container_image; give one, or leave them out",
            ),
        )


class KubernetesConfig(Section):
    kind: Literal["TrainJob", "PyTorchJob"] = "TrainJob"
    """`TrainJob` for Kubeflow Trainer 2.2 or newer, `PyTorchJob` for the older training operator."""
    image: Word | None = None
    """The container image, with shoal and the recipe installed."""
    namespace: KubernetesName = "default"
    """The namespace of the job."""
    job_name: JobName | None = None
    """The name of the job. Default: `experiment.name` in lower case."""
    runtime: KubernetesName = "torch-distributed"
    """The ClusterTrainingRuntime of a TrainJob."""
    gpus_per_node: NonNegative | None = None
    """GPUs of each pod. Default: `launch.procs_per_node`, or none with `training.device: cpu`."""
    gpu_resource: Word = "nvidia.com/gpu"
    """The name that the cluster gives to its GPUs."""
    cpu: Quantity | None = None
    """CPU cores of each pod, such as `16`."""
    memory: Quantity | None = None
    """Memory of each pod, such as `256Gi`."""
    shared_memory: Quantity = "16Gi"
    """The size of /dev/shm, through which data loader workers and NCCL pass data. It is part of the pod's memory."""
    claim: KubernetesName | None = None
    """The PersistentVolumeClaim that run folders are written to. All pods mount it, so several need `ReadWriteMany`."""
    claim_path: Annotated[str, Field(pattern=r"^/[^\s\x00]+[^\s\x00/]$")] = "/runs"
    """Where the claim is mounted. The default of `experiment.output_dir` is below it."""
    secrets: dict[str, SecretKey] = {}  # noqa: RUF012, pydantic copies it
    """Environment variables whose values are keys of secrets, such as `{WANDB_API_KEY: wandb/api-key}`."""
    files: list[Word] = []  # noqa: RUF012, pydantic copies it
    """Small files to put beside the config in the pods, such as `recipe.py`; the image has all others."""
    service_account: KubernetesName | None = None
    """The service account of the pods."""
    grace_seconds: Positive = 300
    """How long a pod that is evicted or deleted may take to save. Longer than a step and a save."""

    def contradictions(self) -> Sequence[tuple[bool, str]]:
        wrong = [name for name in self.secrets if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)]
        return ((bool(wrong), f"secrets: {wrong[:1]} is not the name of an environment variable"),)


class RayConfig(Section):
    address: Word | None = None
    """The Ray cluster: an address, or `auto` for the one that this machine is part of. Default: a new Ray on this
    machine."""
    storage_path: Line | None = None
    """The folder or bucket for what Ray itself keeps of the run. Default: `ray` in the run folder."""
    gpus_per_worker: Annotated[float, Field(ge=0)] | None = None
    """GPUs of each process. Default: 1, or none with `training.device: cpu`."""
    cpus_per_worker: Annotated[float, Field(gt=0)] = 1.0
    """CPU cores of each process."""
