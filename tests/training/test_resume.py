"""A run that was interrupted ends as one that was not, to the bit."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import PATIENCE_SECONDS, ForkedShoal, Gate, ToyRun
from pool import Pool
from safetensors.torch import load_file

from shoal.checkpoint import find_latest_checkpoint, open_checkpoint
from shoal.checkpoint.manifest import manifest_digest
from shoal.config import load_run
from shoal.errors import UserError
from shoal.training import train
from shoal.verify.chaos import log_problems


def tensors(output: Path, step: int) -> dict[str, bytes]:
    folder = output / "checkpoints" / f"step_{step:08d}"
    return {
        f"{file}/{name}": tensor.numpy().tobytes()
        for file in ("model", "optimizer")
        for name, tensor in load_file(folder / f"{file}.safetensors").items()
    }


def wait_for(path: Path, process: ForkedShoal) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not path.exists():
        assert process.poll() is None, "the run ended early"
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("workers", "optimizer"),
    [
        (0, "adamw"),
        (0, "{name: sgd, momentum: 0.9}"),
        (2, "adamw"),
        pytest.param(2, "{name: sgd, momentum: 0.9}", marks=pytest.mark.slow),
    ],
)
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


SHUFFLED = """
        import random

        import numpy as np

        data = Squares(self.config.dataset.size)
        kept = random.sample(range(len(data)), 40)
        return torch.utils.data.Subset(data, np.random.permutation(kept).tolist())
"""


def test_a_dataset_that_shuffles_itself_is_the_same_in_every_process(
    toy: ToyRun, change_recipe: Callable[[str, str], None]
) -> None:
    change_recipe("        return Squares(self.config.dataset.size)\n", SHUFFLED)
    toy.train(f"experiment.output_dir={toy.folder}/whole")
    toy.train()
    for step in (8, 10):
        shutil.rmtree(toy.output / "checkpoints" / f"step_{step:08d}")
    random.seed()  # another process has another state
    np.random.seed()
    toy.train()
    assert tensors(toy.output, 10) == tensors(toy.folder / "whole", 10)


def test_random_buffers_of_a_constructor_are_the_same_in_every_process(
    toy: ToyRun, change_recipe: Callable[[str, str], None]
) -> None:
    change_recipe("return nn.Sequential(", "return WithFeatures(")
    change_recipe(
        "class Toy",
        "class WithFeatures(nn.Sequential):\n"
        "    def __init__(self, *modules):\n"
        "        super().__init__(*modules)\n"
        "        self.register_buffer('features', torch.randn(4), persistent=False)\n\n"
        "    def forward(self, input):\n"
        "        return super().forward(input + self.features.mean())\n\n\nclass Toy",
    )
    toy.train()
    torch.seed()  # another process has another state
    toy.train(f"experiment.output_dir={toy.folder}/other")
    assert tensors(toy.output, 10) == tensors(toy.folder / "other", 10)


DROPS_LAYERS = """
import random

import numpy as np


class MaySkip(nn.Linear):
    def forward(self, x):
        return super().forward(x) * np.random.rand() if random.random() < 0.5 else x


