"""A run that is killed again and again ends as one that nobody touched, and the command notices when it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import ToyRun

from shoal.checkpoint import find_latest_checkpoint, open_checkpoint, write_checkpoint
from shoal.verify.chaos import _difference, _metric_problems, _problems

KEYS = ["training.device=cpu", "training.eval_steps=10", "checkpoint.every=5", "logging.console=off"]


def test_a_run_survives(toy: ToyRun) -> None:
    keys = [*KEYS, "training.max_steps=60", "launch.procs_per_node=2"]
    result = toy.shoal("chaos", "run.yaml", *keys, "--kills", "1", "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    verdict = json.loads(result.stdout)
    assert verdict["passed"]
    assert len(verdict["kills"]) == 1
    assert {kill["victim"] for kill in verdict["kills"]} <= {"rank 0", "rank 1", "the launcher"}
    assert not list(toy.folder.glob("*chaos*"))  # nothing is left where nothing is to be looked at


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("procs", [2, 4])
def test_fifty_kills(toy: ToyRun, procs: int) -> None:
    import subprocess
    import sys

    keys = [*KEYS, "training.max_steps=1500", f"launch.procs_per_node={procs}", "training.global_batch_size=8"]
    keys += ["training.batch_size=null", "distributed.strategy=fsdp", "checkpoint.async_save=true"]
    command = [sys.executable, "-m", "shoal", "chaos", "run.yaml", *keys, "--kills", "25", "--json"]
    result = subprocess.run(command, cwd=toy.folder, capture_output=True, text=True, timeout=1400)
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(json.loads(result.stdout)["kills"]) == 25


def test_an_end_that_differs_is_noticed(toy: ToyRun) -> None:
    ends = [toy.folder / "a", toy.folder / "b"]
    for folder in ends:
        toy.train(*KEYS, f"experiment.output_dir={folder}")
    assert _problems(_difference(*ends)) == []
    assert _metric_problems(*ends, None) == []
    end = find_latest_checkpoint(ends[1])
    assert end is not None
    checkpoint = open_checkpoint(end)
    state = checkpoint.read()
    state.model["0.weight"] = state.model["0.weight"] + 1e-7
    about = {key: checkpoint.manifest[key] for key in ("layout", "batches", "config")}
    write_checkpoint(end, state, {**checkpoint.trainer, "samples": 41}, about)
    problems = "\n".join(_problems(_difference(*ends)))
    assert "model/0.weight differs" in problems
    assert "samples: 40 undisturbed, 41 disturbed" in problems
    log = ends[1] / "metrics.jsonl"
    drop_last_line(log)
    assert "metrics.jsonl has" in _metric_problems(*ends, None)[0]


def drop_last_line(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def test_a_run_that_fails_by_itself_is_told(toy: ToyRun) -> None:
    result = toy.shoal("chaos", "run.yaml", "training.device=cuda", "--kills", "1")
    assert result.returncode == 2
    assert "the undisturbed run failed with 2" in result.stderr
