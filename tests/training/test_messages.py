"""Which small messages ranks exchange around a step, and that none of them keeps a step waiting without need."""

from __future__ import annotations

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


class Events(TorchDispatchMode):
    """Notes when something is computed and what is sent, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            is_number = func is torch.ops.c10d.allreduce_.default and args[0][0].dtype == torch.int64
            self.seen.append("agree" if is_number else "send")
        elif func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
            self.seen.append("compute")
        return func(*args, **(kwargs or {}))


def train_noting(config: Path, overrides: list[str]) -> list[str]:
    keys = [f"training.max_steps={STEPS}", f"logging.every={STEPS}", "checkpoint.every=null", "logging.console=off"]
    with Events() as events:
        train(load_run(config, [*keys, *overrides]))
    return [kind for kind, _ in groupby(events.seen)]


def test_whether_to_stop_is_sent_before_a_step_computes(toy: ToyRun, pool2: Pool) -> None:
    alone = ["distributed.local_sgd.sync_every=100", "training.eval_steps=null"]
    events, _ = pool2.run(train_noting, toy.config, alone, init=False)
    joined = " ".join(events)
    # A rank that takes steps alone sends nothing else, from the second step to the last but one.
    assert " ".join(["agree compute"] * (STEPS - 2)) in joined


def test_a_hook_that_may_ask_in_a_step_is_obeyed_after_it(toy: ToyRun, pool2: Pool) -> None:
    (toy.folder / "asking.py").write_text(HOOK)
    keys = ['callbacks=[{name: "asking:Asks"}]', "distributed.strategy=ddp"]
    events, _ = pool2.run(train_noting, toy.config, keys, init=False)
    assert "enough" in (toy.output / "logs" / "rank_0.log").read_text()
    assert max(toy.metrics()) <= 3
    assert events.count("agree") > 2


@pytest.mark.parametrize("key", ["train/loss", "train/grad_norm"])
def test_a_line_of_local_sgd_is_about_all_ranks(toy: ToyRun, pool2: Pool, key: str) -> None:
    lines = {}
    for name, keys in {"local": ["distributed.local_sgd.sync_every=4"], "ddp": ["distributed.strategy=ddp"]}.items():
        output = toy.folder / name
        pool2.run(train_noting, toy.config, [*keys, f"experiment.output_dir={output}"], init=False)
        lines[name] = toy.metrics(key, output=output)[1]
    if key == "train/loss":  # of the first step, which starts with the same weights
        assert lines["local"] == pytest.approx(lines["ddp"], rel=1e-6)
    else:  # the mean of the norms of two slices is no smaller than the norm of their mean
        assert lines["local"] >= lines["ddp"] * (1 - 1e-6)