class Toy"""


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_layers_dropped_by_pythons_and_numpys_generators_repeat(
    toy: ToyRun, change_recipe: Callable[[str, str], None], mode: str
) -> None:
    change_recipe("class Toy", DROPS_LAYERS)
    change_recipe("nn.Tanh()", "MaySkip(hidden, hidden)")
    options = "training.gradient_accumulation=2", "training.activation_checkpointing={mode: MODE, classes: [MaySkip]}"
    options = tuple(option.replace("MODE", mode) for option in options)[: 1 if mode == "none" else 2]
    toy.train(f"experiment.output_dir={toy.folder}/whole", "training.gradient_accumulation=2")
    toy.train(*options)
    shutil.rmtree(toy.output / "checkpoints" / "step_00000010")
    random.seed()  # another process has another state
    np.random.seed()
    toy.train(*options)
    assert tensors(toy.output, 10) == tensors(toy.folder / "whole", 10)


def test_a_recipe_that_draws_from_global_generators_repeats_itself(
    toy: ToyRun, change_recipe: Callable[[str, str], None]
) -> None:
    change_recipe(
        "    def inputs(",
        "    def prepare_batch(self, batch, rng):\n"
        "        import random, numpy as np\n"
        "        noise = torch.rand(()) + random.random() + np.random.rand()\n"
        "        return {**batch, 'x': batch['x'] + 0.1 * noise}\n\n    def inputs(",
    )
    toy.train(f"experiment.output_dir={toy.folder}/whole")
    toy.train()
    shutil.rmtree(toy.output / "checkpoints" / "step_00000010")
    random.seed()  # another process has another state
    np.random.seed()
    toy.train()
    assert tensors(toy.output, 10) == tensors(toy.folder / "whole", 10)


def test_kill_minus_nine_loses_nothing(toy: ToyRun, gate: Gate) -> None:
    toy.train(f"experiment.output_dir={toy.folder}/whole")
    gate.close_after(4)
    process = toy.fork("train", "run.yaml")
    try:
        wait_for(toy.output / "checkpoints" / "step_00000004", process)
    finally:
        process.kill()
        process.wait()
        gate.open()
    assert find_latest_checkpoint(toy.output)
    assert not (toy.output / "checkpoints" / "step_00000010").exists()
    result = toy.call("train", "run.yaml")
    assert result.returncode == 0, result.stderr
    assert tensors(toy.output, 10) == tensors(toy.folder / "whole", 10)
    assert toy.metrics() == toy.metrics(output=toy.folder / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_saves_and_leaves(
    toy: ToyRun, change_recipe: Callable[[str, str], None], number: signal.Signals
) -> None:
    change_recipe('return {"x"', 'import time; time.sleep(0.02); return {"x"')
    process = toy.fork("train", "run.yaml", "checkpoint.every=100", "training.max_steps=1000")
    wait_for(toy.output / "report.txt", process)
    os.kill(process.pid, number)
    out, err = process.communicate()
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    assert "saved" in out
    assert "resume with" in out
    latest = find_latest_checkpoint(toy.output)
    assert latest is not None
    step = json.loads((latest / "trainer.json").read_text())["step"]
    assert f"at step {step} of 1000" in out


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


def test_a_copy_under_the_name_of_another_step_is_passed_over(toy: ToyRun, capfd: pytest.CaptureFixture[str]) -> None:
    toy.train("training.max_steps=4")
    checkpoints = toy.output / "checkpoints"
    shutil.copytree(checkpoints / "step_00000002", checkpoints / "step_00000099")
    capfd.readouterr()
    assert toy.train("training.max_steps=6").first_step == 4
    assert (
        "step_00000099: it is the checkpoint of step 2, so the folder was copied or renamed" in capfd.readouterr().out
    )
    assert toy.train("training.max_steps=8").first_step == 6
    with pytest.raises(UserError, match="copied or renamed"):
        toy.train("training.max_steps=10", f"checkpoint.resume={checkpoints}/step_00000099")


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "delete":
        path.unlink()
    elif how == "truncate":
        path.write_bytes(data[:-1])
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["truncate", "delete", "flip"])
def test_whatever_file_is_damaged_the_previous_checkpoint_is_used(
    toy: ToyRun, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of one checkpoint after the other, each in another file."""
    keys = ("training.max_steps=4", "checkpoint.keep_last=9", "training.mixed_precision=fp32")
    toy.train(*keys)
    newest = toy.output / "checkpoints" / "step_00000004"
    whole = tensors(toy.output, 4)
    files = sorted(path.name for path in newest.iterdir())
    assert len(files) == 4
    for file in files:
        damage(newest / file, how)
        capfd.readouterr()
        outcome = toy.train(*keys)
        assert (outcome.first_step, outcome.step) == (2, 4), file
        answer = [line for line in capfd.readouterr().out.splitlines() if line.startswith("warning: ")]
        assert [line for line in answer if "checkpoint step_00000004 is damaged and passed over" in line] == answer
        assert len(answer) == 1
        assert tensors(toy.output, 4) == whole


