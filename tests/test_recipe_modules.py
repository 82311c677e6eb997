"""Recipes as modules, and scripts/train.py: the command lines that people know for training."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from conftest import PATIENCE_SECONDS, ToyRun

from shoal.config.run import RECIPES

ROOT = Path(__file__).parent.parent
SCRIPT = str(ROOT / "scripts" / "train.py")
BDH = """
training: {max_steps: 2, batch_size: 2, device: cpu}
model: {n_layer: 1, n_embd: 8, n_head: 1, mlp_internal_dim_multiplier: 2}
dataset: {name: text, files: [text.txt], seq_length: 8, cache_dir: cache}
logging: {tensorboard: false, console: plain}
"""


def run_main(module: str, folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Runs a module, or a script by its path, as `python` does; returns its exit code and what it prints."""
    out, err, code = StringIO(), StringIO(), 0
    run = runpy.run_path if module.endswith(".py") else runpy.run_module
    with patch.object(sys, "argv", [module, *arguments]), chdir(folder), redirect_stdout(out), redirect_stderr(err):
        try:
            run(module, run_name="__main__")
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


def module_of(recipe: str) -> str:
    return RECIPES[recipe].partition(":")[0]


def argv_of(module: str, folder: Path, *arguments: str) -> list[str]:
    """Returns the command of `shoal` that a module would run."""
    seen: list[list[str]] = []
    with patch.object(import_module("shoal.cli.main"), "main", lambda: seen.append([*sys.argv])):
        code, _, err = run_main(module, folder, *arguments)
    assert code == 0, err
    return seen[0]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_run_as_a_module_never_does_nothing(recipe: str, tmp_path: Path) -> None:
    code, _, err = run_main(module_of(recipe), tmp_path)
    assert code == 2
    assert f"usage: python -m {module_of(recipe)}" in err
    assert "a config file is missing; give --config run.yaml" in err
    (tmp_path / "run.yaml").write_text("training: {max_steps: 1}\n")
    run = ["shoal", "train", "--", "run.yaml", f"recipe={recipe}"]
    assert argv_of(module_of(recipe), tmp_path, "--config", "run.yaml") == run


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_it_trains(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Many fish swim as one. " * 20)
    (tmp_path / "small.yaml").write_text(BDH)
    code, out, err = run_main("shoal.recipes.bdh", tmp_path, "--config", "small.yaml", "training.max_steps=1")
    assert code == 0, err
    assert "finished at step 1" in out
    assert (tmp_path / "runs" / "small" / "checkpoints" / "step_00000001").is_dir()
    code, _, err = run_main("shoal.recipes.text_lora", tmp_path, "--config", "small.yaml", "recipe=bdh")
    assert code == 2
    assert err == (
        "shoal: error: recipe = 'bdh' in small.yaml, but this is the module of text_lora; run shoal train small.yaml, "
        "or leave the key out\n"
    )


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_the_words_of_launchers_and_of_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("recipe: text_lora\n")
    words: Sequence[Any] = ("--local_rank=1", "--config", "run.yaml", "--deepspeed", "zero.json", "--fresh")
    assert argv_of("shoal.recipes.text_lora", tmp_path, *words) == [
        *("shoal", "train", "--fresh", "--", "run.yaml"),
        *("distributed.strategy=deepspeed", "distributed.deepspeed.config_file=zero.json"),
    ]
    plain = ["shoal", "train", "--", "run.yaml", "training.max_steps=3"]
    assert argv_of(SCRIPT, tmp_path, "run.yaml", "training.max_steps=3") == plain
    assert argv_of(SCRIPT, tmp_path, "training.max_steps=3", "--config", "run.yaml") == plain
    code, _, err = run_main(SCRIPT, tmp_path, "--config", "run.yaml", "other.yaml")
    assert code == 2
    assert "'other.yaml' is not an override such as training.max_steps=50, and the config is run.yaml" in err


def test_the_script_trains(toy: ToyRun) -> None:
    code, out, err = run_main(SCRIPT, toy.folder, "run.yaml", "training.max_steps=1")
    assert code == 0, err
    assert "finished at step 1" in out
    code, _, err = run_main(SCRIPT, toy.folder, "--config", "nowhere.yaml")
    assert code == 2
    assert err.startswith("shoal: error: nowhere.yaml")
    assert err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_under_launchers(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "text.txt").write_text("Many fish swim as one. " * 20)
    (tmp_path / "run.yaml").write_text(BDH)
    zero = {"zero_optimization": {"stage": 2}, "train_batch_size": "auto"}
    (tmp_path / "zero.json").write_text(json.dumps(zero))
    world = urlsafe_b64encode(b'{"localhost": [0, 1]}').decode()
    place = ["--master_addr=127.0.0.1", "--master_port=29541"]
    start = {
        "torchrun": ["torch.distributed.run", "--nproc_per_node=2", *place, "-m"],
        "deepspeed": ["deepspeed.launcher.launch", f"--world_info={world}", *place, "--module"],
    }[launcher]
    words = ["shoal.recipes.bdh", "--config", "run.yaml", "--deepspeed", "zero.json"]
    result = subprocess.run(
        [sys.executable, "-m", *start, *words],
        cwd=tmp_path,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    assert "finished at step 2" in result.stdout
    assert "ZeRO-2, optimizer and gradients over 2 ranks" in (tmp_path / "runs" / "run" / "report.txt").read_text()
