"""The Kubernetes objects of a run: a TrainJob or a PyTorchJob, and the ConfigMap that holds its config.

Both kinds start one pod for each machine, in which `shoal train` starts the processes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.config import Run
from shoal.errors import UserError
from shoal.launch.targets.checks import count_gpus, number_of_nodes

CONFIG_FOLDER, CONFIG_FILE = "/etc/shoal", "run.yaml"
"""Where pods find the config, and the files beside it."""
MAX_CONFIG_MAP_BYTES = 1 << 20
"""Kubernetes stores no larger ConfigMap."""

Manifest = dict[str, Any]


def manifests(run: Run) -> list[Manifest]:
    """Returns the objects of a run in the order in which they have to be created."""
    config_map = make_config_map(run)
    job = trainjob if run.config.launch.kubernetes.kind == "TrainJob" else pytorchjob
    return [config_map, job(run, config_map["metadata"]["name"])]


def make_config_map(run: Run) -> Manifest:
    """Returns the ConfigMap with the config of a run and `launch.kubernetes.files`.

    Its name has a digest of its content, so that it never changes below a job that runs.
    """
    data = {CONFIG_FILE: run.to_yaml(only_changed=True)}
    for file in map(Path, run.config.launch.kubernetes.files):
        try:
            data[file.name] = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not a text"
            raise UserError(f"launch.kubernetes.files = {str(file)!r}: cannot be read: {reason}") from None
    content = "".join(f"{name}\n{text}\n" for name, text in data.items()).encode()
    if len(content) > MAX_CONFIG_MAP_BYTES:
        raise UserError(
            f"launch.kubernetes.files: {len(content)} bytes with the config, and Kubernetes stores at most "
            f"{MAX_CONFIG_MAP_BYTES}; put the files into the image"
        )
    name = f"{job_name(run)}-{hashlib.sha256(content).hexdigest()[:8]}"
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(run, name), "data": data}


def trainjob(run: Run, config_map: str) -> Manifest:
    """Returns the TrainJob of a run, for Kubeflow Trainer 2.2 or newer.

    Its runtime has the pods; volumes, mounts and the grace period are patches of them.
    """
    kubernetes, launch = run.config.launch.kubernetes, run.config.launch
    pod = {
        **_pod(run, config_map),
        "containers": [{"name": "node", "volumeMounts": _mounts(run)}],
    }
    node = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patch = {"manager": "shoal", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}}}
    trainer = {
        "image": _image(run),
        "command": ["shoal"],
        "args": _arguments(run),
        "env": _environment(run),
        "numNodes": number_of_nodes(run),
        # Always given: without it a pod without GPUs would get as many processes as it has cores.
        "numProcPerNode": launch.procs_per_node,
        "resourcesPerNode": _resources(run),
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(run, job_name(run)),
        "spec": {"runtimeRef": {"name": kubernetes.runtime}, "trainer": trainer, "runtimePatches": [patch]},
    }


def pytorchjob(run: Run, config_map: str) -> Manifest:
    """Returns the PyTorchJob of a run, for Kubeflow's training operator."""
    launch = run.config.launch
    container = {
        "name": "pytorch",  # the operator looks for this name
        "image": _image(run),
        "command": ["shoal"],
        "args": _arguments(run),
        "env": _environment(run),
        "resources": _resources(run),
        "volumeMounts": _mounts(run),
    }
    template = {"spec": {**_pod(run, config_map), "containers": [container]}}
    # A pod that was evicted (128 + a signal) starts again and resumes; a mistake in the config (2) would come again.
    replica = {"restartPolicy": "ExitCode", "template": template}
    replicas = {"Master": {"replicas": 1, **replica}}
    if (nodes := number_of_nodes(run)) > 1:
        replicas["Worker"] = {"replicas": nodes - 1, **replica}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(run, job_name(run)),
        "spec": {
            "nprocPerNode": str(launch.procs_per_node),
            "runPolicy": {"cleanPodPolicy": "None"},  # the logs of pods stay readable
            "pytorchReplicaSpecs": replicas,
        },
    }


