"""Hooks of recipes and callbacks: when they are called, what they can ask of a run, and that their state resumes."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ToyRun
from pool import Pool

from shoal.checkpoint import open_checkpoint
from shoal.config import load_run
from shoal.errors import UserError
from shoal.training import train

CALLBACKS = """
import torch
from pydantic import BaseModel

from shoal.callbacks import Callback


class Journal(Callback):
    calls = []

    def note(self, hook, run, *more):
        self.calls.append((hook, run.step, *more))

    def on_start(self, run):
        self.note("on_start", run)

    def before_step(self, run):
        self.note("before_step", run)

    def before_update(self, run):
        self.note("before_update", run, len(run.strategy.gradients(run.model)))

    def after_step(self, run):
        self.note("after_step", run)

    def after_evaluation(self, run, metrics):
        self.note("after_evaluation", run, *metrics)

    def before_save(self, run):
        self.note("before_save", run)

    def on_end(self, run):
        self.note("on_end", run)


class Noisy(Callback):
    \"\"\"Halves the learning rate every few steps; keeps numbers, lists and tensors.\"\"\"

    class Config(BaseModel):
        every: int = 3
        stop_at: int | None = None

    def __init__(self, config=None):
        super().__init__(config)
        self.total, self.steps = torch.zeros(()), []

    def after_step(self, run):
        self.total += run.output.loss.detach()
        self.steps.append(run.step)
        if run.step % self.config.every == 0:
            run.scale_learning_rate(0.5)
            run.log("noisy/total", self.total)
        if run.step == self.config.stop_at and run.strategy.rank == run.strategy.world_size - 1:
            run.stop("enough is enough")

    def state(self):
        return {"total": self.total, "steps": self.steps}

    def load_state(self, state):
        self.total, self.steps = state["total"], state["steps"]


class Bad(Callback):
    def after_step(self, run):
        if run.step == 2:
            self.fail()

    def fail(self):
        return {}["missing"]


class Unsaveable(Callback):
    def state(self):
        return {"x": {1: 2}}

    def load_state(self, state):
        pass


class Scatter(Callback):
    def after_step(self, run):
        run.scale_learning_rate(0.5 if run.strategy.rank else 0.25)


class HalfState(Callback):
    def state(self):
        return {}
