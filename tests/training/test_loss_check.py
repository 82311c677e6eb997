"""A loss that is a mean is refused at the first step; what is a sum, or cannot be judged, is let through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import ToyRun
from pool import Pool
from strategies.nets import PLAN, ZERO_1, ZERO_3, Points, build, make, micro_batch, rows, sgd, squares
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.training.loss_check import check_loss
from shoal.training.report import SEPARATOR
from shoal.types import MicroBatch, Weights

SUM, MEAN = "a sum over samples, as it has to be", "loss is a mean"


class Mean(Points):
    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return squares(output, batch["y"]).mean()


class Contrasted(Points):
    """Compares every sample with all others."""

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output @ output.T).logsumexp(1).sum() + torch.cdist(output, output).sum()


class DeclaredContrasted(Contrasted):
    loss_mixes_samples = True


class MeanOfMeans(Mean):
    """Counts micro-batches, so that a step's loss is the mean of their means."""

    def count(self, batch: Any) -> int:
        return 1


class Noisy(Points):
    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return squares(output + 5 * torch.randn_like(output), batch["y"]).sum()


class Odd(Points):
    def loss(self, output: Tensor, batch: Any) -> Tensor:
        assert len(output) == 4
        return squares(output, batch["y"]).sum()


def judge(recipe: Points, micro: MicroBatch | None, kind: str = "single") -> tuple[str, list[str]]:
    """Returns what the check says, or refuses with, and its warnings. Without a batch, ranks have different sizes."""
    warnings: list[str] = []
    with make(kind) as strategy:
        model, _ = strategy.prepare(build(), sgd, PLAN, Weights("built"))
        micro = micro or micro_batch(*rows(4 + strategy.data_rank, 0))
        try:
            return check_loss(strategy, model, micro, recipe, warnings.append), warnings
        except UserError as error:
            return str(error), warnings


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize(("recipe", "found"), [(Points(), SUM), (Mean(), MEAN), (MeanOfMeans(), SUM)])
def test_a_mean_is_refused_and_a_sum_is_not(recipe: Points, found: str, size: int) -> None:
    said, warnings = judge(recipe, micro_batch(*rows(size, 0)))
    assert found in said
    assert not warnings


@pytest.mark.parametrize(
    ("recipe", "found", "num_warnings"),
    [
        (Contrasted(), "NOT a sum", 1),
        (DeclaredContrasted(), "loss_mixes_samples = True", 0),
        (Noisy(), "draws random numbers", 0),
        (Odd(), "cannot be computed for half a batch", 0),
    ],
)
def test_what_is_no_mean_is_never_refused(recipe: Points, found: str, num_warnings: int) -> None:
    said, warnings = judge(recipe, micro_batch(*rows(4, 0)))
    assert found in said
    assert len(warnings) == num_warnings


def test_a_batch_without_one_row_for_each_sample_is_not_judged() -> None:
    packed = replace(micro_batch(*rows(4, 0)), ids=[0, 1])
    assert judge(Mean(), packed) == (
        "not checked to be a sum: not all tensors of a batch have one row for each sample",
        [],
    )


def judge_both(kind: str) -> list[str]:
    return [judge(recipe, None, kind)[0] for recipe in (Points(), Mean())]


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tp", "pp", ZERO_1, ZERO_3])
def test_all_ranks_judge_alike(pool2: Pool, kind: str) -> None:
    for said in pool2.run(judge_both, kind, init=False):
        assert SUM in said[0]
        assert MEAN in said[1]


def test_a_run_with_a_mean_is_refused_at_its_first_step(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe("** 2).sum()", "** 2).mean()")
    with pytest.raises(UserError, match=r"recipe Toy: loss is a mean.*reduction='sum'"):
        toy.train()
    change_recipe("class Toy(Recipe):\n", "class Toy(Recipe):\n    loss_mixes_samples = True\n")
    assert toy.train("training.max_steps=1").step == 1


COUNTING = """
class Counting(nn.BatchNorm1d):
    def forward(self, x):
        self.num_batches_tracked += 100
        return super().forward(x) + torch.rand(())


class Toy"""


def test_the_check_does_not_change_the_training(
    toy: ToyRun, change_recipe: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    change_recipe("class Toy", COUNTING)
    change_recipe("nn.Tanh()", "nn.Tanh(), Counting(hidden)")
    toy.train()
    checked = toy.metrics()
    assert "loss" in (toy.output / "report.txt").read_text()
    monkeypatch.setattr("shoal.training.trainer.check_loss", lambda *_: "")
    toy.train(f"experiment.output_dir={toy.folder / 'unchecked'}")
    assert checked == toy.metrics(output=toy.folder / "unchecked")


def test_a_resumed_run_is_not_checked_again(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    toy.train("training.max_steps=2")
    change_recipe("** 2).sum()", "** 2).mean()")
    assert toy.train().step == 10
    first, second = (toy.output / "report.txt").read_text().split(SEPARATOR)
    assert SUM in first
    assert SUM not in second


def test_modes_and_buffers_are_as_before() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout()).train()
    model[2].eval()

    class Normed(Points):
        def inputs(self, batch: Any) -> dict[str, Any]:
            return {"input": batch["x"]}

    with make("single") as strategy:
        strategy.prepare(model, sgd, PLAN.derive(model), Weights("built"))
        before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
        assert check_loss(strategy, model, micro_batch(*rows(4, 0)), Normed(), print) == SUM
    assert [module.training for module in model.modules()] == [True, True, True, False]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
