"""The commands, run as a user runs them."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ToyRun, call_shoal

import shoal
from shoal.errors import UserError

PROBE = """
import sys

from shoal.cli.main import main

sys.argv = ["shoal", "--help"]
try:
    main()
except SystemExit:
    print(*sys.modules, file=sys.stderr)
"""


def test_version_and_help_import_little() -> None:
    """Imports are what takes time: without torch and the like, help comes as fast as the libraries that print it."""
    probe = subprocess.run([sys.executable, "-c", PROBE], check=True, capture_output=True, text=True)
    modules = {*probe.stderr.split()}
    assert "train" in probe.stdout
    assert not {"torch", "numpy", "pydantic", "yaml", "safetensors", "transformers"} & modules
    rooms = {name.split(".")[1] for name in modules if name.startswith("shoal.")}
    assert rooms == {"cli", "errors", "observe"}
    result = subprocess.run([sys.executable, "-m", "shoal", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"shoal {shoal.__version__}\n"


def test_train_prints_how_it_ended(toy: ToyRun) -> None:
    process = toy.fork("train", "run.yaml", "training.max_steps=3")
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert "finished at step 3" in out
    assert "tensorboard --logdir" in out
    assert "training.max_steps=6" in out
    assert out.count("training.max_steps=3") == 0  # the hint must not have both values
    assert "\x1b" not in out + err  # to files: no bars, no colours
    again = toy.call("train", "out/config.yaml")
    assert again.returncode == 0, again.stderr
    assert "already" in again.stdout


def test_the_suggested_command_uses_the_key_of_the_config(
    toy: ToyRun, change_recipe: Callable[[str, str], None]
) -> None:
    epochs = toy.call("train", "run.yaml", "training.max_steps=null", "training.num_epochs=1", "dataset.size=8")
    assert "training.num_epochs=2" in epochs.stdout
    change_recipe("return Squares(self.config.dataset.size)", "return Stream()")
    stream = "class Stream:\n    def open(self, start):\n        return (Squares(9)[i] for i in range(start, 9))\n\n\n"
    change_recipe("class Toy", f"{stream}class Toy")
    ended = toy.call("train", "run.yaml", "experiment.output_dir=stream", "dataset.size=103")
    assert "the data ended before step 10" in ended.stdout


def test_config_shows_sources_and_loads_again(toy: ToyRun) -> None:
    result = toy.call("config", "run.yaml", "training.learning_rate=1e-3")
    assert result.returncode == 0, result.stderr
    assert "learning_rate: 0.001" in result.stdout
    (toy.folder / "again.yaml").write_text(result.stdout)
    again = toy.call("config", "again.yaml")
    strip = [line.split("#")[0].rstrip() for line in again.stdout.splitlines()]
    assert strip == [line.split("#")[0].rstrip() for line in result.stdout.splitlines()]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "missing.yaml"], ["missing.yaml", "no such file"]),
        (["train", "."], ["is a directory; give a YAML file"]),
        (["train", "run.yaml", "training.max_stepz=3"], ["training.max_stepz", "training.max_steps"]),
        (["train", "run.yaml", "training.device=cuda"], ["training.device", "cuda"]),
        (["train", "run.yaml", "training.tf32=true"], ["training.tf32"]),
        (["train", "run.yaml", "dataset.pin_memory=true"], ["dataset.pin_memory"]),
        (["train", "run.yaml", "training.max_steps=-3"], ["training.max_steps", "-3"]),
        (["train", "run.yaml", "experiment.output_dir=/proc/nowhere"], ["experiment.output_dir"]),
        (["train", "run.yaml", "experiment.output_dir=run.yaml"], ["experiment.output_dir"]),
        (
            ["train", "run.yaml", "training.global_batch_size=7", "training.gradient_accumulation=3"],
            ["4 ×", "= 12", "7"],
        ),
        (["config", "run.yaml", "training.global_batch_size=7", "training.gradient_accumulation=3"], ["= 12"]),
        (["train", "run.yaml", "dataset.size=0"], ["train_data"]),
    ],
)
def test_mistakes_are_one_line_and_exit_2(toy: ToyRun, arguments: list[str], words: list[str]) -> None:
    result = toy.call(*arguments)
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("shoal: error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr
    assert not (toy.output / "checkpoints").exists()


def test_a_process_ends_with_2_after_one_line(toy: ToyRun) -> None:
    result = toy.shoal("train", "run.yaml", "training.device=cuda")
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(r"shoal: error: training\.device = .*\n", result.stderr)


def test_debug_shows_the_traceback(toy: ToyRun) -> None:
    with pytest.raises(UserError, match=r"training\.device"):
        toy.call("train", "run.yaml", "training.device=cuda", "--debug")


def test_eval_steps_without_evaluation_data_are_refused(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe("return Squares(17)", "return None")
    result = toy.call("train", "run.yaml", "training.eval_steps=5")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "training.eval_steps = 5" in result.stderr


def test_a_real_language_model_trains_and_writes(tmp_path: Path) -> None:
    """A small version of the demo: BDH on bytes of text."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    (tmp_path / "run.yaml").write_text(
        "recipe: bdh\n"
        "model: {n_layer: 2, n_embd: 32, n_head: 2, mlp_internal_dim_multiplier: 8, dropout: 0.0}\n"
        "dataset: {name: text, files: text.txt, seq_length: 48, eval_fraction: 0.1, cache_dir: cache}\n"
        "training: {max_steps: 60, batch_size: 8, learning_rate: 1e-2, warmup_steps: 5}\n"
    )
    result = call_shoal(tmp_path, "train", "run.yaml")
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("step ")]
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines]
    assert losses[0] > 5
    assert losses[-1] < 1.5
    assert "\npreview\n" in result.stdout
    assert (tmp_path / "runs" / "run" / "tensorboard").is_dir()


