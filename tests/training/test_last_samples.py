"""The last samples of a run: a single one never ends a run with BatchNorm, and `drop_last` leaves out a short step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import ToyRun

from shoal.errors import UserError

ONE_EPOCH = ("training.max_steps=null", "training.num_epochs=1", "training.warmup_steps=0")


@pytest.fixture
def normed(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> ToyRun:
    change_recipe("nn.Tanh()", "nn.BatchNorm1d(hidden)")
    return toy


@pytest.mark.parametrize(("size", "steps"), [(9, 3), (8, 2), (11, 3)])
def test_a_single_last_sample_does_not_end_a_run(normed: ToyRun, size: int, steps: int) -> None:
    outcome = normed.train(*ONE_EPOCH, f"dataset.size={size}")
    assert (outcome.step, outcome.total_steps) == (steps, steps)


def test_a_micro_batch_never_has_a_single_sample(normed: ToyRun) -> None:
    outcome = normed.train("training.global_batch_size=9", "training.max_steps=2")
    assert outcome.step == 2


def test_drop_last_leaves_out_a_short_last_step(normed: ToyRun) -> None:
    outcome = normed.train(*ONE_EPOCH, "dataset.size=11", "dataset.drop_last=true")
    assert (outcome.step, outcome.total_steps) == (2, 2)
    assert normed.metrics("train/epoch")[2] == 8 / 11
    assert normed.train(*ONE_EPOCH, "dataset.size=11", "dataset.drop_last=true").step == 2
    with pytest.raises(UserError, match=r"drop_last = true: the 3 samples of the run do not fill a global batch of 4"):
        normed.train(
            *ONE_EPOCH, "dataset.size=3", "dataset.drop_last=true", f"experiment.output_dir={normed.folder}/other"
        )


def test_an_interrupted_run_ends_on_the_same_samples(normed: ToyRun) -> None:
    keys = (*ONE_EPOCH, "dataset.size=13", "checkpoint.every=1", "checkpoint.keep_last=9")
    whole = normed.train(*keys)
    losses = normed.metrics()
    for step in (whole.step, whole.step - 1):
        folder = normed.output / "checkpoints" / f"step_{step:08d}"
        folder.rename(normed.folder / folder.name)
    again = normed.train(*keys)
    assert (again.first_step, again.step) == (whole.step - 2, whole.step)
    assert normed.metrics() == losses


def test_the_report_names_modules_that_mix_samples(normed: ToyRun) -> None:
    normed.train("training.max_steps=1", "training.sync_batch_norm=true", "dataset.drop_last=true")
    report = (normed.output / "report.txt").read_text()
    assert "1 BatchNorm1d (1); statistics of each micro-batch" in report
    assert "training.sync_batch_norm: there is one data-parallel rank" in report
    assert "dataset.drop_last: training.max_steps ends the run, and every step is full" in report
