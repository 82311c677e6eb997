"""Manifests are read by the models of Kubeflow, and created over HTTP as on a cluster."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ToyRun
from ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.clusters]
reason = "is not installed; `make test-clusters` installs it"
client = pytest.importorskip("kubernetes.client", reason=f"kubernetes {reason}")
trainer_models = pytest.importorskip("kubeflow_trainer_api.models", reason=f"kubeflow-trainer-api {reason}")
training_models = pytest.importorskip("kubeflow.training.models", reason=f"kubeflow-training {reason}")

GOLDEN = Path(__file__).parent / "golden"


def without_empty(value: Any) -> Any:
    """Returns a manifest without the empty lists and sections, which models leave out."""
    if isinstance(value, dict):
        return {key: without_empty(one) for key, one in value.items() if one not in ([], {})}
    return [without_empty(one) for one in value] if isinstance(value, list) else value


class Response:
    """What the client of kubernetes reads an object from."""

    def __init__(self, value: Any):
        self.data = json.dumps(value)


def read_by_model(manifest: dict[str, Any]) -> Any:
    """Returns what a model keeps of a manifest; a field that it does not know is gone."""
    if manifest["kind"] == "TrainJob":
        return trainer_models.TrainerV1alpha1TrainJob.from_dict(manifest).to_dict()
    api = client.ApiClient()
    if manifest["kind"] == "ConfigMap":
        return api.sanitize_for_serialization(api.deserialize(Response(manifest), "V1ConfigMap"))
    for name in dir(training_models):
        if name.startswith("KubeflowOrgV1"):
            setattr(client.models, name, getattr(training_models, name))  # where the client looks for classes
    return api.sanitize_for_serialization(api.deserialize(Response(manifest), "KubeflowOrgV1PyTorchJob"))


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*job.yaml")), ids=lambda file: file.name)
def test_models_know_every_field(file: Path) -> None:
    for manifest in yaml.safe_load_all(file.read_text()):
        assert without_empty(read_by_model(manifest)) == without_empty(manifest)
        broken = {**manifest, "surplus": 1}
        assert without_empty(read_by_model(broken)) != without_empty(broken)  # or the comparison would see nothing


class Server:
    """An HTTP server that takes objects as Kubernetes does."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.refusal: dict[str, Any] | None = None
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                manifest = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                path = f"{self.path}/{manifest['metadata']['name']}"
                status, answer = 201, manifest
                if cluster.refusal:
                    status, answer = cluster.refusal["code"], cluster.refusal
                elif path in cluster.objects:
                    status, answer = 409, {"kind": "Status", "reason": "AlreadyExists", "message": "it exists"}
                else:
                    cluster.objects[path] = manifest
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.http.server_port


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    threading.Thread(target=server.http.serve_forever, daemon=True).start()
    write_kubeconfig(tmp_path, server.port)
    for module in ("kubernetes.config", "kubernetes.config.kube_config"):  # which read KUBECONFIG when imported
        monkeypatch.setattr(f"{module}.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
    yield server
    server.http.shutdown()
    server.http.server_close()


def write_kubeconfig(folder: Path, port: int) -> None:
    config = {
        "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "me", "user": {}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "current-context": "here",
    }
    (folder / "kubeconfig").write_text(yaml.safe_dump(config))


LAUNCH = ("launch", "run.yaml", "--on", "kubernetes", "launch.kubernetes.image=me:1", "launch.kubernetes.claim=runs")
FILES = "launch.kubernetes.files=[toy_recipe.py]"
TOY = (*LAUNCH, "experiment.output_dir=/runs/toy", "launch.kubernetes.namespace=ml", FILES)


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("TrainJob", "/apis/trainer.kubeflow.org/v1alpha1/namespaces/ml/trainjobs/run"),
        ("PyTorchJob", "/apis/kubeflow.org/v1/namespaces/ml/pytorchjobs/run"),
    ],
)
def test_objects_are_created(toy: ToyRun, server: Server, kind: str, path: str) -> None:
    arguments = (*TOY, f"launch.kubernetes.kind={kind}")
    result = toy.call(*arguments)
    assert result.returncode == 0, result.stderr
    shown = [*yaml.safe_load_all(toy.call(*arguments, "--dry-run").stdout)]
    assert server.objects == {
        f"/api/v1/namespaces/ml/configmaps/{shown[0]['metadata']['name']}": shown[0],
        path: shown[1],
    }
    assert result.stdout.startswith(f"created {kind} run in namespace ml\n")
    # The config is the same and may exist already; the job may not.
    del server.objects[path]
    assert toy.call(*arguments).returncode == 0
    result = toy.call(*arguments)
    assert result.returncode == 2
    assert result.stderr == (
        f"shoal: error: launch.kubernetes.job_name = run: namespace ml has a {kind} of this name; delete it, or choose "
        "another name\n"
    )


def test_what_the_cluster_refuses_is_one_line(toy: ToyRun, server: Server, tmp_path: Path) -> None:
    server.refusal = {"kind": "Status", "code": 403, "message": 'configmaps is forbidden: User "me" cannot create it'}
    result = toy.call(*TOY)
    assert result.returncode == 2
    assert result.stderr.startswith("shoal: error: launch.target = kubernetes: the cluster refused ConfigMap run-")
    assert result.stderr.endswith('configmaps is forbidden: User "me" cannot create it\n')


def test_a_cluster_that_does_not_answer_is_one_line(toy: ToyRun, server: Server, tmp_path: Path) -> None:
    write_kubeconfig(tmp_path, free_port())
    result = toy.call(*TOY)
    assert result.returncode == 2
    assert "shoal: error: launch.target = kubernetes: the cluster does not answer: " in result.stderr
    assert len([line for line in result.stderr.splitlines() if line.startswith("shoal:")]) == 1
