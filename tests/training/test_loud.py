"""Mistakes that would change a training without a word are refused, or the report says so."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ToyRun
from pool import Pool

import shoal
from shoal.checkpoint import step_folder
from shoal.config import load_run
from shoal.errors import UserError
from shoal.strategies import DistributedStrategy
from shoal.training import train
from shoal.training.trainer import RecipeBody

CALLBACKS = """
import torch
from shoal.callbacks import Callback


class SetsRate(Callback):
    def before_step(self, run):
        for group in run.optimizer.param_groups:
            group["lr"] = 1.0


class Misspelt(Callback):
    def after_steps(self, run):
        pass


class OfAnotherLibrary(Callback):
    def on_train_batch_end(self, run):
        pass


class GoesBackAfterStep(Callback):
    def after_step(self, run):
        run.go_back("a spike")


class GoesBackAlone(Callback):
    def after_log(self, run, metrics):
        if run.strategy.rank == 0:
            run.go_back("a spike")


class StateOfNothing(Callback):
    def state(self):
        return {"mean/nothing": torch.ones(2)}

    def load_state(self, state):
        pass


class LooksBack(Callback):
    seen = {}

    def after_step(self, run):
        self.seen[run.step] = dict(run.metrics)
"""


@pytest.fixture(autouse=True)
def callbacks(toy: ToyRun) -> Any:
    (toy.folder / "loud.py").write_text(CALLBACKS)
    sys.modules.pop("loud", None)


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        ("'loud:SetsRate'", r"a hook has set the learning rate of a parameter group to 1, .* run.scale_learning_rate"),
        ("'loud:Misspelt'", r"loud:Misspelt defines after_steps, which is not a hook .* did you mean after_step\?"),
        ("'loud:OfAnotherLibrary'", "defines on_train_batch_end, which is not a hook and would never be called"),
        ("'loud:GoesBackAfterStep'", r"go_back\('a spike'\): it was not called in after_log"),
        ("'loud:StateOfNothing'", "'mean/nothing', but the model has no parameter or buffer 'nothing'"),
        ("{name: early_stopping, metric: eval/x}", r"callbacks.early_stopping.metric = 'eval/x': an evaluation does"),
    ],
)
def test_mistakes_in_callbacks(toy: ToyRun, callback: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        toy.train(f"callbacks=[{callback}]", "training.eval_steps=5")


def test_a_metric_that_plateau_follows_is_looked_for_before_training(toy: ToyRun) -> None:
    with pytest.raises(UserError, match=r"training.lr_scheduler.metric = 'eval/x': an evaluation does not give it"):
        toy.train("training.lr_scheduler={name: plateau, metric: eval/x}", "training.eval_steps=5")
    assert not toy.output.exists()


def refusal(config: Path, overrides: list[str]) -> str:
    """Returns what a run is refused with; an error in a worker would cost the pool its processes."""
    try:
        train(load_run(config, overrides))
    except UserError as error:
        return str(error)
    return ""


def test_ranks_that_do_not_go_back_together_are_refused(toy: ToyRun, pool2: Pool) -> None:
    for message in pool2.run(refusal, toy.config, ["callbacks=['loud:GoesBackAlone']"], init=False):
        assert message.startswith("go_back: some ranks called it and others did not")


def test_a_hook_that_a_recipe_object_was_given_is_called(toy: ToyRun) -> None:
    import toy_recipe

    recipe, steps = toy_recipe.Toy(), list[int]()
    recipe.after_step = lambda run: steps.append(run.step)
    shoal.train(toy.config, recipe=recipe, training={"max_steps": 2})
    assert steps == [1, 2]


def test_hooks_see_the_last_metrics_after_a_restart(toy: ToyRun) -> None:
    keys = ("training.max_steps=4", "logging.every=3", "callbacks=['loud:LooksBack']")
    toy.train(*keys)
    import loud

    undisturbed = dict(loud.LooksBack.seen)
    assert undisturbed[3]["train/loss"] == undisturbed[2]["train/loss"]
    loud.LooksBack.seen.clear()
    shutil.rmtree(step_folder(toy.output, 4))
    toy.train(*keys)
    assert {step: seen["train/loss"] for step, seen in loud.LooksBack.seen.items()} == {
        step: undisturbed[step]["train/loss"] for step in (3, 4)
    }


def test_the_report_names_callbacks_that_do_nothing(toy: ToyRun) -> None:
    late = ("swa, start_step: 11", "ema, start_step: 11", "loss_spike, window: 10", "histograms, every: 11")
    entries = ", ".join(f"{{name: {entry}}}" for entry in late)
    toy.train(f"callbacks=[{entries}]", "logging.tensorboard=true")
    report = (toy.output / "report.txt").read_text()
    for name in ("swa: the run ends before", "ema: the run ends before", "loss_spike: the log", "histograms: the run"):
        assert f"not in force  callbacks: {name}" in report


def test_spikes_of_a_negative_loss_are_refused(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    """Every loss is above three times a negative one, so that the run would go back for ever."""
    change_recipe("** 2).sum()", "** 2).sum() - 5.0 * len(output)")
    with pytest.raises(UserError, match=r"loss_spike compares with 3 times the median loss, which is -\d"):
        toy.train("callbacks=[{name: loss_spike, window: 2}]")


def test_swa_leaves_frozen_statistics_alone(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    """A BatchNorm in evaluation mode trains with the statistics that it has."""
    change_recipe("nn.Tanh(), nn.Dropout(self.config.model.dropout)", "nn.BatchNorm1d(hidden).eval(), nn.Tanh()")
    toy.train("training.max_steps=3", "callbacks=[{name: swa, start_step: 1}]")
    import toy_recipe

    model = shoal.load(toy.output, recipe=toy_recipe.Toy, average="swa")
    assert torch.equal(model[1].running_mean, torch.zeros(16))


GROUPS = {
    "[{'lr': 1.0}]": "a group has lr and no `params`",
    "[{'params': ['0.weight']}]": "`params` has a str",
    "[{'params': list(model.parameters()), 'lr': -1.0}]": "a group has lr = -1.0; give a number of 0 or more",
    "[{'params': list(model.parameters()), 'learning_rate': 1.0}]": r"has 'learning_rate', .* did you mean lr\?",
}


@pytest.mark.parametrize("groups", GROUPS)
def test_mistakes_in_parameter_groups(toy: ToyRun, change_recipe: Callable[[str, str], None], groups: str) -> None:
    method = f"    def param_groups(self, model):\n        return {groups}\n\n"
    change_recipe("    def loss(self", f"{method}    def loss(self")
    with pytest.raises(UserError, match=f"the recipe's param_groups: .*{GROUPS[groups]}"):
        toy.train()


def test_an_optimizer_that_forgets_parameters_is_refused(
    toy: ToyRun, change_recipe: Callable[[str, str], None]
) -> None:
    method = "    def build_optimizer(self, groups):\n        return torch.optim.SGD(groups[:1], lr=0.1)\n\n"
    change_recipe("    def loss(self", f"{method}    def loss(self")
    with pytest.raises(UserError, match="the SGD has not taken 2 of the parameters in its groups"):
        toy.train()


def test_blocks_that_run_uncompiled_after_the_first_step_are_warned_of(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when torch has given up on a block. The first step is checked by itself."""
    compile, compiles = torch.compile, [True]

    def patched(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        compiled = compile(function, backend="eager")
        return lambda *args, **kwargs: (compiled if compiles[0] else function)(*args, **kwargs)

    take_step = RecipeBody.take_step

    def step(self: RecipeBody, micro_batches: Any, number: int) -> Any:
        compiles[0] = number < 3
        return take_step(self, micro_batches, number)

    monkeypatch.setattr(torch, "compile", patched)
    monkeypatch.setattr(RecipeBody, "take_step", step)
    toy.train("training.compile=true", "training.max_steps=6", "logging.every=1")
    (said,) = [line for line in "".join(capsys.readouterr()).splitlines() if "ran uncompiled" in line]
    assert "step 4: training.compile = true: " in said


def test_a_strategy_that_compiles_nothing_is_noticed(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DistributedStrategy, "_transform", lambda *arguments: None)
    with pytest.raises(
        UserError, match=r"training.compile = true, but in the first step the model's blocks ran without"
    ):
        toy.train("training.compile=true")
