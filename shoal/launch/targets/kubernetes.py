"""Starts a run on Kubernetes: creates the objects of `manifests.py`, with the kubernetes client or kubectl."""

from __future__ import annotations

import inspect
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

import shoal
from shoal.config import Run
from shoal.config.run import DEFAULT, source_of
from shoal.config.yaml import flatten
from shoal.errors import UserError, one_line, printable
from shoal.launch.targets import Launch
from shoal.launch.targets.checks import check_layout_of
from shoal.launch.targets.manifests import Manifest, manifests

_PLURALS = {"TrainJob": "trainjobs", "PyTorchJob": "pytorchjobs"}


def submit(run: Run, launch: Launch, dry_run: bool) -> int:
    """Creates the objects of a run, or only prints them; returns the exit code for the user's shell."""
    objects = manifests(run)
    check_layout_of(run)
    for warning in local_files(run):
        print(f"shoal: warning: {printable(warning)}", file=sys.stderr)
    if dry_run:
        print(render(objects), end="")
        return 0
    try:
        import kubernetes
    except ImportError:
        _create_with_kubectl(objects)
    else:
        _create_with_client(kubernetes, objects)
    job = objects[-1]
    name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
    plural, label = _PLURALS[job["kind"]], _POD_LABEL[job["kind"]].format(name)
    print(f"created {job['kind']} {name} in namespace {namespace}")
    print("its output  ", f"kubectl --namespace {namespace} logs --follow --selector {label}")
    print("its state   ", f"kubectl --namespace {namespace} get {plural} {name}")
    print("stop it     ", f"kubectl --namespace {namespace} delete {plural} {name}", flush=True)
    return 0


def local_files(run: Run) -> list[str]:
    """Returns a warning for each value of the config that is a file or folder of this machine: pods have the image,
    the claim and `launch.kubernetes.files`. They may have the same path, so it is not refused."""
    kubernetes, warnings = run.config.launch.kubernetes, []
    for key, value in flatten(run.tree()).items():
        is_set = source_of(key, run.sources) != DEFAULT and not key.startswith(("launch.", "experiment."))
        for text in value if isinstance(value, list) else [value]:
            if is_set and isinstance(text, str) and _is_path(text) and not _is_in(text, kubernetes.claim_path):
                warnings.append(
                    f"{key} = {text!r} is on this machine; pods find it only if the image has it at this path; put it "
                    f"into the image, or into the claim and name it below {kubernetes.claim_path}"
                )
    source = Path(inspect.getfile(run.recipe_type))
    is_installed = source.is_relative_to(Path(shoal.__file__).parent) or "site-packages" in source.parts
    if not is_installed and source.name not in [Path(file).name for file in kubernetes.files]:
        warnings.append(
            f"recipe = {run.config.recipe}: it is in {source.name} on this machine; pods find it only if the image has "
            f"it; add it to launch.kubernetes.files, or put it into the image"
        )
    return warnings


def _is_path(text: str) -> bool:
    with suppress(OSError, ValueError):  # such as a text that is too long for a name
        return bool(text) and Path(text).exists()
    return False


def _is_in(text: str, folder: str) -> bool:
    return Path(text).is_relative_to(folder)


_POD_LABEL = {
    "TrainJob": "jobset.sigs.k8s.io/jobset-name={}",
    "PyTorchJob": "training.kubeflow.org/job-name={}",
}
"""The label by which the pods of a job are found."""


def render(objects: Sequence[Manifest]) -> str:
    """Returns the objects as the YAML that `kubectl create -f -` takes."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines, such as the config, as blocks, and the same value twice instead of by alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _write_text)


def _create_with_client(kubernetes: Any, objects: Sequence[Manifest]) -> None:
    """Creates the objects in the cluster of the kubeconfig, or of the pod that this process is in."""
    try:
        kubernetes.config.load_config()
    except kubernetes.config.ConfigException as error:
        raise UserError(
            f"launch.target = kubernetes: no cluster is configured ({one_line(error)}); set KUBECONFIG"
        ) from None
    for manifest in objects:
        try:
            _create(kubernetes.client, manifest)
        except kubernetes.client.ApiException as error:
            if error.status == 409 and manifest["kind"] == "ConfigMap":
                continue  # its name has a digest of its content, so it is the same
            raise _refusal(manifest, error.status == 409, _reason(error)) from None
        except Exception as error:  # urllib3 has several for a server that does not answer
            raise UserError(f"launch.target = kubernetes: the cluster does not answer: {one_line(error)}") from None


def _create(client: Any, manifest: Manifest) -> None:
    namespace = manifest["metadata"]["namespace"]
    if manifest["kind"] == "ConfigMap":
        client.CoreV1Api().create_namespaced_config_map(namespace, manifest)
        return
    group, version = manifest["apiVersion"].split("/")
    plural = _PLURALS[manifest["kind"]]
    client.CustomObjectsApi().create_namespaced_custom_object(group, version, namespace, plural, manifest)


def _reason(error: Any) -> str:
    """Returns what the server says about a request that it refused."""
    try:
        return one_line(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return one_line(f"{error.status} {error.reason}")


def _create_with_kubectl(objects: Sequence[Manifest]) -> None:
    if shutil.which("kubectl") is None:
        raise UserError(
            "launch.target = kubernetes: neither the Python package kubernetes nor kubectl is installed; "
            'pip install "shoal[kubernetes]", or use --dry-run and create the objects elsewhere'
        )
    for manifest in objects:
        result = subprocess.run(
            ["kubectl", "create", "-f", "-"], input=render([manifest]), capture_output=True, text=True, check=False
        )
        exists = "AlreadyExists" in result.stderr
        if result.returncode and not (exists and manifest["kind"] == "ConfigMap"):
            raise _refusal(manifest, exists, one_line(result.stderr))


def _refusal(manifest: Manifest, exists: bool, reason: str) -> UserError:
    kind, name, namespace = manifest["kind"], manifest["metadata"]["name"], manifest["metadata"]["namespace"]
    if exists:
        return UserError(
            f"launch.kubernetes.job_name = {name}: namespace {namespace} has a {kind} of this name; delete it, or "
            "choose another name"
        )
    return UserError(f"launch.target = kubernetes: the cluster refused {kind} {name}: {reason}")
