"""Runs as jobs of a real SLURM: on two machines, and over a time limit."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ToyRun
from launched import tensors
from slurm_cluster import Slurm, missing, slurm_cluster

pytestmark = [pytest.mark.slow, pytest.mark.clusters, pytest.mark.skipif(bool(missing()), reason=missing())]

TWO_NODES = ("--on", "slurm", "--nodes", "2", "training.device=cpu", "training.global_batch_size=8")
LAUNCHERS = ("--procs-per-node", "2", "training.batch_size=2")
"""With these the task on each machine starts two processes."""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def launch(toy: ToyRun, slurm: Slurm, *arguments: str) -> str:
    """Submits the toy run and returns the id of its job."""
    result = toy.shoal("launch", "run.yaml", *arguments, env=slurm.environment)
    assert result.returncode == 0, result.stderr
    found = re.fullmatch(r"submitted job (\d+)\n(.*\n)+", result.stdout)
    assert found, result.stdout
    return found[1]


def logs(folder: Path) -> str:
    return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted((folder / "slurm").glob("*.log")))


def train_undisturbed(toy: ToyRun, *overrides: str) -> Path:
    """Trains the same run with four processes of this machine."""
    output = toy.folder / "undisturbed"
    ranks = ("launch.procs_per_node=4", "training.batch_size=2")
    keys = ("training.global_batch_size=8", f"experiment.output_dir={output}")
    result = toy.shoal("train", "run.yaml", *ranks, *keys, *overrides)
    assert result.returncode == 0, result.stderr
    return output


def test_a_job_on_two_machines_trains_to_the_end(toy: ToyRun, slurm: Slurm) -> None:
    job = launch(toy, slurm, *TWO_NODES, *LAUNCHERS)
    assert slurm.wait(job) == "COMPLETED", logs(toy.output)
    folder = toy.output / "slurm"
    assert "finished at step 10" in (folder / f"{job}-node0.log").read_text()
    assert (folder / f"{job}-node1.log").exists()
    assert tensors(toy.output, 10) == tensors(train_undisturbed(toy), 10)


def test_a_job_is_warned_before_its_time_limit_and_goes_on_in_the_queue(toy: ToyRun, slurm: Slurm) -> None:
    # The first attempt is so slow that its time limit comes long before the end, however busy the machine is.
    recipe = toy.folder / "toy_recipe.py"
    sleep = 'os.environ.get("SLURM_RESTART_COUNT", "0") == "0" and time.sleep(1.5); return {"x"'
    recipe.write_text("import os, time\n" + recipe.read_text().replace('return {"x"', sleep))
    # SLURM warns all processes of the job here, also those that load data, without which no step would end.
    steps = ("training.max_steps=150", "checkpoint.every=1000", "logging.every=50", "dataset.num_workers=1")
    time_limit = ("launch.slurm.time=5", "launch.slurm.warning_seconds=90")
    job = launch(toy, slurm, *TWO_NODES, *LAUNCHERS, *steps, *time_limit)
    assert slurm.wait(job) == "COMPLETED", logs(toy.output)
    shell_log = (toy.output / "slurm" / f"{job}.log").read_text()
    assert f"job {job} goes back into the queue and resumes" in shell_log
    output = (toy.output / "slurm" / f"{job}-node0.log").read_text()
    stopped = re.search(r"stopped by SIG(TERM|USR1) at step (\d+) of 150; saved", output)
    assert stopped, output
    assert "finished at step 150" in output.partition("saved")[2]
    # Saved at the warning alone: the interval of checkpoints is longer than the run.
    assert (toy.output / "checkpoints" / f"step_{int(stopped[2]):08d}").exists()
    recipe.write_text(recipe.read_text().replace("time.sleep(1.5)", "0"))
    assert tensors(toy.output, 150) == tensors(train_undisturbed(toy, *steps), 150)


def test_a_job_that_is_cancelled_stays_cancelled(toy: ToyRun, slurm: Slurm) -> None:
    job = launch(toy, slurm, *TWO_NODES, "training.max_steps=100000", "logging.every=1000")
    slurm.until(lambda: (toy.output / "checkpoints" / "step_00000002").exists(), 200)
    slurm.call("scancel", job)
    assert slurm.wait(job) == "CANCELLED", logs(toy.output)
    assert "goes back into the queue" not in logs(toy.output)


def test_sbatch_refuses_in_one_line(toy: ToyRun, slurm: Slurm) -> None:
    arguments = ("launch", "run.yaml", *TWO_NODES, "launch.slurm.partition=nowhere")
    result = toy.shoal(*arguments, env=slurm.environment)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert re.search(r"sbatch refused .*job\.sbatch: .*invalid partition", result.stderr)


def test_the_script_that_the_docs_name_submits_a_job(toy: ToyRun, slurm: Slurm) -> None:
    script = Path(__file__).parents[2] / "scripts" / "slurm_job.sh"
    command = ["sbatch", "--parsable", "--nodes=2", "--output=job.log", str(script), "run.yaml", *TWO_NODES[4:]]
    submitted = subprocess.run(
        command, cwd=toy.folder, env={**slurm.environment, "PYTHON": sys.executable}, capture_output=True, text=True
    )
    assert submitted.returncode == 0, submitted.stderr
    assert slurm.wait(submitted.stdout.strip()) == "COMPLETED", (toy.folder / "job.log").read_text()
    assert "finished at step 10" in (toy.folder / "job.log").read_text()
