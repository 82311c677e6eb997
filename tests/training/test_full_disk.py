"""A disk that is full for a while: the run goes on and says so, and the last good checkpoint stays.

The disk is a small tmpfs in a mount namespace of its own, where this file runs as a script.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_SECONDS, ToyRun

from shoal.checkpoint import find_latest_checkpoint, open_checkpoint
from shoal.verify.chaos import read_tensorboard

FILLS = '''

import errno, os, pathlib
from shoal.checkpoint import store
from shoal.training.trainer import RecipeBody

DISK = pathlib.Path("disk")
write_safetensors, open_body, take_step = store.write_safetensors, RecipeBody.__init__, RecipeBody.take_step


def fill(leave):
    """All of it but so many bytes."""
    with open(DISK / "fill", "ab", buffering=0) as file:
        try:
            while os.statvfs(DISK).f_bavail * 4096 > leave:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC


def fill_in_between(path, tensors):
    """There was room when the save began."""
    if "step_00000004" in str(path) and path.name.startswith("optimizer"):
        fill(100_000)
    return write_safetensors(path, tensors)


def remember_manager(self, shell):
    self.manager = shell.checkpoints.manager
    open_body(self, shell)


def fill_and_step(self, micro_batches, step):
    if self.strategy.is_main_process:
        if step == 5:
            self.manager._saver._thread and self.manager._saver._thread.join()
            fill(0)
        if step == 25:
            assert [path.name for path in self.manager.folder.iterdir()] == ["step_00000002"]
            store.open_checkpoint(self.manager.path_of(2)).read()
            (DISK / "fill").unlink()
    return take_step(self, micro_batches, step)


store.write_safetensors, RecipeBody.__init__, RecipeBody.take_step = fill_in_between, remember_manager, fill_and_step
'''


def in_a_small_disk(folder: Path, keys: list[str]) -> dict[str, Any]:
    """Runs in the namespace; what is on the disk is gone with it."""
    disk, output = folder / "disk", folder / "disk" / "out"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", disk], check=True)
    command = [sys.executable, "-m", "shoal", "train", "run.yaml", f"experiment.output_dir={output}", *keys]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    latest = find_latest_checkpoint(output)
    if latest:
        open_checkpoint(latest).read()
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    shown = read_tensorboard(output / "tensorboard")
    log = output / "logs" / "rank_0.log"
    return {
        "code": result.returncode,
        "out": result.stdout,
        "err": result.stderr,
        "latest": latest and latest.name,
        "left": sorted(path.name for path in (output / "checkpoints").iterdir()),
        "steps": [row["step"] for row in rows if "train/loss" in row],
        "shown": [step for step, _ in shown["train/loss"]],
        "log": log.read_text() if log.exists() else None,
    }


@pytest.fixture
def small_disk(toy: ToyRun) -> ToyRun:
    here = toy.folder / "probe"
    here.mkdir()
    mount = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(here)]
    if not shutil.which("unshare") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs a tmpfs, which cannot be mounted here, not even in a namespace")
    recipe = toy.folder / "toy_recipe.py"
    recipe.write_text(recipe.read_text().replace("hidden: int = 16", "hidden: int = 60_000") + FILLS)
    return toy


@pytest.mark.slow  # tests/checkpoint/test_rotation.py has a disk without room
@pytest.mark.parametrize(
    ("background", "procs"),
    [("true", 1), ("false", 1), ("true", 2), ("false", 2)],
)
def test_a_full_disk_does_not_end_a_run(small_disk: ToyRun, background: str, procs: int) -> None:
    keys = [f"checkpoint.async_save={background}", f"launch.procs_per_node={procs}", "logging.tensorboard=true"]
    keys += ["training.max_steps=30", "training.batch_size=null", "training.global_batch_size=4"]
    command = ["unshare", "-rm", sys.executable, __file__, str(small_disk.folder), *keys]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS, env=environment)
    assert result.returncode == 0, result.stderr
    outcome = json.loads(result.stdout)
    assert outcome["code"] == 0, outcome["err"]
    warnings = [line for line in outcome["out"].splitlines() if line.startswith("warning: ")]
    assert "step 4 could not be saved: [Errno 28] No space left on device" in warnings[0]
    assert [line.split()[2] for line in warnings] == [str(step) for step in range(4, 26, 2)]
    assert all(line.endswith("; the last checkpoint is 2") for line in warnings)
    assert "Traceback" not in outcome["err"]
    # With room again the next save is good, and nothing of what was written meanwhile is missing.
    assert outcome["left"] == [f"step_{step:08d}" for step in (26, 28, 30)]
    assert outcome["latest"] == "step_00000030"
    assert outcome["steps"] == outcome["shown"] == [*range(1, 31)]
    if procs > 1:
        assert outcome["log"].count("could not be saved") == len(warnings)


if __name__ == "__main__":
    print(json.dumps(in_a_small_disk(Path(sys.argv[1]), sys.argv[2:])))
