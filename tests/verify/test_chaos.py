"""A run whose processes are killed ends like an uninterrupted one, and `shoal chaos` notices if it does not."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from conftest import ForkedShoal, ToyRun

from shoal.checkpoint import find_latest_checkpoint, open_checkpoint, write_checkpoint
from shoal.observe.loggers import JsonlLogger, TensorBoardLogger
from shoal.verify.chaos import checkpoint_problems, log_problems

KEYS = ["training.device=cpu", "training.eval_steps=10", "checkpoint.every=5", "logging.console=off"]


def fork(command: list[str], stdout: IO[str], **options: Any) -> ForkedShoal:
    assert command[:3] == [sys.executable, "-m", "shoal"]
    return ForkedShoal(Path.cwd(), command[3:], Path(stdout.name))


def test_a_run_survives(
    toy: ToyRun, change_recipe: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.verify.chaos.subprocess", SimpleNamespace(Popen=fork))
    survive(toy, change_recipe, 1, {"the process"}, sleep_seconds=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("procs", "victims"), [(1, {"the process"}), (2, {"rank 0", "rank 1", "the launcher"})])
def test_a_run_of_new_processes_survives(
    toy: ToyRun, change_recipe: Callable[[str, str], None], procs: int, victims: set[str]
) -> None:
    survive(toy, change_recipe, procs, victims)


def survive(
    toy: ToyRun,
    change_recipe: Callable[[str, str], None],
    procs: int,
    victims: set[str],
    sleep_seconds: float = 0.02,  # leaves time for the kill
) -> None:
    change_recipe('return {"x"', f'import time; time.sleep({sleep_seconds}); return {{"x"')
    keys = [*KEYS, "training.max_steps=40", f"launch.procs_per_node={procs}"]
    result = toy.call("chaos", "run.yaml", *keys, "--kills", "1", "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    verdict = json.loads(result.stdout)
    assert verdict["passed"]
    assert len(verdict["kills"]) == 1
    assert {kill["victim"] for kill in verdict["kills"]} <= victims
    assert not list(toy.folder.glob("*chaos*"))  # the folders are removed if the runs agree


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("procs", [1, 2])
def test_the_logs_of_a_run_that_was_killed_five_times(
    toy: ToyRun, change_recipe: Callable[[str, str], None], procs: int
) -> None:
    """Compares the numbers and texts of TensorBoard too."""
    preview = '    def preview(self, model):\n        return f"{model[0].bias.sum()}"\n\n'
    change_recipe("    def loss", f"{preview}    def loss")
    change_recipe('return {"x"', 'import time; time.sleep(0.01); return {"x"')
    keys = [*KEYS, "training.max_steps=150", f"launch.procs_per_node={procs}", "logging.tensorboard=true"]
    result = toy.shoal("chaos", "run.yaml", *keys, "training.eval_steps=3", "--kills", "5", "--json", timeout=800)
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(json.loads(result.stdout)["kills"]) == 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("procs", [2, 4])
def test_fifty_kills(toy: ToyRun, procs: int) -> None:
    import subprocess
    import sys

    keys = [*KEYS, "training.max_steps=1000", f"launch.procs_per_node={procs}", "training.global_batch_size=8"]
    keys += ["training.batch_size=null", "distributed.strategy=fsdp", "checkpoint.async_save=true"]
    command = [sys.executable, "-m", "shoal", "chaos", "run.yaml", *keys, "logging.tensorboard=true"]
    result = subprocess.run(
        [*command, "--kills", "50", "--json"], cwd=toy.folder, capture_output=True, text=True, timeout=1700
    )
    assert result.returncode == 0, result.stdout + result.stderr
    kills = json.loads(result.stdout)["kills"]
    assert len(kills) == 50
    assert {kill["moment"] for kill in kills} == {"in a step", "in an evaluation", "in a save"}
    assert len({kill["victim"] for kill in kills}) == procs + 1


def test_an_end_that_differs_is_noticed(toy: ToyRun) -> None:
    ends = [toy.folder / "a", toy.folder / "b"]
    for folder in ends:
        toy.train(*KEYS, f"experiment.output_dir={folder}")
    assert checkpoint_problems(*ends, None) == []
    assert log_problems(*ends, None) == []
    end = find_latest_checkpoint(ends[1])
    assert end is not None
    checkpoint = open_checkpoint(end)
    state = checkpoint.read()
    state.model["0.weight"] = state.model["0.weight"] + 1e-7
    about = {key: checkpoint.manifest[key] for key in ("layout", "batches", "config")}
    write_checkpoint(end, state, {**checkpoint.trainer, "samples": 41}, about)
    problems = "\n".join(checkpoint_problems(*ends, None))
    assert "model/0.weight: differs by " in problems
    assert "samples: 40 in the uninterrupted run, 41 in the killed run" in problems
    log = ends[1] / "metrics.jsonl"
    drop_last_line(log)
    assert "metrics.jsonl: " in log_problems(*ends, None)[0]


def test_what_tensorboard_shows_is_compared(tmp_path: Path) -> None:
    loggers = {name: TensorBoardLogger(tmp_path / name, 0) for name in ("a", "b")}
    for logger in loggers.values():
        logger.log(1, {"train/loss": 1.0, "train/grad_norm": float("nan"), "train/data_seconds": random.random()})
        logger.text(1, "preview", "words")
    folders = [tmp_path / name for name in loggers]
    assert log_problems(*folders, None) == []
    loggers["b"].log(2, {"train/loss": 1.0})
    assert log_problems(*folders, None) == [
        "tensorboard: 2 values of train/loss in the killed run, 1 in the uninterrupted run"
    ]
    loggers["a"].log(2, {"train/loss": 2.0})
    assert log_problems(*folders, None) == ["tensorboard: train/loss differs at step 2"]
    assert log_problems(*folders, 1e-6) == []
    loggers["a"].text(2, "sample", "words")
    assert log_problems(*folders, 1e-6) == ["tensorboard: sample/text_summary is in only one of the runs"]


def drop_last_line(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def test_a_run_that_fails_by_itself_is_told(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.verify.chaos.subprocess", SimpleNamespace(Popen=fork))
    result = toy.call("chaos", "run.yaml", "training.device=cuda", "--kills", "1")
    assert result.returncode == 2
    assert "the uninterrupted run failed with exit code 2" in result.stderr


def test_previews_that_one_run_showed_less_often_are_no_difference(tmp_path: Path) -> None:
    """How long they take decides how often they are shown; those that both have must be equal."""
    folders = [tmp_path / name for name in ("a", "b")]
    loggers = {}
    for folder in folders:
        folder.mkdir()
        loggers[folder] = [TensorBoardLogger(folder, 0), JsonlLogger(folder, 0)]
        for logger in loggers[folder]:
            logger.log(1, {"train/loss": 1.0})
            logger.text(1, "preview", "words")
    for logger in loggers[folders[1]]:
        logger.text(2, "preview", "more words")
    assert log_problems(*folders, None) == []
    for folder in folders:
        for logger in loggers[folder]:
            logger.text(3, "preview", folder.name)
    assert log_problems(*folders, None) == [
        "metrics.jsonl: preview differs at step 3",
        "tensorboard: preview/text_summary differs at step 3",
    ]
