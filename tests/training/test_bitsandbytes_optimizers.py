"""bitsandbytes' optimizers by name: they step local shards, resume exactly, and say what they cannot do."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from conftest import ToyRun
from pool import Pool
from torch import nn
from training.test_moves import bits, train_on
from training.test_optimizers import take_steps, training

from shoal.checkpoint import open_checkpoint
from shoal.errors import UserError
from shoal.training.bitsandbytes_optimizers import CLASSES, MIN_PAGED_SIZE, has_unpaged, optimizer_class
from shoal.training.optimizers import build_optimizer

bitsandbytes = pytest.importorskip("bitsandbytes")
LARGE = "model.hidden=4200"
"""A layer whose weights are so many that their moments have 8 bits."""


@pytest.mark.parametrize("name", CLASSES)
def test_they_are_those_of_bitsandbytes(name: str) -> None:
    mine, theirs = ([nn.Parameter(torch.ones(80, 64)), nn.Parameter(torch.ones(7))] for _ in range(2))
    options: dict[str, Any] = {"betas": [0.8, 0.9]}
    take_steps(build_optimizer(training(name, **options), [{"params": mine}]), mine)
    reference = getattr(bitsandbytes.optim, CLASSES[name])(theirs, lr=0.05, betas=(0.8, 0.9), weight_decay=0.1)
    take_steps(reference, theirs)
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
    assert reference.state[theirs[0]]["state1"].dtype == (torch.float32 if "32" in name else torch.uint8)


@pytest.mark.parametrize(
    "name", ["adamw_8bit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("paged_adamw_32bit", "lion_8bit"))]
)
def test_sharded_runs_go_on_as_if_they_had_not_stopped(toy: ToyRun, pool2: Pool, name: str) -> None:
    keys = [f"training.optimizer={name}", LARGE, "training.lr_scheduler=constant"]
    train_on("fsdp2", toy, {2: pool2}, *keys, "training.max_steps=2")
    train_on("fsdp2", toy, {2: pool2}, *keys, "training.max_steps=4")
    train_on("fsdp2", toy, {2: pool2}, *keys, "training.max_steps=4", f"experiment.output_dir={toy.folder}/whole")
    resumed, whole = (open_checkpoint(f / "checkpoints" / "step_00000004") for f in (toy.output, toy.folder / "whole"))
    assert bits(resumed.read()) == bits(whole.read())
    kinds = {str(stored.dtype) for key, stored in resumed.tensors.items() if "/state1/" in key}
    assert kinds == ({"torch.float32"} if "32" in name else {"torch.float32", "torch.uint8"})
    if name == "paged_adamw_32bit":
        train_on("single", toy, {}, *keys, "training.max_steps=5")
    else:
        with pytest.raises(UserError, match=r"8-bit state of .* was saved in another layout"):
            train_on("single", toy, {}, *keys, "training.max_steps=5")


def test_the_report_says_that_nothing_is_paged_on_a_cpu(toy: ToyRun) -> None:
    toy.train("training.optimizer=paged_adamw_32bit", "training.max_steps=1")
    report = (toy.output / "report.txt").read_text()
    assert "training.optimizer: paged_adamw_32bit: its state is not paged, because there is no GPU" in report


def test_what_they_cannot_do_is_one_line(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"lion_8bit is not for distributed.strategy = deepspeed"):
        toy.train("training.optimizer=lion_8bit", "distributed.strategy=deepspeed")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    optimizer_class.cache_clear()
    with pytest.raises(UserError, match=r"adamw_8bit: the package bitsandbytes is missing; run `pip install shoal\["):
        toy.train("training.optimizer=adamw_8bit")
    optimizer_class.cache_clear()


def test_state_that_is_not_paged_is_seen() -> None:
    """On a GPU this stops the run; a CPU does not page."""
    small, large = torch.nn.Parameter(torch.zeros(10)), torch.nn.Parameter(torch.zeros(MIN_PAGED_SIZE))
    for parameter, unpaged in ((small, False), (large, True)):
        optimizer = optimizer_class("paged_adamw_32bit")([parameter])
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert has_unpaged(optimizer) is unpaged


@pytest.mark.parametrize("name", [*CLASSES])
def test_a_parameter_without_elements_is_not_updated(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A rank may hold nothing of a short tensor. On a GPU, bitsandbytes would start a kernel of no blocks and exit."""
    updated = []
    kind = optimizer_class(name)
    base = kind.__mro__[1]
    update = base.update_step
    patched = lambda self, group, p, *indices: (updated.append(p.numel()), update(self, group, p, *indices))  # noqa: E731
    monkeypatch.setattr(base, "update_step", patched, raising=False)
    parameters = [torch.nn.Parameter(torch.ones(rows, 4)) for rows in (0, 3)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = kind(parameters, lr=0.1)
    optimizer.step()
    assert updated == [12]
    assert [optimizer.state[parameter]["step"] for parameter in parameters] == [1, 1]
    assert (parameters[1] < 1).all()
