"""Evaluating and saving by epoch, and batches of their own for evaluations: exact after restarts and on any number of
processes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ToyRun
from pool import Pool

from shoal.checkpoint import open_checkpoint
from shoal.config import load_run
from shoal.errors import UserError
from shoal.training import train

# Epochs of 10 samples end within steps 3, 5, 8 and 10 of 4 samples.
EPOCHS = ("dataset.size=10", "training.eval_epochs=1", "checkpoint.every=null", "checkpoint.keep_last=99")


def saved(output: Path) -> list[int]:
    return sorted(int(folder.name.removeprefix("step_")) for folder in (output / "checkpoints").glob("step_*"))


def train_in_pool(config: Path, overrides: list[str]) -> None:
    train(load_run(config, overrides))


def test_evaluations_and_saves_come_after_the_step_in_which_an_epoch_ends(toy: ToyRun) -> None:
    toy.train(*EPOCHS, "checkpoint.every_epochs=2")
    assert [*toy.metrics("eval/loss")] == [3, 5, 8, 10]
    assert saved(toy.output) == [5, 10]
    report = (toy.output / "report.txt").read_text()
    assert "one set, after every epoch and at the end" in report
    assert "checkpoints  after every 2 epochs and at the end, the last 99 kept" in report


def test_every_second_epoch_beside_steps(toy: ToyRun) -> None:
    toy.train(*EPOCHS[:1], "training.eval_epochs=2", "training.eval_steps=4", "checkpoint.every_epochs=1")
    assert [*toy.metrics("eval/loss")] == [4, 5, 8, 10]
    assert "one set, every 4 steps, after every 2 epochs and at the end" in (toy.output / "report.txt").read_text()


def test_a_step_of_several_epochs_ends_them_all(toy: ToyRun) -> None:
    toy.train("dataset.size=3", "training.eval_epochs=2", "training.max_steps=4", "checkpoint.every=null")
    assert [*toy.metrics("eval/loss")] == [2, 3, 4]  # samples 4, 8, 12, 16: epochs of 6


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_interrupted_run_evaluates_and_saves_after_the_same_steps(toy: ToyRun, pool2: Pool, ranks: int) -> None:
    """It was saved at step 4, and goes on with another number of processes."""
    keys = [*EPOCHS, "checkpoint.every_epochs=1", "training.global_batch_size=4", "training.batch_size=2"]
    whole = [*keys, f"experiment.output_dir={toy.folder}/whole"]
    toy.train(*whole)
    losses = toy.metrics("eval/loss", toy.folder / "whole")
    toy.train(*keys, "training.max_steps=4", "training.lr_scheduler=constant")
    if ranks == 1:
        toy.train(*keys, "training.lr_scheduler=constant")
    else:
        pool2.run(train_in_pool, toy.config, [*keys, "training.lr_scheduler=constant"], init=False)
    assert [*toy.metrics("eval/loss")] == sorted({*losses, 4})
    assert saved(toy.output) == sorted({*saved(toy.folder / "whole"), 4}) == [3, 4, 5, 8, 10]
    assert open_checkpoint(toy.output / "checkpoints" / "step_00000005").trainer["step_start"] == 16


def test_an_evaluation_that_never_ran_is_made_up_for(toy: ToyRun) -> None:
    """A checkpoint of a step that ended an epoch, without the evaluation that a signal has cut short."""
    toy.train(*EPOCHS[:1], "checkpoint.every=1", "checkpoint.keep_last=99", "training.max_steps=6")
    losses = toy.metrics("eval/loss")
    assert [*losses] == [6]
    for step in (6, 5, 4):
        shutil.rmtree(toy.output / "checkpoints" / f"step_{step:08d}")
    toy.train(*EPOCHS, "training.max_steps=6")
    assert [*toy.metrics("eval/loss")] == [3, 5, 6]
    assert toy.metrics("eval/loss")[6] == losses[6]


def test_a_plateau_counts_evaluations_by_epoch(toy: ToyRun) -> None:
    plateau = "training.lr_scheduler={name: plateau, patience: 0, threshold: 0.99, factor: 0.5}"
    toy.train(*EPOCHS, plateau)
    rates = toy.metrics("train/learning_rate")
    assert {step: rates[step] for step in (5, 6, 8, 9)} == {5: 0.01, 6: 0.005, 8: 0.005, 9: 0.0025}
    with pytest.raises(UserError, match=r"plateau follows the evaluations .* set eval_steps or eval_epochs"):
        toy.train(plateau)


@pytest.mark.parametrize("key", ["training.eval_epochs", "checkpoint.every_epochs"])
def test_a_stream_has_no_epochs(toy: ToyRun, change_recipe: Callable[[str, str], None], key: str) -> None:
    change_recipe("return Squares(self.config.dataset.size)", "return Stream()")
    recipe = toy.folder / "toy_recipe.py"
    recipe.write_text(recipe.read_text() + STREAM)
    with pytest.raises(UserError, match=rf"{key} = 1 needs data with a length, .* a stream; count steps"):
        toy.train(f"{key}=1")


STREAM = """

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(Squares(8))
"""


def test_an_evaluation_has_batches_of_its_own(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    """The loss is the same; how many samples a forward has is not."""
    sizes = toy.folder / "sizes.jsonl"
    seen = f"open({str(sizes)!r}, 'a').write(f'{{len(output)}}\\n') if not output.requires_grad else 0\n        "
    change_recipe("return ((output", f"{seen}return ((output")
    toy.train("training.max_steps=1")
    expected = toy.metrics("eval/loss")
    assert {*sizes.read_text().split()[-5:]} == {"4", "3", "2"}  # 17 samples; a single one takes another
    toy.train("training.max_steps=1", "training.eval_batch_size=17", f"experiment.output_dir={toy.folder}/whole")
    assert sizes.read_text().split()[-1] == "17"
    assert toy.metrics("eval/loss", toy.folder / "whole")[1] == pytest.approx(expected[1], rel=1e-6)
    assert "at the end, in micro-batches of 17" in (toy.folder / "whole" / "report.txt").read_text()


def test_eval_batches_counts_batches_of_that_size(toy: ToyRun) -> None:
    keys = ("training.max_steps=1", "training.eval_batches=1")
    toy.train(*keys, "training.eval_batch_size=5")
    toy.train(*keys, "training.batch_size=5", f"experiment.output_dir={toy.folder}/five")
    first = toy.train("training.max_steps=1", f"experiment.output_dir={toy.folder}/all").metrics["eval/loss"]
    assert toy.metrics("eval/loss")[1] != pytest.approx(first)


def test_the_report_says_if_nothing_is_evaluated(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe("return Squares(17)", "return None")
    toy.train("training.max_steps=1", "training.eval_batch_size=2")
    assert "training.eval_batch_size: the recipe has no evaluation data" in (toy.output / "report.txt").read_text()
    with pytest.raises(UserError, match=r"training.eval_epochs = 1, but the recipe has no evaluation data"):
        toy.train("training.eval_epochs=1")


@pytest.mark.parametrize(
    "layout",
    [
        "{strategy: ddp}",
        "{strategy: fsdp}",
        pytest.param("{strategy: mesh, mesh: {pp: 2}, pipeline: {schedule: gpipe}}", marks=pytest.mark.slow),
    ],
)
def test_layouts_evaluate_in_other_batches(toy: ToyRun, pool2: Pool, layout: str) -> None:
    keys = [
        "training.max_steps=2",
        "training.global_batch_size=4",
        "training.batch_size=2",
        "recipe=toy_recipe:Divisible",
        "model.dropout=0",
    ]
    toy.train(*keys)
    for size in (1, 3):
        output = toy.folder / f"by{size}"
        overrides = [
            *keys,
            f"training.eval_batch_size={size}",
            f"distributed={layout}",
            f"experiment.output_dir={output}",
        ]
        pool2.run(train_in_pool, toy.config, overrides, init=False)
        assert toy.metrics("eval/loss", output)[2] == pytest.approx(toy.metrics("eval/loss")[2], rel=1e-5)


def test_processes_for_every_gpu(toy: ToyRun) -> None:
    """This machine has none, or `training.device` is the CPU."""
    run = load_run(toy.config, ["launch.procs_per_node=auto", "training.device=cpu"])
    assert run.config.launch.procs_per_node == 1
    assert run.sources["launch.procs_per_node"] == ("command line, auto: one process, because training.device is cpu")
    toy.train("launch.procs_per_node=auto", "training.device=cpu", "training.max_steps=1")
    assert "auto: one process, because training.device is cpu" in (toy.output / "report.txt").read_text()
    with pytest.raises(UserError, match=r"procs_per_node = auto: launch.target = slurm starts .* give a number"):
        load_run(toy.config, ["launch.procs_per_node=auto", "launch.target=slurm"])


def test_auto_takes_the_processes_that_others_have_started(toy: ToyRun, pool2: Pool) -> None:
    keys = ["launch.procs_per_node=auto", "training.max_steps=1", "training.device=cpu"]
    pool2.run(train_in_pool, toy.config, keys, init=False)
    assert saved(toy.output) == [1]


def test_auto_counts_gpus(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    run = load_run(toy.config, ["launch.procs_per_node=auto"])
    assert run.config.launch.procs_per_node == 3
    assert "one process for every GPU" in run.to_yaml()
