"""Learning-rate schedules: as torch's, as functions of the user's own, and as evaluations decide."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ToyRun
from torch.optim import lr_scheduler

from shoal.checkpoint import open_checkpoint
from shoal.config.schema import TrainingConfig
from shoal.config.schema_optimizers import Plateau
from shoal.errors import UserError
from shoal.training.schedules import PlateauSchedule, build_schedule, say_jump


def factors(total: int = 10, **keys: Any) -> list[float]:
    schedule = build_schedule(TrainingConfig(max_steps=total, **keys), total)
    return [schedule(step) for step in range(total)]


def of_torch(build: Callable[..., Any], total: int = 10) -> list[float]:
    """Returns the learning rates of one of torch's schedulers, whose peak is 1."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0, momentum=0.9)
    scheduler, rates = build(optimizer), []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("section", "torchs"),
    [
        ({"name": "step", "step_size": 3, "gamma": 0.5}, lambda o: lr_scheduler.StepLR(o, 3, 0.5)),
        ({"name": "multistep", "milestones": [2, 7]}, lambda o: lr_scheduler.MultiStepLR(o, [2, 7], 0.1)),
        ({"name": "exponential", "gamma": 0.8}, lambda o: lr_scheduler.ExponentialLR(o, 0.8)),
        ({"name": "polynomial", "power": 2.0}, lambda o: lr_scheduler.PolynomialLR(o, 10, 2.0)),
        ({"name": "cosine"}, lambda o: lr_scheduler.CosineAnnealingLR(o, 10)),
        (
            {"name": "one_cycle", "pct_start": 0.4, "div_factor": 10.0, "final_div_factor": 100.0},
            lambda o: lr_scheduler.OneCycleLR(
                o, 1.0, 10, pct_start=0.4, div_factor=10.0, final_div_factor=100.0, cycle_momentum=False
            ),
        ),
    ],
)
def test_schedules_are_those_of_torch(section: dict[str, Any], torchs: Callable[..., Any]) -> None:
    assert factors(lr_scheduler=section) == pytest.approx(of_torch(torchs))


def test_schedules_after_a_warmup() -> None:
    assert factors(lr_scheduler={"name": "exponential", "gamma": 0.5}, warmup_steps=3)[:6] == [
        *(0.25, 0.5, 0.75),
        *(1.0, 0.5, 0.25),
    ]
    root = factors(lr_scheduler="inverse_sqrt", warmup_steps=2)
    assert root[2:5] == pytest.approx([1, sqrt(2 / 3), sqrt(2 / 4)])
    assert factors(lr_scheduler={"name": "inverse_sqrt", "timescale": 1})[3] == 0.5
    floor = factors(lr_scheduler={"name": "polynomial", "power": 3.0, "min_ratio": 0.25}, warmup_ratio=0.2)
    assert (floor[2], floor[-1]) == (1.0, 0.25 + 0.75 / 8**3)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("lr_scheduler: one_cycle, warmup_steps: 3", "has a warmup of its own or none"),
        ("lr_scheduler: inverse_sqrt", "needs a warmup or a timescale"),
        ("lr_scheduler: plateau", "set eval_steps"),
        ("lr_scheduler: {name: multistep, milestones: [5, 3]}", "must rise"),
        ("lr_scheduler: {name: step}", "step_size is missing"),
        ("lr_scheduler: expotential", "did you mean 'exponential'"),
        ("optimizer: rprop", "set lr_scheduler to constant"),
        ("lr_scheduler: no_such_module:curve", "no module 'no_such_module'"),
        ("lr_scheduler: math:pi", "must be a function f"),
        ("lr_scheduler: math:sqt", "did you mean 'sqrt'"),
    ],
)
def test_wrong_schedules_are_one_line(toy: ToyRun, keys: str, words: str) -> None:
    toy.config.write_text(toy.config.read_text().replace("max_steps: 10,", f"max_steps: 10, {keys},"))
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        toy.train()
    assert "\n" not in str(caught.value)


CURVE = "def curve(step, total):\n    return 1 - step / total\n\n\ndef wrong(step, total):\n    return 'fast'\n"