@pytest.mark.slow
@pytest.mark.parametrize("how", ["truncate", "delete", "flip"])
def test_whatever_file_of_two_ranks_is_damaged(toy: ToyRun, pool2: Pool, how: str) -> None:
    """Also one that a single rank reads."""
    keys = ["training.max_steps=4", "checkpoint.keep_last=9", "distributed.strategy=fsdp"]
    pool2.run(first_and_last_step, toy.config, keys, init=False)
    newest = toy.output / "checkpoints" / "step_00000004"
    files = sorted(path.name for path in newest.iterdir())
    assert len(files) == 6
    for file in files:
        damage(newest / file, how)
        assert pool2.run(first_and_last_step, toy.config, keys, init=False) == [(2, 4)] * 2, file


def first_and_last_step(config: Path, overrides: list[str]) -> tuple[int, int]:
    outcome = train(load_run(config, overrides))
    return outcome.first_step, outcome.step


def resigned(folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> None:
    """Changes manifest and trainer.json as someone would who knows how digests are made."""
    manifest, trainer = (json.loads((folder / f"{name}.json").read_text()) for name in ("manifest", "trainer"))
    manifest.pop("digest")
    change(manifest, trainer)
    text = json.dumps(trainer)
    manifest["files"]["trainer.json"] = {"bytes": len(text), "sha256": sha256(text.encode()).hexdigest()}
    (folder / "trainer.json").write_text(text)
    manifest["digest"] = manifest_digest(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest, trainer: trainer.pop("step"),
        lambda manifest, trainer: trainer.update(step="4"),
        lambda manifest, trainer: trainer.update(samples=-1),
        lambda manifest, trainer: trainer.update(samples=1 << 70),
        lambda manifest, trainer: trainer.update(skipped_steps=None),
        lambda manifest, trainer: manifest.update(config=[1]),
        lambda manifest, trainer: manifest.update(batches=[[0]]),
        lambda manifest, trainer: manifest.update(batches=[[0, 0]]),
        lambda manifest, trainer: manifest.update(batches=7),
        lambda manifest, trainer: manifest.update(layout={"data_size": 0}),
        lambda manifest, trainer: manifest.update(layout=None),
    ],
)
def test_a_checkpoint_that_is_nowhere_in_a_run_is_passed_over(toy: ToyRun, change: Any) -> None:
    toy.train("training.max_steps=4")
    resigned(toy.output / "checkpoints" / "step_00000004", change)
    assert toy.train("training.max_steps=4").first_step == 2


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
    report = (other / "report.txt").read_text()
    assert re.search(rf"^weights +from {re.escape(str(start))}  \(command line\)$", report, re.MULTILINE), report
    assert "drawn by name" not in report
    assert tensors(other, 10) == tensors(toy.output, 10)
    # Inside its own folder a path goes back, and what came after is set aside, not deleted, however often.
    abandoned = toy.output / "checkpoints" / "abandoned"
    for names in (["step_00000010"], ["step_00000010", "step_00000010.2"]):
        toy.train(f"checkpoint.resume={start}", "checkpoint.keep_last=9")
        assert sorted(path.name for path in abandoned.glob("step_00000010*")) == names
        assert tensors(other, 10) == tensors(toy.output, 10)


@pytest.mark.parametrize("key", ["damaged", "model.hidden=17", "experiment.seed=1"])
def test_a_path_that_cannot_be_used_changes_nothing(toy: ToyRun, key: str) -> None:
    toy.train("checkpoint.keep_last=9")
    start = toy.output / "checkpoints" / "step_00000004"
    if key == "damaged":
        damage(start / "optimizer.safetensors", "flip")
    before = sorted(path.name for path in start.parent.iterdir())
    with pytest.raises(UserError):
        toy.train(f"checkpoint.resume={start}", *(() if key == "damaged" else (key,)))
    assert sorted(path.name for path in start.parent.iterdir()) == before


