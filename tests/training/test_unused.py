"""Parameters that take no part in the loss are named, and an interrupt from a recipe saves the run."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import ToyRun
from pool import Pool, WorkerFailure
from safetensors.torch import load_file

from shoal.checkpoint import step_folders
from shoal.config import load_run
from shoal.errors import UserError
from shoal.training import train

SPARE = """
class Net(nn.Sequential):
    def __init__(self, *layers):
        super().__init__(*layers)
        self.spare = nn.Linear(2, 2)

    def forward(self, input):
        for layer in [*self][:4]:
            input = layer(input)
        return input


class Toy(Recipe)"""


@pytest.fixture
def with_spare(change_recipe: Callable[[str, str], None]) -> None:
    change_recipe("class Toy(Recipe)", SPARE)
    change_recipe("return nn.Sequential(", "return Net(")


def report_of(config: Path, *overrides: str) -> str:
    outcome = train(load_run(config, (*overrides, "training.max_steps=1")))
    return (outcome.output_dir / "report.txt").read_text()


NAMED = "spare.weight, spare.bias (2 in all): trained, but not used by the loss"


@pytest.mark.usefixtures("with_spare")
def test_unused_parameters_are_in_the_report(toy: ToyRun) -> None:
    assert NAMED in report_of(toy.config)


def test_a_report_without_unused_parameters_has_no_row(toy: ToyRun) -> None:
    assert "no gradient" not in report_of(toy.config)


@pytest.mark.usefixtures("with_spare")
def test_unused_parameters_of_two_ranks(toy: ToyRun, pool2: Pool) -> None:
    found = "distributed.ddp.find_unused_parameters=true"
    assert NAMED in pool2.run(report_of, toy.config, found, f"experiment.output_dir={toy.folder}/a", init=False)[0]
    with pytest.raises(WorkerFailure, match=r"took no part in the loss \(spare\.weight, spare\.bias\), and DDP waits"):
        pool2.run(report_of, toy.config, f"experiment.output_dir={toy.folder}/b", init=False)


def refusal(config: Path, *overrides: str) -> str:
    """Returns what a run is refused with; an error in a worker would cost the pool its processes."""
    try:
        train(load_run(config, overrides))
    except UserError as error:
        return str(error)
    return ""


def test_an_interrupt_raised_by_a_recipe_ends_two_ranks_with_one_line(
    toy: ToyRun, pool2: Pool, change_recipe: Callable[[str, str], None]
) -> None:
    """Others may be in a collective, so nothing is saved. Here all raise it, so that no rank waits for another."""
    change_recipe("        return ((output", "        raise KeyboardInterrupt\n        return ((output")
    for message in pool2.run(refusal, toy.config, init=False):
        assert message.startswith("KeyboardInterrupt in step 1: of 2 processes the others wait for the one")
        assert message.endswith("there is no checkpoint")


def test_an_interrupt_raised_by_a_recipe_saves(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    undisturbed = toy.folder / "undisturbed"
    toy.train(f"experiment.output_dir={undisturbed}", "checkpoint.every=null")
    raises = 'if torch.is_grad_enabled() and (count := getattr(self, "count_", 0) + 1) == 4: raise KeyboardInterrupt'
    keeps = "if torch.is_grad_enabled(): self.count_ = count"
    change_recipe("        return ((output", f"        {raises}\n        {keeps}\n        return ((output")
    outcome = toy.train("checkpoint.every=null")
    assert (outcome.step, outcome.stopped_by) == (3, signal.SIGINT)
    change_recipe(raises, "count = 0")
    assert toy.train("checkpoint.every=null").first_step == 3
    ends = [load_file(folder / "checkpoints/step_00000010/model.safetensors") for folder in (undisturbed, toy.output)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_second_interrupt_in_a_step_saves_nothing(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    """It may come in the middle of an update. The first one has set the flag, and Python raises the second."""
    raises = "if torch.is_grad_enabled() and (count := getattr(self, 'count_', 0) + 1) == 4:"
    does = "import os, signal; os.kill(os.getpid(), signal.SIGINT); raise KeyboardInterrupt"
    keeps = "if torch.is_grad_enabled(): self.count_ = count"
    change_recipe(
        "        return ((output", f"        {raises}\n            {does}\n        {keeps}\n        return ((output"
    )
    with pytest.raises(KeyboardInterrupt):
        toy.train("checkpoint.every=2")
    assert [path.name for path in step_folders(toy.output)] == ["step_00000002"]
