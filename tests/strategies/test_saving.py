"""Checkpoints by the methods of a strategy, and saves that some ranks do not call."""

from __future__ import annotations

import io
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pool import Pool
from torch import nn

from shoal.errors import UserError
from shoal.processes import roll_call
from shoal.strategies import DDPStrategy, DeepSpeedStrategy, DistributedStrategy, FSDPStrategy, Loop, SingleStrategy


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def wrapped(strategy: DistributedStrategy) -> tuple[Loop, Any, torch.optim.Optimizer]:
    loop = Loop(strategy)
    model, optimizer = loop.wrap(nn.Linear(4, 2), sgd)
    loop.backward(model(torch.ones(1, 4)).sum())
    loop.step()
    return loop, model, optimizer


def save_on_rank_0(kind: str, folder: str) -> tuple[str, float]:
    """Saves as most scripts do; returns what was said, and after how many seconds."""
    presets: dict[str, Any] = {"ddp": DDPStrategy, "fsdp": FSDPStrategy, "zero": DeepSpeedStrategy}
    strategy = presets[kind](device="cpu", timeout=120)
    strategy.setup()
    _, model, optimizer = wrapped(strategy)
    began, said = time.monotonic(), ""
    if strategy.rank == 0:
        try:
            with patch.object(roll_call, "JOIN_SECONDS", 2.0):
                strategy.save_checkpoint(Path(folder, "there"), model, optimizer, step=1)
        except UserError as error:
            said = str(error)
    seconds = time.monotonic() - began
    torch.distributed.barrier()
    strategy.teardown()
    return said, seconds


def test_a_save_that_only_rank_0_calls_works_where_every_rank_has_the_whole_model(pool2: Pool, tmp_path: Path) -> None:
    assert [said for said, _ in pool2.run(save_on_rank_0, "ddp", str(tmp_path))] == ["", ""]
    assert SingleStrategy(device="cpu").load_checkpoint(tmp_path / "there")["step"] == 1


@pytest.mark.parametrize("kind", ["fsdp", pytest.param("zero", marks=pytest.mark.slow)])
def test_a_save_that_only_rank_0_calls_names_the_others_where_each_has_a_part(
    pool2: Pool, tmp_path: Path, kind: str
) -> None:
    (said, seconds), _ = pool2.run(save_on_rank_0, kind, str(tmp_path))
    assert "there): rank 1 has not called it (" in said
    assert said.endswith("so all ranks must call it: take it out of `if rank == 0:`")
    assert seconds < 60, "it waited for the timeout of collectives"
    assert not (tmp_path / "there").exists()


def leave_early(folder: str) -> str:
    strategy = FSDPStrategy(device="cpu", timeout=120)
    strategy.setup()
    loop, _, _ = wrapped(strategy)
    if strategy.rank == 1:
        strategy.teardown()
        return ""
    try:
        loop.save(Path(folder, "there"))
    except UserError as error:
        return str(error)
    return "nothing was said"


def test_a_rank_that_has_left_is_not_waited_for(pool2: Pool, tmp_path: Path) -> None:
    said, _ = pool2.run(leave_early, str(tmp_path))  # JOIN_SECONDS is as it is: 30
    assert "rank 1 has not called it (1 s later)" in said


def come_late(folder: str, late: int) -> str:
    """Saves on both ranks, one of which comes later than the other; returns what can be loaded."""
    strategy = FSDPStrategy(device="cpu", timeout=120)
    strategy.setup()
    loop, _, _ = wrapped(strategy)
    if strategy.rank == late:
        time.sleep(1.5)
    limits = {"WARN_SECONDS": 0.3, "LOOK_SECONDS": 0.1, "JOIN_SECONDS": 0.5 if late == 0 else 60.0}
    with patch.multiple(roll_call, **limits), redirect_stderr(io.StringIO()) as printed:
        loop.save(Path(folder, f"late {late}"), step=late)
    if strategy.rank != late:
        assert f"waits in save({folder}/late {late}) for rank {late} (until" in printed.getvalue()
    loaded = loop.load(Path(folder, f"late {late}"))
    strategy.teardown()
    return str(loaded)


@pytest.mark.parametrize("late", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_comes_late_is_waited_for(pool2: Pool, tmp_path: Path, late: int) -> None:
    """Rank 0 is waited for as long as collectives wait: it often does more than the others between two steps."""
    assert pool2.run(come_late, str(tmp_path), late) == [str({"step": late})] * 2


def test_a_model_of_somebody_else_is_refused(tmp_path: Path) -> None:
    with SingleStrategy(device="cpu") as strategy:
        with pytest.raises(UserError, match=r"the strategy has no model yet; call loop\.wrap"):
            strategy.save_checkpoint(tmp_path / "a", nn.Linear(4, 2), sgd(nn.Linear(4, 2)))
        loop, model, optimizer = wrapped(strategy)
        with pytest.raises(UserError, match="this Linear is not the model that the strategy has"):
            strategy.save_checkpoint(tmp_path / "a", nn.Linear(4, 2), optimizer)
        loop.save(tmp_path / "a", step=3)
        with pytest.raises(UserError, match=r"checkpoint of another model: .*; build the model it was saved from"):
            strategy.load_checkpoint(tmp_path / "a", nn.Linear(4, 3))
        with pytest.raises(UserError, match="there is no folder"):
            strategy.load_checkpoint(tmp_path / "b")
        with pytest.raises(UserError, match="has no good checkpoint"):
            strategy.load_checkpoint(tmp_path / "last")
        nn.init.zeros_(model.weight)
        assert strategy.load_checkpoint(tmp_path / "a", model, optimizer) == {"step": 3}
        assert model.weight.abs().sum() > 0


def test_an_optimizer_that_a_strategy_has_seen_is_in_the_saves_of_the_loop(tmp_path: Path) -> None:
    loop = Loop(SingleStrategy(device="cpu"))
    model, first = loop.wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), lambda model: sgd(model[0]))
    second = sgd(loop.model[1])
    loop.strategy.save_checkpoint(tmp_path / "of_second", model, second)
    loop.backward(model(torch.ones(1, 4)).sum())
    loop.step(first)
    loop.step(second)
    loop.save(tmp_path / "of_both")
    stored = loop.strategy.load_checkpoint(tmp_path / "of_both")["optimizer"]
    assert {name for name, slots in stored.items() if slots} == {"0.weight", "0.bias", "1.weight", "1.bias"}
    with pytest.raises(UserError, match=r"two optimizers, SGD and SGD, have the parameter 1\.weight"):
        loop.strategy.save_checkpoint(tmp_path / "of_third", model, sgd(loop.model[1]))