def test_a_run_that_is_started_again_does_not_go_back_again(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.train("checkpoint.keep_last=9")
    back = (f"checkpoint.resume={toy.output}/checkpoints/step_00000004", "checkpoint.keep_last=1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    first = toy.train(*back, "training.max_steps=8")  # killed before it got that far, it has to go back
    assert (first.first_step, first.step) == (4, 8)
    again = toy.train(*back)  # though the path itself is rotated away by now
    assert (again.first_step, again.step) == (8, 10)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    with pytest.raises(UserError, match="no such folder"):  # but a person means what they say
        toy.train(*back)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["model.hidden=17"],
            ["model.hidden = 17 (was 16): ", "another model: 0.bias is [16] in the file and [17] in"],
        ),
        (["dataset.size=99"], ["dataset.size", "99", "103", "allow_changed"]),
        (["experiment.seed=1"], ["experiment.seed"]),
        (["training.batch_size=5"], ["training.global_batch_size", "5", "4"]),
        (["checkpoint.resume=never"], ["checkpoint.resume", "step_00000010"]),
        (["checkpoint.resume=nowhere"], ["checkpoint.resume", "nowhere"]),
        (["checkpoint.resume=."], ["has no checkpoints"]),
    ],
)
def test_another_run_in_the_same_folder_is_refused(toy: ToyRun, overrides: list[str], words: list[str]) -> None:
    toy.train()
    with pytest.raises(UserError) as caught:
        toy.train("training.max_steps=20", *overrides)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("locked", "keys", "words"),
    [
        ("out/checkpoints", [], "checkpoint.resume = auto: {}/out/checkpoints cannot be read: Permission denied"),
        ("out/checkpoints", ["experiment.output_dir=new", "checkpoint.resume=out"], "out/checkpoints cannot be read"),
        ("out/checkpoints/step_00000010", ["checkpoint.keep_last=1"], "cannot be used (.*Permission denied"),
        ("out/checkpoints", ["launch.procs_per_node=2"], "resume = auto: {}/out/checkpoints cannot be read"),
    ],
)
def test_what_may_not_be_read_is_one_line(toy: ToyRun, locked: str, keys: list[str], words: str) -> None:
    toy.train("checkpoint.keep_last=1")
    drop = "-dac_override,-dac_read_search"  # with which root reads everything
    as_others = ["setpriv", f"--bounding-set={drop}", f"--inh-caps={drop}"] if os.geteuid() == 0 else []
    if as_others and not shutil.which("setpriv"):
        pytest.skip("runs as root, who may read everything")
    path = toy.folder / locked
    path.chmod(0)
    command = [*as_others, sys.executable, "-m", "shoal", "train", "run.yaml", "training.max_steps=12", *keys]
    try:
        result = subprocess.run(command, cwd=toy.folder, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    finally:
        path.chmod(0o755)
    assert result.returncode == 2
    *warned, error = result.stderr.splitlines()
    assert all(line.startswith("shoal: warning: ") for line in warned), result.stderr
    assert re.search(words.format(toy.folder).replace("(", r"\("), error), result.stderr


SGD_WITH_MOMENTUM = "{name: sgd, momentum: 0.9}"


@pytest.mark.parametrize(
    ("before", "after", "key", "was", "slots"),
    [
        ("sgd", "adamw", "name", "'sgd'", {"step", "exp_avg", "exp_avg_sq"}),
        (SGD_WITH_MOMENTUM, "adamw", "name", "'sgd'", {"step", "exp_avg", "exp_avg_sq"}),
        ("adamw", "sgd", "name", "'adamw'", set()),
        ("adamw", SGD_WITH_MOMENTUM, "name", "'adamw'", {"momentum_buffer"}),
        ("sgd", SGD_WITH_MOMENTUM, "momentum", "0.0", {"momentum_buffer"}),
        (SGD_WITH_MOMENTUM, "sgd", "momentum", "0.9", set()),
    ],
)
def test_another_optimizer_is_refused_or_starts_anew(
    toy: ToyRun, capfd: pytest.CaptureFixture[str], before: str, after: str, key: str, was: str, slots: set[str]
) -> None:
    toy.train("training.max_steps=4", f"training.optimizer={before}")
    changed = ("training.max_steps=6", f"training.optimizer={after}")
    with pytest.raises(UserError, match=rf"^training\.optimizer\.{key} = .*saved with {was}.*allow_changed") as caught:
        toy.train(*changed)
    assert "\n" not in str(caught.value)
    capfd.readouterr()
    # Also when the weights of a step of the old optimizer are loaded at the end.
    best = ("checkpoint.keep_best=1", "checkpoint.load_best_model_at_end=true")
    outcome = toy.train(*changed, f"checkpoint.allow_changed=[training.optimizer.{key}]", *best)
    assert (outcome.first_step, outcome.step) == (4, 6)
    assert "the optimizer starts with fresh state at step 4" in capfd.readouterr().out
    stored = open_checkpoint(toy.output / "checkpoints" / "step_00000006").read().optimizer
    assert {slot for tensors in stored.values() for slot in tensors} == slots
    assert {tensors["step"].item() for tensors in stored.values() if "step" in tensors} <= {2.0}
    assert toy.train("training.max_steps=8", changed[1]).first_step == 6  # now it is the same optimizer


def test_state_of_an_optimizer_that_the_manifest_does_not_name_is_refused(toy: ToyRun) -> None:
    toy.train("training.max_steps=4", f"training.optimizer={SGD_WITH_MOMENTUM}")
    resigned(toy.output / "checkpoints" / "step_00000004", lambda manifest, _: manifest["config"].pop("training"))
    with pytest.raises(UserError, match=r"training\.optimizer = 'adamw', .* 'slots momentum_buffer'"):
        toy.train("training.max_steps=6")


def test_a_checkpoint_whose_updates_were_all_skipped_is_resumed(toy: ToyRun) -> None:
    """DeepSpeed makes its state in the first update that it does not skip."""
    toy.train("training.max_steps=4")
    folder = toy.output / "checkpoints" / "step_00000004"

    def without_slots(manifest: dict[str, Any], trainer: dict[str, Any]) -> None:
        manifest["tensors"] = {name: t for name, t in manifest["tensors"].items() if name.startswith("model/")}

    resigned(folder, without_slots)
    assert toy.train("training.max_steps=6").first_step == 4


def test_another_momentum_needs_no_permission(toy: ToyRun) -> None:
    toy.train("training.max_steps=4", f"training.optimizer={SGD_WITH_MOMENTUM}")
    assert toy.train("training.max_steps=6", "training.optimizer={name: sgd, momentum: 0.8}").first_step == 4


def test_what_is_allowed_to_change_may(toy: ToyRun) -> None:
    toy.train()
    allowed = "checkpoint.allow_changed=[dataset.size, training.global_batch_size]"
    assert toy.train("training.max_steps=12", "dataset.size=99", "training.batch_size=5", allowed).step == 12


def test_another_schedule_than_the_checkpoints_is_said(toy: ToyRun, capfd: pytest.CaptureFixture[str]) -> None:
    def warnings(*keys: str) -> list[str]:
        capfd.readouterr()
        toy.train(*keys)
        return [line for line in capfd.readouterr().out.splitlines() if line.startswith("warning")]

    assert warnings("training.max_steps=4") == []
    at_two = f"checkpoint.resume={toy.output}/checkpoints/step_00000002"
    assert warnings("training.max_steps=4", at_two) == []
    assert warnings("training.max_steps=6", "training.warmup_steps=1") == [
        f"warning: going on from {toy.output}/checkpoints/step_00000004, training.max_steps is 6 and was 4, "
        "training.warmup_steps is 1 and was null: the learning rate was 0.00146 at step 4 and is 0.00345 at step 5, "
        "where it would have been 0"
    ]


WITH_OTHER_DTYPES = """
class Wave(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.ones(16, dtype=torch.complex64))
        self.register_buffer("table", torch.full((3,), 1 + 2j, dtype=torch.complex128))
        self.register_buffer("count", torch.tensor(7, dtype=torch.uint16))
        self.register_buffer("more", MORE)

    def forward(self, x):
        return (x * self.turn).real


class Toy"""


def test_a_model_with_complex_and_other_dtypes_is_trained_and_resumed(
    toy: ToyRun, change_recipe: Callable[[str, str], None]
) -> None:
    change_recipe("nn.Tanh()", "nn.Tanh(), Wave()")
    change_recipe("class Toy", WITH_OTHER_DTYPES.replace("MORE", "None"))
    toy.train(f"experiment.output_dir={toy.folder}/whole")
    toy.train("checkpoint.keep_last=9")
    for step in (6, 8, 10):
        shutil.rmtree(toy.output / "checkpoints" / f"step_{step:08d}")
    outcome = toy.train()
    assert (outcome.first_step, outcome.step) == (4, 10)
    ends = [open_checkpoint(o / "checkpoints" / "step_00000010").read() for o in (toy.output, toy.folder / "whole")]
    assert ends[0].model["2.turn"].is_complex()
    assert not torch.equal(ends[0].model["2.turn"], torch.ones(16, dtype=torch.complex64))
    assert ends[0].model["2.table"].tolist() == [1 + 2j] * 3
    assert ends[0].optimizer["2.turn"]["exp_avg"].is_complex()
    torch.testing.assert_close(ends[0].model, ends[1].model, rtol=0, atol=0)
    torch.testing.assert_close(ends[0].optimizer, ends[1].optimizer, rtol=0, atol=0)


def test_a_tensor_that_no_checkpoint_can_hold_is_refused_before_the_first_step(
    toy: ToyRun, change_recipe: Callable[[str, str], None]
) -> None:
    change_recipe("nn.Tanh()", "nn.Tanh(), Wave()")
    change_recipe("class Toy", WITH_OTHER_DTYPES.replace("MORE", "torch.eye(2).to_sparse()"))
    with pytest.raises(UserError, match=r"^2\.more is stored in the layout sparse_coo; only dense"):
        toy.train()
    assert not (toy.output / "metrics.jsonl").exists()


def test_rotation_keeps_the_last_k(toy: ToyRun) -> None:
    toy.train("checkpoint.keep_last=2")
    assert sorted(p.name for p in (toy.output / "checkpoints").iterdir()) == ["step_00000008", "step_00000010"]


@pytest.mark.parametrize("every", [1, 3])
def test_the_logs_of_an_interrupted_run(toy: ToyRun, change_recipe: Callable[[str, str], None], every: int) -> None:
    """They are as if nobody had interrupted it, also where a process takes its first step between two lines."""
    change_recipe(
        "    def loss", '    def preview(self, model):\n        return f"{model[0].bias.sum()}"\n\n    def loss'
    )
    keys = ["logging.tensorboard=true", f"logging.every={every}", "training.eval_steps=4", "checkpoint.keep_last=9"]
    whole, killed = toy.folder / "whole", toy.output
    toy.train(*keys, f"experiment.output_dir={whole}")
    toy.train(*keys)
    for last in (6, 2, 4):
        for step in range(last + 2, 12, 2):
            shutil.rmtree(killed / "checkpoints" / f"step_{step:08d}")
        toy.train(*keys)
    assert log_problems(whole, killed, None) == []


def test_an_evaluation_that_a_signal_cut_short_is_made_up_for(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ("training.eval_steps=2", "training.lr_scheduler=constant")
    with monkeypatch.context() as patch:
        patch.setattr("shoal.training.trainer.RecipeBody.evaluate", lambda self, shell: None)
        toy.train(*keys, "training.max_steps=4")
    toy.train(*keys, "training.max_steps=7")
    assert sorted(toy.metrics("eval/loss")) == [4, 6, 7]
