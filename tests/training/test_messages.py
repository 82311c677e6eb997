"""Which small messages ranks exchange around a step, and that none of them keeps a step waiting without need."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ToyRun
from pool import Pool
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.config import load_run
from shoal.training import train

STEPS = 8
HOOK = """
from shoal.callbacks import Callback


class Asks(Callback):
    def after_step(self, run):
        if run.step == 3:
            run.stop("enough")
"""

NOTES = """
from pathlib import Path
import torch.distributed as dist
from shoal.callbacks import Callback


class Notes(Callback):
    def after_step(self, run):
        if run.step == 1:
            (Path(run.output_dir) / f"norm_{dist.get_rank()}").write_text(str(run.info.grad_norm.item()))
"""


class Events(TorchDispatchMode):
    """Notes when something is computed and what is sent, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            is_number = func is torch.ops.c10d.allreduce_.default and args[0][0].dtype == torch.int64
            self.seen.append("agree" if is_number else "send")
        elif func is torch.ops.aten.frac.default:
            self.seen.append("read")
        elif func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
            self.seen.append("compute")
        return func(*args, **(kwargs or {}))


def train_noting(config: Path, overrides: list[str]) -> list[str]:
    keys = [f"training.max_steps={STEPS}", f"logging.every={STEPS}", "checkpoint.every=null", "logging.console=off"]
    with Events() as events:
        train(load_run(config, [*keys, *overrides]))
    return [kind for kind, _ in groupby(events.seen)]


def test_whether_to_stop_is_sent_before_a_step_computes(
    toy: ToyRun, pool2: Pool, change_recipe: Callable[[str, str], None]
) -> None:
    getting = "    def __getitem__(self, i):\n"
    change_recipe(getting, f"{getting}        torch.zeros(1).frac()\n")  # an operation that nothing else uses
    alone = ["distributed.local_sgd.sync_every=100", "training.eval_steps=null"]
    events, _ = pool2.run(train_noting, toy.config, alone, init=False)
    joined = " ".join(events)
    # A rank that takes steps alone sends nothing else, from the second step to the last but one.
    assert " ".join(["read agree compute"] * (STEPS - 2)) in joined


def test_a_hook_that_may_ask_in_a_step_is_obeyed_after_it(toy: ToyRun, pool2: Pool) -> None:
    (toy.folder / "asking.py").write_text(HOOK)
    keys = ['callbacks=[{name: "asking:Asks"}]', "distributed.strategy=ddp"]
    events, _ = pool2.run(train_noting, toy.config, keys, init=False)
    assert "enough" in (toy.output / "logs" / "rank_0.log").read_text()
    assert max(toy.metrics()) <= 3
    assert events.count("agree") > 2


def test_a_line_of_local_sgd_is_about_all_ranks(toy: ToyRun, pool2: Pool) -> None:
    (toy.folder / "noting.py").write_text(NOTES)
    lines = {}
    for name, keys in {"local": ["distributed.local_sgd.sync_every=4"], "ddp": ["distributed.strategy=ddp"]}.items():
        output = toy.folder / name
        keys = [*keys, f"experiment.output_dir={output}", 'callbacks=[{name: "noting:Notes"}]']
        pool2.run(train_noting, toy.config, keys, init=False)
        lines[name] = [toy.metrics(key, output=output)[1] for key in ("train/loss", "train/grad_norm")]
    (loss, norm), (loss_of_ddp, _) = lines["local"], lines["ddp"]  # of the first step, with the same weights
    assert loss == pytest.approx(loss_of_ddp, rel=1e-6)
    own = [float((toy.folder / "local" / f"norm_{rank}").read_text()) for rank in range(2)]
    assert own[0] != own[1]
    assert norm == pytest.approx(sum(own) / 2)