"""


@pytest.fixture
def hooked(toy: ToyRun) -> ToyRun:
    (toy.folder / "toy_callbacks.py").write_text(CALLBACKS)
    sys.modules.pop("toy_callbacks", None)
    return toy


def entries(text: str) -> str:
    return f"callbacks=[{text}]"


NOISY = entries("toy_callbacks:Noisy")


def same_state(one: Path, other: Path, step: int = 10) -> None:
    """Asserts that two checkpoints are equal to the bit, with the state of callbacks."""
    first, second = (open_checkpoint(output / "checkpoints" / f"step_{step:08d}") for output in (one, other))
    assert {**first.trainer, "metrics": 0} == {**second.trainer, "metrics": 0}
    a, b = first.read(), second.read()
    for left, right in ((a.model, b.model), (a.optimizer, b.optimizer), (a.callbacks, b.callbacks)):
        torch.testing.assert_close(left, right, rtol=0, atol=0)


def drop_steps(output: Path, after: int, last: int = 10) -> None:
    for step in range(after + 2, last + 2, 2):
        shutil.rmtree(output / "checkpoints" / f"step_{step:08d}")


def test_hooks_are_called_in_order(hooked: ToyRun) -> None:
    keys = ("training.max_steps=2", "training.eval_steps=1", "checkpoint.every=1")
    hooked.train(*keys, entries("toy_callbacks:Journal"))
    from toy_callbacks import Journal  # type: ignore[import-not-found]

    steps = [
        step
        for i in (0, 1)
        for step in [
            ("before_step", i),
            ("before_update", i, 4),
            ("after_step", i + 1),
            ("after_evaluation", i + 1, "eval/loss"),
            *([("on_end", 2)] if i else []),
            ("before_save", i + 1),
        ]
    ]
    assert Journal.calls == [("on_start", 0), *steps]
    Journal.calls.clear()
    hooked.train(*keys, entries("toy_callbacks:Journal"))  # it has ended already
    assert Journal.calls == [("on_start", 2)]


def test_a_recipe_has_hooks_too(hooked: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe(
        "    def loss",
        "    seen = 0\n\n"
        "    def after_step(self, run):\n"
        "        self.seen += 1\n"
        "        run.log('toy/seen', self.seen)\n\n"
        "    def state(self):\n        return {'seen': self.seen}\n\n"
        "    def load_state(self, state):\n        self.seen = state['seen']\n\n    def loss",
    )
    hooked.train("training.max_steps=4")
    hooked.train("training.max_steps=6")
    assert hooked.metrics("toy/seen") == {step: step for step in range(1, 7)}
    assert re.search(r"^recipe's hooks +after_step$", (hooked.output / "report.txt").read_text(), re.M)


def test_the_learning_rate_is_scaled_and_stays_so_after_a_restart(hooked: ToyRun) -> None:
    keys = ("training.lr_scheduler=constant", "checkpoint.keep_last=9", NOISY)
    hooked.train(*keys)
    rates = hooked.metrics("train/learning_rate")
    assert rates == {step: 0.01 * 0.5 ** ((step - 1) // 3) for step in range(1, 11)}
    drop_steps(hooked.output, 4)
    hooked.train(*keys)
    assert hooked.metrics("train/learning_rate") == rates


@pytest.mark.parametrize("every", [1, 5])
def test_state_of_callbacks_resumes_to_the_bit(hooked: ToyRun, every: int) -> None:
    """With every=5, what was logged at step 3 is shown at step 5, after the checkpoint of step 4."""
    keys = ("checkpoint.keep_last=9", f"logging.every={every}", NOISY)
    hooked.train(*keys, f"experiment.output_dir={hooked.folder}/whole")
    hooked.train(*keys)
    drop_steps(hooked.output, 4)
    assert hooked.train(*keys).first_step == 4
    same_state(hooked.output, hooked.folder / "whole")
    trainer = open_checkpoint(hooked.output / "checkpoints" / "step_00000010").trainer
    assert trainer["callbacks"]["toy_callbacks:Noisy"]["steps"] == [*range(1, 11)]
    logged = [hooked.metrics("noisy/total", output) for output in (hooked.output, hooked.folder / "whole")]
    assert logged[0] == logged[1]
    assert sorted(logged[0]) == ([3, 6, 9] if every == 1 else [5, 10])


def outcome_of(config: Path, overrides: list[str]) -> tuple[int, str | None]:
    outcome = train(load_run(config, overrides))
    return outcome.step, outcome.stop_reason


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_two_processes_resume_and_stop_alike(hooked: ToyRun, pool2: Pool, strategy: str) -> None:
    """The last rank alone asks to stop."""
    callbacks = entries("{name: 'toy_callbacks:Noisy', stop_at: 6}")
    keys = [f"distributed.strategy={strategy}", "training.batch_size=2", "checkpoint.keep_last=9", callbacks]
    whole = [*keys, f"experiment.output_dir={hooked.folder}/whole"]
    assert pool2.run(outcome_of, hooked.config, whole, init=False) == [(6, "enough is enough")] * 2
    assert pool2.run(outcome_of, hooked.config, keys, init=False) == [(6, "enough is enough")] * 2
    drop_steps(hooked.output, 2, last=6)
    assert pool2.run(outcome_of, hooked.config, keys, init=False) == [(6, "enough is enough")] * 2
    same_state(hooked.output, hooked.folder / "whole", step=6)


def test_a_run_that_a_hook_ended_stays_ended(hooked: ToyRun) -> None:
    callbacks = entries("{name: 'toy_callbacks:Noisy', stop_at: 3}")
    (hooked.folder / "run.yaml").write_text(hooked.config.read_text() + f"{callbacks.replace('=', ': ')}\n")
    for first in (True, False):
        result = hooked.call("train", "run.yaml")
        assert result.returncode == 0
        assert "the run ends at step 3 of 10: enough is enough" in result.stdout
        assert "ended early: enough is enough" in result.stdout
        assert ("already finished" in result.stdout) is not first
        assert "the data ended" not in result.stdout
    assert sorted(hooked.metrics("eval/loss")) == [3]
    assert hooked.train("callbacks=['toy_callbacks:Noisy']").step == 10


def test_callbacks_that_come_and_go_are_said(hooked: ToyRun, capfd: pytest.CaptureFixture[str]) -> None:
    def warnings(*keys: str) -> list[str]:
        capfd.readouterr()
        hooked.train(*keys)
        return [line.split("step_", 1)[1] for line in capfd.readouterr().out.splitlines() if line[:7] == "warning"]

    constant = "training.lr_scheduler=constant"
    assert warnings(constant, "training.max_steps=2") == []
    name = "the callback toy_callbacks:Noisy"
    assert warnings(constant, "training.max_steps=4", NOISY) == [f"00000002 has no state of {name}, which starts fresh"]
    assert warnings(constant, "training.max_steps=6", NOISY) == []
    assert warnings(constant, "training.max_steps=8") == [
        f"00000006 has state of {name}, which this config does not have; it is dropped"
    ]
    assert warnings(constant, "training.max_steps=10") == []


def test_an_error_in_a_hook_is_one_line_with_the_users_line(hooked: ToyRun) -> None:
    with pytest.raises(UserError) as caught:
        hooked.train(entries("toy_callbacks:Bad"))
    line = CALLBACKS.splitlines().index('        return {}["missing"]') + 1
    assert str(caught.value) == (
        f"the callback toy_callbacks:Bad, after_step: KeyError: 'missing' ({hooked.folder}/toy_callbacks.py:{line} in "
        'fail: return {}["missing"])'
    )


def test_what_cannot_be_saved_is_refused(hooked: ToyRun) -> None:
    with pytest.raises(
        UserError, match=r"toy_callbacks:Unsaveable: state\(\) returns a dict with the key 1 at \['x'\]"
    ):
        hooked.train(entries("toy_callbacks:Unsaveable"))
    with pytest.raises(UserError, match="HalfState defines state and not load_state"):
        hooked.train(entries("toy_callbacks:HalfState"), f"experiment.output_dir={hooked.folder}/other")


def refusal(config: Path, overrides: list[str]) -> str:
    try:
        train(load_run(config, overrides))
    except UserError as error:
        return str(error)
    return ""


def test_ranks_that_want_different_rates_are_refused(hooked: ToyRun, pool2: Pool) -> None:
    refused = pool2.run(refusal, hooked.config, ["training.batch_size=2", entries("toy_callbacks:Scatter")], init=False)
    assert all("different factors, 0.25 and 0.5" in text for text in refused)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("emma", "callbacks (command line): name = 'emma' is unknown; set it to one of early_stopping, ema, "),
        ("toy_callbacks:Noise", "has no 'Noise'; did you mean 'Noisy'?"),
        ("toy_recipe:Squares", "name = 'toy_recipe:Squares' is not a callback"),
        ("{every: 3}", "{'every': 3} has no name"),
        ("{name: 'toy_callbacks:Noisy', evry: 3}", "callbacks.toy_callbacks:Noisy.evry is not a key; did you mean"),
        ("{name: 'toy_callbacks:Noisy', every: x}", "callbacks.toy_callbacks:Noisy.every = 'x': should be a valid"),
    ],
)
def test_mistakes_in_the_section_are_one_line(hooked: ToyRun, section: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        load_run(hooked.config, [entries(section)])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_report_and_the_config_name_callbacks(hooked: ToyRun) -> None:
    callbacks = entries("{name: 'toy_callbacks:Noisy', every: 4}, 'toy_callbacks:Noisy'")
    hooked.train("training.max_steps=2", callbacks)
    row = r"^callbacks +toy_callbacks:Noisy \(every 4\), toy_callbacks:Noisy\.2 \(every 3\)  \(command line\)$"
    assert re.search(row, (hooked.output / "report.txt").read_text(), re.M)
    again = load_run(hooked.output / "config.yaml")
    assert [choice.options.every for choice in again.callbacks] == [4, 3]


def test_a_checkpoint_from_before_callbacks_opens(hooked: ToyRun) -> None:
    hooked.train("training.max_steps=4")
    trainer: dict[str, Any] = json.loads((hooked.output / "checkpoints/step_00000004/trainer.json").read_text())
    assert trainer.keys() == {"step", "samples", "step_start", "skipped_steps", "since_log", "metrics"}
    assert hooked.train("training.max_steps=6", NOISY).first_step == 4