def test_control_characters_in_an_error_do_not_reach_the_terminal(tmp_path: Path) -> None:
    result = call_shoal(tmp_path, "checkpoint", "ls", "a\x1b[2Jb")
    assert result.returncode == 2
    assert result.stderr == "shoal: error: a\\x1b[2Jb: no such folder\n"


def test_help_shows_no_type_for_flags_and_torchao_is_quiet(toy: ToyRun) -> None:
    for command in ((), ("train",), ("checkpoint", "diff"), ("configs", "cp")):
        result = toy.call(*command, "--help")
        assert "--help" in result.stdout
        assert "<bool>" not in result.stdout
    assert not logging.getLogger("torchao.kernel").isEnabledFor(logging.WARNING)


def test_config_shows_what_was_changed(toy: ToyRun) -> None:
    result = toy.call("config", "run.yaml", "--changed", "training.learning_rate=3e-4")
    assert result.returncode == 0, result.stderr
    assert "batch_size: 4" in result.stdout
    assert "learning_rate" not in result.stdout  # it is the default


def test_ctrl_c_before_anything_has_begun_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    (tmp_path / "run.yaml").write_text("recipe: bdh")
    monkeypatch.setattr("shoal.config.load_run", interrupt)
    result = call_shoal(tmp_path, "config", "run.yaml")
    assert (result.returncode, result.stderr) == (130, "shoal: interrupted\n")


def test_warnings_of_shoal_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of other packages are Python's, with their place."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # gives it back in the end
    call_shoal(Path.cwd(), "--version")
    warnings.showwarning("lengths vary", UserWarning, str(Path(shoal.__file__).with_name("forward.py")), 7)
    assert capsys.readouterr().err == "shoal: warning: lengths vary\n"
    module = sys.modules["shoal.cli.main"]
    monkeypatch.setattr(module, "_SHOW_WARNING", lambda *about: print(about[0], about[3], file=sys.stderr))
    warnings.showwarning("old", UserWarning, "/elsewhere/module.py", 7)
    assert capsys.readouterr().err == "old 7\n"
