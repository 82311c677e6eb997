"""The loop stays thin: how many Python functions a steady step calls. Counts repeat exactly; times would not."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import pytest
from conftest import ToyRun

import shoal
from shoal.training.trainer import RecipeBody

HOME = str(Path(shoal.__file__).parent)
FIRST, LAST = 10, 30  # between the ends of these two steps: no start-up, no line of the log, no checkpoint

OWN_CALLS = 87  # 85 alone, 86 seen in the whole suite, for a reason not found. Fewer since Python 3.12
CALLBACK_CALLS = 30
ALL_CALLS = 302  # 300 alone; most of them are in torch's optimizer; other versions of torch differ by some


def calls_per_step(toy: ToyRun, monkeypatch: pytest.MonkeyPatch, *keys: str) -> tuple[float, float]:
    """In shoal's own code, and in all; training as a user does."""
    calls: Counter[tuple[int, bool]] = Counter()
    """By step, and whether it was shoal's own code."""
    now = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls[now, frame.f_code.co_filename.startswith(HOME)] += 1

    take_step = RecipeBody.take_step

    def take_step_and_look(body: RecipeBody, micro_batches: Any, step: int) -> Any:
        nonlocal now
        taken = take_step(body, micro_batches, step)
        now = step + 1
        if step + 1 in (FIRST, LAST):
            sys.setprofile(count if step + 1 == FIRST else None)
        return taken

    monkeypatch.setattr(RecipeBody, "take_step", take_step_and_look)
    try:
        toy.train("training.max_steps=40", "logging.every=1000", "checkpoint.every=null", *keys)
    finally:
        sys.setprofile(None)
    steps = range(FIRST, LAST)  # the median: garbage of earlier tests may be freed meanwhile, in Python code
    own = median(calls[step, True] for step in steps)
    return own, median(calls[step, True] + calls[step, False] for step in steps)


def test_a_step_calls_few_functions(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    own, total = calls_per_step(toy, monkeypatch)
    assert own <= OWN_CALLS
    assert total <= ALL_CALLS


def test_one_metric_adds_few_calls(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    with pytest.MonkeyPatch.context() as patches:
        _, without = calls_per_step(toy, patches)
    shutil.rmtree(toy.output)
    metric = '    def metrics(self, output, batch):\n        return {"mean": output.mean()}\n\n'
    change_recipe("    def inputs(", f"{metric}    def inputs(")
    with pytest.MonkeyPatch.context() as patches:
        _, total = calls_per_step(toy, patches)
    assert 1 <= total - without <= 30


TRIVIAL = """
from shoal.callbacks import Callback


class Trivial(Callback):
    def before_step(self, run):
        pass

    def after_step(self, run):
        run.log("trivial/step", run.step)
"""


def test_a_callback_costs_few_calls(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of shoal's and the callback's code; 4 in Python 3.11 and 0 without a callback."""
    (toy.folder / "trivial.py").write_text(TRIVIAL)
    _, without = calls_per_step(toy, monkeypatch)
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(toy.folder))
    output = f"experiment.output_dir={toy.folder}/other"
    _, total = calls_per_step(toy, monkeypatch, "callbacks=['trivial:Trivial']", output)
    assert without < total <= without + CALLBACK_CALLS


def test_a_layer_of_callbacks_would_be_noticed(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    take_step = RecipeBody.take_step

    def with_a_layer(body: RecipeBody, micro_batches: Any, step: int) -> Any:
        for _ in range(20):
            body.log(in_files=False)
        return take_step(body, micro_batches, step)

    monkeypatch.setattr(RecipeBody, "take_step", with_a_layer)
    own, _ = calls_per_step(toy, monkeypatch)
    assert own > OWN_CALLS
