"""What hooks ask of a run is in the checkpoint of the step in which they ask, so that a restart cannot lose it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ToyRun
from pool import Pool

from shoal.checkpoint import step_folder, step_folders
from shoal.config import load_run
from shoal.errors import UserError
from shoal.training import train

CALLBACKS = """
from shoal.callbacks import Callback


class AfterStep(Callback):
    def after_step(self, run):
        if run.step == 3:
            run.scale_learning_rate(0.5)


class AfterEvaluation(Callback):
    def after_evaluation(self, run, metrics):
        if run.step == 4:
            run.scale_learning_rate(0.5)


class BeforeSave(Callback):
    def before_save(self, run):
        if run.step == 3:
            run.scale_learning_rate(0.5)


class BeforeUpdate(Callback):
    def before_update(self, run):
        if run.step == 2:
            run.scale_learning_rate(0.5)


class StopAtTheEnd(Callback):
    def after_evaluation(self, run, metrics):
        if run.step == 5:
            run.stop("good enough")


class LogsAsAnEvaluation(Callback):
    def after_step(self, run):
        run.log("eval/mine", 1.0)


class StopBeforeSave(Callback):
    def before_save(self, run):
        if run.step == 3:
            run.stop("saved often enough")
"""
STOPPING = "{name: early_stopping, patience: 1, min_delta: 10}"
KEYS = ("training.max_steps=6", "training.eval_steps=2", "checkpoint.every=1", "checkpoint.keep_last=9")
SIGNALLED = """    calls, signal_at = [], None

    def metrics(self, output, batch):
        self.calls.append(1)
        if len(self.calls) == self.signal_at:
            import os, signal
            os.kill(os.getpid(), signal.SIGTERM)
        return {}

    def loss(self"""
IN_SECOND_EVALUATION = 12
"""The call of `metrics` in the evaluation after step 4: four steps, five batches of the first evaluation, and some."""


@pytest.fixture(autouse=True)
def callbacks(toy: ToyRun) -> Any:
    (toy.folder / "asking.py").write_text(CALLBACKS)
    sys.modules.pop("asking", None)


def forget_after(toy: ToyRun, step: int) -> None:
    for folder in step_folders(toy.output):
        if folder > step_folder(toy.output, step):
            shutil.rmtree(folder)


@pytest.mark.parametrize(("hook", "step"), [("AfterStep", 3), ("AfterEvaluation", 4), ("BeforeSave", 3)])
def test_a_learning_rate_that_was_asked_for_survives_a_restart(toy: ToyRun, hook: str, step: int) -> None:
    toy.train(*KEYS, f"callbacks=['asking:{hook}']")
    undisturbed = toy.metrics("train/learning_rate")
    forget_after(toy, step)
    assert toy.train(*KEYS, f"callbacks=['asking:{hook}']").first_step == step
    assert toy.metrics("train/learning_rate") == undisturbed


@pytest.mark.parametrize(("callback", "step"), [(STOPPING, 4), ("'asking:StopBeforeSave'", 3)])
def test_a_run_that_a_hook_has_ended_stays_ended(toy: ToyRun, callback: str, step: int) -> None:
    first = toy.train(*KEYS, f"callbacks=[{callback}]")
    again = toy.train(*KEYS, f"callbacks=[{callback}]")
    assert (first.step, again.first_step, again.step) == (step, step, step)
    assert again.stop_reason == first.stop_reason is not None


@pytest.mark.parametrize(("callback", "best"), [(STOPPING, "min"), ("'asking:AfterEvaluation'", "max")])
def test_an_evaluation_that_a_signal_cut_short_counts_where_it_belongs(
    toy: ToyRun, change_recipe: Callable[[str, str], None], callback: str, best: str
) -> None:
    """The run that goes on makes up for it; what hooks ask for then, and the best step, are as if undisturbed."""
    change_recipe("    def loss(self", SIGNALLED)
    keys = (*KEYS[:2], f"callbacks=[{callback}]", "checkpoint.every=3", "checkpoint.keep_best=1")
    whole = toy.train(*keys, f"checkpoint.mode={best}", f"experiment.output_dir={toy.folder}/whole")
    import toy_recipe

    toy_recipe.Toy.calls.clear()
    toy_recipe.Toy.signal_at = IN_SECOND_EVALUATION
    cut = toy.train(*keys, f"checkpoint.mode={best}")
    assert (cut.step, cut.stopped_by, sorted(toy.metrics("eval/loss"))) == (4, 15, [2])
    resumed = toy.train(*keys, f"checkpoint.mode={best}")
    assert (resumed.step, resumed.stop_reason, resumed.best_step) == (whole.step, whole.stop_reason, whole.best_step)
    for key in ("train/loss", "train/learning_rate", "eval/loss"):
        assert toy.metrics(key) == toy.metrics(key, toy.folder / "whole")


SECOND_OF_TWO_RANKS = 8
"""The same for two ranks: four steps, three batches of the first evaluation, and one."""


def train_signalled(config: Path, overrides: list[str], signal_at: int | None) -> tuple[int, int]:
    """Returns the last step, and the signal that ended the run."""
    run = load_run(config, overrides)
    recipe: Any = run.recipe_type
    recipe.signal_at = signal_at if os.environ["RANK"] == "1" else None
    outcome = train(run)
    return outcome.step, outcome.stopped_by


def test_an_evaluation_of_two_ranks_that_a_signal_cut_short_is_made_up_for(
    toy: ToyRun, pool2: Pool, change_recipe: Callable[[str, str], None]
) -> None:
    """What ranks agree on after a step was sent before it, and so before the signal. A run that goes on, and gets a
    signal in the evaluation that it owes, takes no step before it."""
    change_recipe("    def loss(self", SIGNALLED)
    keys = [*KEYS[:2], "checkpoint.every=3", "distributed.strategy=ddp", "logging.console=off"]
    pool2.run(train_signalled, toy.config, [*keys, f"experiment.output_dir={toy.folder}/whole"], None, init=False)
    for signal_at in (SECOND_OF_TWO_RANKS, 1):
        assert pool2.run(train_signalled, toy.config, keys, signal_at, init=False) == [(4, 15)] * 2
        assert sorted(toy.metrics("eval/loss")) == [2]
        assert max(toy.metrics()) == 4
    assert pool2.run(train_signalled, toy.config, keys, None, init=False) == [(6, 0)] * 2
    for key in ("train/loss", "eval/loss"):
        assert toy.metrics(key) == toy.metrics(key, toy.folder / "whole")


def train_with(config: Path, overrides: list[str]) -> int:
    return train(load_run(config, overrides)).first_step


def test_two_ranks_ask_before_an_update(toy: ToyRun, pool2: Pool) -> None:
    """In the middle of a step, after what they agree on was sent; the checkpoint of that step has it all the same."""
    keys = [*KEYS, "callbacks=['asking:BeforeUpdate']", "distributed.strategy=ddp", "logging.console=off"]
    pool2.run(train_with, toy.config, keys, init=False)
    undisturbed = toy.metrics("train/learning_rate")
    forget_after(toy, 3)
    assert pool2.run(train_with, toy.config, keys, init=False) == [3, 3]
    assert toy.metrics("train/learning_rate") == undisturbed


STREAM = """class Stream:
    def open(self, start):
        for i in range(start, 11):
            yield Squares(100)[i]


class Toy"""


@pytest.mark.parametrize("ended_by", ["a hook", "its data"])
def test_the_last_evaluation_is_made_up_for_wherever_a_run_ends(
    toy: ToyRun, change_recipe: Callable[[str, str], None], ended_by: str
) -> None:
    """It ends after three steps, where no evaluation is due; the signal comes in the one at the end."""
    change_recipe("    def loss(self", SIGNALLED)
    keys = [*KEYS[:2], "checkpoint.keep_best=1", "callbacks=['asking:StopBeforeSave']", "checkpoint.every=1"]
    if ended_by == "its data":
        change_recipe("class Toy", STREAM)
        change_recipe("        return Squares(self.config.dataset.size)", "        return Stream()")
        keys = [*KEYS[:2], "checkpoint.keep_best=1"]
    whole = toy.train(*keys, f"experiment.output_dir={toy.folder}/whole")
    assert sorted(toy.metrics("eval/loss", toy.folder / "whole")) == [2, 3]
    import toy_recipe

    toy_recipe.Toy.calls.clear()
    toy_recipe.Toy.signal_at = 3 + 5 + 1
    cut = toy.train(*keys)
    assert (cut.step, cut.stopped_by, sorted(toy.metrics("eval/loss"))) == (3, 15, [2])
    resumed = toy.train(*keys)
    assert (resumed.step, resumed.stop_reason, resumed.best_step) == (whole.step, whole.stop_reason, whole.best_step)
    for key in ("train/loss", "eval/loss"):
        assert toy.metrics(key) == toy.metrics(key, toy.folder / "whole")
    lines = (toy.output / "metrics.jsonl").read_text().splitlines()
    toy.train(*keys)
    assert (toy.output / "metrics.jsonl").read_text().splitlines() == lines


def test_what_the_last_evaluation_asks_for_ends_no_longer_run(
    toy: ToyRun, change_recipe: Callable[[str, str], None]
) -> None:
    """No evaluation is due where the run ends, and one with more steps would have none there. Also with a signal."""
    change_recipe("    def loss(self", SIGNALLED)
    keys = ["training.max_steps=5", "training.eval_steps=2", "callbacks=['asking:StopAtTheEnd']"]
    assert toy.train(*keys, f"experiment.output_dir={toy.folder}/whole").stop_reason is None
    import toy_recipe

    toy_recipe.Toy.calls.clear()
    toy_recipe.Toy.signal_at = 5 + 2 * 5 + 1
    assert toy.train(*keys).stopped_by == 15
    for max_steps in (5, 8):
        for folder in ("out", "whole"):
            keys[0] = f"training.max_steps={max_steps}"
            outcome = toy.train(*keys, f"experiment.output_dir={toy.folder}/{folder}")
            assert (outcome.step, outcome.stop_reason) == (max_steps, None)


def test_a_hook_logs_no_name_of_an_evaluation(toy: ToyRun) -> None:
    with pytest.raises(UserError, match=r"log\('eval/mine'\): names that begin with eval/ are those of evaluations"):
        toy.train("training.max_steps=1", "callbacks=['asking:LogsAsAnEvaluation']")
