"""Models whose forward writes parameters: what a layout would lose is refused, and what it keeps is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import ToyRun
from pool import Pool
from strategies.nets import Points, make, micro_batch, rows
from torch import Tensor, nn

from shoal.config import load_run
from shoal.errors import UserError
from shoal.training import train
from shoal.training.forward_writes import written_parameters
from shoal.types import Weights


class Writing(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.how, self.trained, self.teacher = how, nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.how == "average":
                self.teacher.weight.lerp_(self.trained.weight, 0.5)
            elif self.how == "clamp":
                self.trained.weight.clamp_(-1, 1)
            elif self.how == "replace":
                self.trained.weight.data = self.trained.weight.data / 2
            elif self.how == "count":
                self.teacher.bias += 1
        return self.trained(x)


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ("average", ["teacher.weight"]),
        ("clamp", ["trained.weight"]),
        ("replace", ["trained.weight"]),
        ("nothing", []),
    ],
)
def test_they_are_found_without_computing(how: str, names: list[str]) -> None:
    assert written_parameters(Writing(how).to("meta"), {"x": torch.ones(2, 4, device="meta")}) == names


def sgd_of_trained(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.trained.parameters(), 0.1)


def written_in_a_step() -> list[float]:
    with make("ddp") as strategy:
        model = Writing("count")
        before = model.teacher.bias.clone()
        model, _ = strategy.prepare(model, sgd_of_trained, weights=Weights("built"))
        strategy.forward_backward(model, [micro_batch(*rows(2, 0))], Points(), 0)
        return (model.teacher.bias - before).tolist()


def test_the_first_forward_of_ddp_writes_once(pool2: Pool) -> None:
    """Before its first step DDP is called once more, which must leave nothing behind."""
    assert pool2.run(written_in_a_step, init=False) == [[1.0] * 3] * 2


def outcome(toy: ToyRun, strategy: str) -> str:
    changes = [f"distributed.strategy={strategy}", f"experiment.output_dir={toy.folder / strategy}"]
    try:
        train(load_run(toy.config, [*changes, "training.max_steps=2"]))
    except UserError as error:
        return str(error)
    return "trains"


def test_a_run_is_refused_where_they_would_be_lost(toy: ToyRun, pool2: Pool, change_recipe: Any) -> None:
    change_recipe(
        "class Toy(Recipe):",
        "class Clamped(nn.Linear):\n    def forward(self, input):\n        with torch.no_grad():\n"
        "            self.weight.clamp_(-1, 1)\n        return super().forward(input)\n\n\nclass Toy(Recipe):",
    )
    change_recipe("nn.Linear(1, hidden), nn.Tanh()", "Clamped(1, hidden), nn.Tanh()")
    assert pool2.run(outcome, toy, "ddp", init=False) == ["trains"] * 2
    for refused in pool2.run(outcome, toy, "fsdp", init=False):
        assert "the forward writes parameter 0.weight, and strategy fsdp would lose" in refused
