"""A run that was interrupted ends as one that was not, to the bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ToyRun
from safetensors.torch import load_file

from shoal.checkpoint import find_latest_checkpoint
from shoal.errors import UserError


def tensors(output: Path, step: int) -> dict[str, bytes]:
    folder = output / "checkpoints" / f"step_{step:08d}"
    return {
        f"{file}/{name}": tensor.numpy().tobytes()
        for file in ("model", "optimizer")
        for name, tensor in load_file(folder / f"{file}.safetensors").items()
    }


def wait_for(path: Path, process: subprocess.Popen[bytes], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, "the run ended early"
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.01)


@pytest.mark.parametrize("optimizer", ["adamw", "{name: sgd, momentum: 0.9}"])
@pytest.mark.parametrize("workers", [0, 2])
def test_ten_steps_are_four_and_six(toy: ToyRun, optimizer: str, workers: int) -> None:
    options = (f"training.optimizer={optimizer}", f"dataset.num_workers={workers}", "training.gradient_accumulation=3")
    toy.train(*options, f"experiment.output_dir={toy.folder}/whole")
    toy.train(*options, "checkpoint.keep_last=9")
    for step in (6, 8, 10):
        shutil.rmtree(toy.output / "checkpoints" / f"step_{step:08d}")
    outcome = toy.train(*options)
    assert outcome.step == 10
    whole = tensors(toy.folder / "whole", 10)
    assert len(whole) >= 8  # four tensors in the model, and at least one moment each
    assert tensors(toy.output, 10) == whole
    assert toy.metrics() == toy.metrics(output=toy.folder / "whole")


def test_kill_minus_nine_loses_nothing(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    toy.train(f"experiment.output_dir={toy.folder}/whole")
    change_recipe('return {"x"', 'import time; time.sleep(0.02); return {"x"')
    process = subprocess.Popen([sys.executable, "-m", "shoal", "train", "run.yaml"], cwd=toy.folder)
    try:
        wait_for(toy.output / "checkpoints" / "step_00000004", process)
    finally:
        process.kill()
        process.wait()
    assert find_latest_checkpoint(toy.output)
    assert not (toy.output / "checkpoints" / "step_00000010").exists()
    result = toy.shoal("train", "run.yaml")
    assert result.returncode == 0, result.stderr
    assert tensors(toy.output, 10) == tensors(toy.folder / "whole", 10)
    assert toy.metrics() == toy.metrics(output=toy.folder / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_leaves(
    toy: ToyRun, change_recipe: Callable[[str, str], None], number: signal.Signals
) -> None:
    change_recipe('return {"x"', 'import time; time.sleep(0.02); return {"x"')
    command = [sys.executable, "-m", "shoal", "train", "run.yaml", "checkpoint.every=100", "training.max_steps=1000"]
    process = subprocess.Popen(command, cwd=toy.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(toy.output / "report.txt", process)
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert b"Traceback" not in err
    assert b"saved" in out
    assert b"go on with" in out
    latest = find_latest_checkpoint(toy.output)
    assert latest is not None
    step = json.loads((latest / "trainer.json").read_text())["step"]
    assert f"at step {step} of 1000".encode() in out


def test_a_damaged_checkpoint_is_passed_over_with_a_message(toy: ToyRun, capfd: pytest.CaptureFixture[str]) -> None:
    toy.train("checkpoint.keep_last=9")
    newest = toy.output / "checkpoints" / "step_00000010" / "model.safetensors"
    data = bytearray(newest.read_bytes())
    data[-3] ^= 1
    newest.write_bytes(bytes(data))
    whole = tensors(toy.output, 8)
    capfd.readouterr()
    assert toy.train("training.max_steps=12").step == 12
    out = "".join(capfd.readouterr())
    assert "step_00000010 is damaged" in out
    assert "step 9/12" in out
    assert tensors(toy.output, 8) == whole


def test_finished_runs_stay_finished(toy: ToyRun) -> None:
    first = toy.train()
    assert toy.train("training.max_steps=7").step == 10
    before = (toy.output / "metrics.jsonl").read_text()
    second = toy.train()
    assert (first.step, second.step) == (10, 10)
    assert [line for line in before.splitlines() if "train/loss" in line] == [
        line for line in (toy.output / "metrics.jsonl").read_text().splitlines() if "train/loss" in line
    ]


def test_resume_from_a_path(toy: ToyRun) -> None:
    toy.train("checkpoint.keep_last=9")
    start = toy.output / "checkpoints" / "step_00000004"
    other = toy.folder / "other"
    outcome = toy.train(f"checkpoint.resume={start}", f"experiment.output_dir={other}")
    assert outcome.step == 10
    assert min(toy.metrics(output=other)) == 5
    assert tensors(other, 10) == tensors(toy.output, 10)
    # Inside its own folder a path goes back, and what came after is set aside, not deleted.
    toy.train(f"checkpoint.resume={start}", "checkpoint.keep_last=9")
    assert (toy.output / "checkpoints" / "abandoned" / "step_00000010").is_dir()
    assert tensors(other, 10) == tensors(toy.output, 10)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.hidden=17"], ["another model", "0.weight [16, 1] there, [17, 1] here"]),
        (["dataset.size=99"], ["dataset.size", "99", "103", "allow_changed"]),
        (["experiment.seed=1"], ["experiment.seed"]),
        (["training.batch_size=5"], ["training.global_batch_size", "5", "4"]),
        (["checkpoint.resume=never"], ["checkpoint.resume", "step_00000010"]),
        (["checkpoint.resume=nowhere"], ["checkpoint.resume", "nowhere"]),
        (["checkpoint.resume=."], ["holds no usable checkpoint"]),
    ],
)
def test_another_run_in_the_same_folder_is_refused(toy: ToyRun, overrides: list[str], words: list[str]) -> None:
    toy.train()
    with pytest.raises(UserError) as caught:
        toy.train("training.max_steps=20", *overrides)
    for word in words:
        assert word in str(caught.value)


def test_what_is_allowed_to_change_may(toy: ToyRun) -> None:
    toy.train()
    allowed = "checkpoint.allow_changed=[dataset.size, training.global_batch_size]"
    assert toy.train("training.max_steps=12", "dataset.size=99", "training.batch_size=5", allowed).step == 12


def test_rotation_keeps_the_last_k(toy: ToyRun) -> None:
    toy.train("checkpoint.keep_last=2")
    assert sorted(p.name for p in (toy.output / "checkpoints").iterdir()) == ["step_00000008", "step_00000010"]


def test_an_evaluation_that_a_signal_cut_short_is_made_up_for(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ("training.eval_steps=2", "training.lr_scheduler=constant")
    with monkeypatch.context() as patch:
        patch.setattr("shoal.training.trainer.Trainer.evaluate", lambda self: None)
        toy.train(*keys, "training.max_steps=4")
    toy.train(*keys, "training.max_steps=7")
    assert sorted(toy.metrics("eval/loss")) == [4, 6, 7]