def test_a_function_of_the_users_own(toy: ToyRun) -> None:
    (toy.folder / "curves.py").write_text(CURVE)
    toy.train("training.lr_scheduler=curves:curve", "training.max_steps=4")
    rates = toy.metrics("train/learning_rate")
    assert [*rates.values()] == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
    assert "curves:curve to step 4" in (toy.output / "report.txt").read_text()
    with pytest.raises(UserError, match="curves:wrong returned 'fast' at step 0; return a finite factor"):
        toy.train("training.lr_scheduler=curves:wrong", f"experiment.output_dir={toy.folder}/wrong")


def test_the_recipes_schedule_comes_first(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe(
        "    def inputs",
        "    def schedule(self, step, total):\n        return 1 / (1 + step)\n\n    def inputs",
    )
    toy.train("training.max_steps=3", "training.lr_scheduler=constant")
    assert [*toy.metrics("train/learning_rate").values()] == pytest.approx([0.01, 0.005, 0.01 / 3])
    report = (toy.output / "report.txt").read_text()
    assert "the recipe's schedule over 3 steps" in report
    assert "training.lr_scheduler: the recipe has a schedule" in report


def plateau(**options: Any) -> PlateauSchedule:
    return PlateauSchedule(Plateau(name="plateau", **options), 0)


def test_plateau_lowers_the_rate_after_its_patience() -> None:
    schedule = plateau(factor=0.5, patience=1, min_ratio=0.2, threshold=0.1)
    expected = [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.2]
    values = [1.0, 0.95, 0.95, float("nan"), 0.92, 0.95, 0.95]  # none is better by a tenth
    for value, factor in zip(values, expected, strict=True):
        schedule.observe({"eval/loss": value})
        assert schedule(5) == pytest.approx(factor)
    schedule.observe({"eval/loss": 0.5})
    assert schedule.state() == {"factor": 0.2, "best": 0.5, "waited": 0}
    rising = plateau(mode="max", patience=0, factor=0.5)
    for value in (0.1, 0.2, 0.2):
        rising.observe({"eval/loss": value})
    assert rising(0) == 0.5
    with pytest.raises(UserError, match="metric = eval/loss: the evaluation has eval/accuracy"):
        rising.observe({"eval/accuracy": 1.0})
    with pytest.raises(UserError, match="state of lr_scheduler plateau is not valid"):
        rising.load_state({"factor": "x", "best": None, "waited": 0})


PLATEAU = "training.lr_scheduler={name: plateau, factor: 0.5, patience: 0, threshold: 1.0}"


def test_plateau_resumes_exactly(toy: ToyRun) -> None:
    keys = [PLATEAU, "training.eval_steps=2"]
    toy.train(*keys, "training.max_steps=5")  # the end is evaluated, but no undisturbed run would do so there
    saved = open_checkpoint(toy.output / "checkpoints" / "step_00000004").trainer["schedule"]
    assert saved["factor"] == 0.5
    toy.train(*keys)
    toy.train(*keys, f"experiment.output_dir={toy.folder}/undisturbed")
    rates = toy.metrics("train/learning_rate")
    assert rates == toy.metrics("train/learning_rate", toy.folder / "undisturbed")
    assert rates[10] == pytest.approx(0.01 * 0.5**3)
    ends = [folder / "checkpoints" / "step_00000010" for folder in (toy.output, toy.folder / "undisturbed")]
    resumed, undisturbed = (open_checkpoint(end) for end in ends)
    assert resumed.trainer["schedule"] == undisturbed.trainer["schedule"]
    for name, tensor in resumed.read().model.items():
        assert torch.equal(tensor, undisturbed.read().model[name])


def test_a_schedule_that_only_a_checkpoint_names_is_not_imported(tmp_path: Path) -> None:
    own, cosine = (TrainingConfig(max_steps=4, lr_scheduler=name) for name in ("evil_module:f", "cosine"))
    said = say_jump(own, cosine, (4, 4), 2)
    assert said is not None
    assert said.endswith("the learning rate may jump")
    slower = own.model_copy(update={"lr_scheduler": Plateau(name="plateau")})
    assert say_jump(slower, slower.model_copy(update={"max_steps": 8}), (4, 8), 2) is None
    assert json.dumps(say_jump(slower, slower.model_copy(update={"learning_rate": 1.0}), (4, 4), 2)).count("may jump")
