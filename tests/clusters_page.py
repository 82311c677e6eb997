"""A plugin of pytest that writes docs/clusters.md: what ran on which cluster, and with what result.

`make test-clusters` uses it, by `-p tests.clusters_page`.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "clusters.md"
PACKAGES = ("torch", "ray", "kubernetes", "kubeflow-trainer-api", "kubeflow-training", "ipykernel")
HEAD = """# On clusters of one machine

Written by `make test-clusters` on {day}, on a machine without GPUs: {versions}.

SLURM is a real one, with a controller and two daemons on this machine; so are Ray and the Jupyter kernel. Of Kubernetes
there are the models that check manifests, and an HTTP server that takes them as a cluster does.

| with | what | result | seconds |
| --- | --- | --- | --- |
"""
OUTCOMES = {"passed": "yes", "failed": "**no**", "skipped": "not run"}


def versions() -> Iterator[str]:
    yield f"Python {platform.python_version()}"
    for name in PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"no {name}"
    if (slurm := shutil.which("slurmctld")) is None:
        yield "no SLURM"
    else:
        said = subprocess.run([slurm, "-V"], capture_output=True, text=True, check=True).stdout.split()
        yield f"SLURM {said[1]}"


class Page:
    """Collects the results of a session and writes them at its end."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[str, float]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":  # what is skipped or breaks before has no call
            self._rows[report.nodeid] = (report.outcome, report.duration)

    def pytest_sessionfinish(self) -> None:
        if self._rows:
            PAGE.write_text(HEAD.format(day=date.today(), versions=", ".join(versions())) + "".join(self._lines()))

    def _lines(self) -> Iterator[str]:
        for test, (outcome, seconds) in self._rows.items():
            file, _, name = test.partition("::")
            about = Path(file).stem.removeprefix("test_")
            words = name.removeprefix("test_").replace("_", " ").replace("[", " (").replace("]", ")")
            yield f"| {about} | {words} | {OUTCOMES[outcome]} | {seconds:.0f} |\n"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Page())
