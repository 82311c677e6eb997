"""Runs on the workers of a real Ray on this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ToyRun
from launched import tensors

pytestmark = [pytest.mark.slow, pytest.mark.clusters]
pytest.importorskip("ray", reason="Ray is not installed; `make test-clusters` installs it")

TWO = ("training.device=cpu", "training.global_batch_size=8", "launch.procs_per_node=2")


def launch(toy: ToyRun, *arguments: str) -> tuple[int, str, str]:
    result = toy.shoal("launch", "run.yaml", "--on", "ray", *TWO, *arguments)
    return result.returncode, result.stdout, result.stderr


def test_a_worker_that_is_killed_is_restarted_and_the_run_ends_bit_equal(
    toy: ToyRun, change_recipe: Callable[[str, str], None]
) -> None:
    undisturbed = toy.folder / "undisturbed"
    assert toy.shoal("train", "run.yaml", *TWO, f"experiment.output_dir={undisturbed}").returncode == 0
    killed = toy.folder / "killed"
    change_recipe("import torch\n", "import os, pathlib, signal\nimport torch\n")
    change_recipe(
        "def loss(self, output, batch):",
        "def before_step(self, run):\n"
        f"        marker = pathlib.Path({str(killed)!r})\n"
        "        if run.step == 5 and torch.distributed.get_rank() == 1 and not marker.exists():\n"
        "            marker.touch()\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n\n"
        "    def loss(self, output, batch):",
    )
    code, out, err = launch(toy)
    assert code == 0, err
    assert killed.exists()
    assert "finished at step 10" in out
    assert tensors(toy.output, 10) == tensors(undisturbed, 10)
    assert toy.metrics() == toy.metrics(output=undisturbed)  # steps that were redone are in the file once
    # Ray knows the metrics and where the last checkpoint is.
    pointers = [json.loads(path.read_text()) for path in (toy.output / "ray").rglob("checkpoint.json")]
    assert {"path": str(toy.output / "checkpoints" / "step_00000010"), "step": 10} in pointers


def test_a_mistake_is_one_line_and_not_tried_again(toy: ToyRun) -> None:
    (toy.folder / "toy_recipe.py").write_text(
        (toy.folder / "toy_recipe.py").read_text().replace('batch["y"]) ** 2).sum()', 'batch["nothing"]) ** 2).sum()')
    )
    code, _, err = launch(toy)
    assert code == 2
    assert re.search(r"^shoal: error: toy_recipe\.py:\d+ in loss: KeyError: 'nothing'", err, re.M), err
    assert not list(Path(toy.output).glob("checkpoints/*"))