def job_name(run: Run) -> str:
    """Returns the name of the job: the key's, or the run's in the letters that Kubernetes allows."""
    if (name := run.config.launch.kubernetes.job_name) is not None:
        return name
    letters = re.sub(r"[^a-z0-9]+", "-", run.config.experiment.name.lower()).strip("-")
    letters = letters if letters[:1].isalpha() else f"run-{letters}"
    return letters[:40].strip("-")  # pods and the ConfigMap have longer names, of at most 63 letters


def _metadata(run: Run, name: str) -> Manifest:
    labels = {"app.kubernetes.io/managed-by": "shoal", "app.kubernetes.io/instance": job_name(run)}
    return {"name": name, "namespace": run.config.launch.kubernetes.namespace, "labels": labels}


def _image(run: Run) -> str:
    image = run.config.launch.kubernetes.image
    if image is None:
        raise UserError("launch.kubernetes.image is missing; name a container image that has shoal and your recipe")
    return image


def _arguments(run: Run) -> list[str]:
    """Returns the arguments of `shoal` in a pod. The run folder is in the claim, which outlives the pods."""
    kubernetes, folder = run.config.launch.kubernetes, run.config.experiment.output_dir
    if kubernetes.claim is None:
        raise UserError(
            "launch.kubernetes.claim is missing: checkpoints would be lost with the pods; name a PersistentVolumeClaim"
        )
    if folder is None:
        folder = f"{kubernetes.claim_path}/{run.config.experiment.name}"
    elif not Path(folder).is_relative_to(kubernetes.claim_path):
        raise UserError(
            f"experiment.output_dir = {folder!r}: it would be lost with the pods; choose a folder below "
            f"launch.kubernetes.claim_path = {kubernetes.claim_path}, or leave it out"
        )
    return ["train", f"{CONFIG_FOLDER}/{CONFIG_FILE}", f"experiment.output_dir={folder}"]


def _environment(run: Run) -> list[Manifest]:
    """Returns the variables of the container: values of `launch.env`, and secrets by reference."""
    variables: Mapping[str, str] = run.config.launch.env
    secrets = run.config.launch.kubernetes.secrets
    if reserved := [name for name in (*variables, *secrets) if name.startswith("PET_")]:
        raise UserError(f"launch.env.{reserved[0]}: Kubeflow sets variables that begin with PET_ itself; leave it out")
    if twice := variables.keys() & secrets.keys():
        raise UserError(
            f"launch.env.{min(twice)} is in launch.kubernetes.secrets as well; leave it out in one of the two"
        )
    references = {name: secret.split("/") for name, secret in secrets.items()}
    return [
        *({"name": name, "value": value} for name, value in variables.items()),
        *(
            {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
            for name, (secret, key) in references.items()
        ),
    ]


def _resources(run: Run) -> Manifest:
    """Returns what a pod asks for. Limits and requests are equal, so that nothing evicts it for using them."""
    kubernetes = run.config.launch.kubernetes
    processes = run.config.launch.procs_per_node
    gpus = count_gpus(run, "launch.kubernetes.gpus_per_node", kubernetes.gpus_per_node, processes)
    amounts = {
        "cpu": kubernetes.cpu,
        "memory": kubernetes.memory,
        kubernetes.gpu_resource: str(gpus) if gpus else None,
    }
    present = {name: amount for name, amount in amounts.items() if amount is not None}
    return {"requests": present, "limits": present} if present else {}


def _pod(run: Run, config_map: str) -> Manifest:
    """Returns the fields of a pod, apart from its containers."""
    kubernetes = run.config.launch.kubernetes
    pod: Manifest = {
        "terminationGracePeriodSeconds": kubernetes.grace_seconds,
        "volumes": [
            {"name": "config", "configMap": {"name": config_map}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": kubernetes.shared_memory}},
            {"name": "runs", "persistentVolumeClaim": {"claimName": kubernetes.claim}},
        ],
    }
    if kubernetes.service_account is not None:
        pod["serviceAccountName"] = kubernetes.service_account
    return pod


def _mounts(run: Run) -> list[Manifest]:
    return [
        {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
        {"name": "runs", "mountPath": run.config.launch.kubernetes.claim_path},
    ]
