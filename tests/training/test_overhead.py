"""The loop stays thin: how many Python functions a steady step calls. Counts repeat exactly; times would not."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from conftest import ToyRun

import shoal
from shoal.training.trainer import Trainer

HOME = str(Path(shoal.__file__).parent)
FIRST, LAST = 10, 30  # between the ends of these two steps: no start-up, no line of the log, no checkpoint

OWN_CALLS = 70  # 66 in Python 3.11; fewer since 3.12, where a comprehension is no call
ALL_CALLS = 310  # 276 with torch 2.13, most of them in its optimizer; other versions differ by some


def calls_per_step(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float]:
    """In shoal's own code, and in all; training as a user does."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls[frame.f_code.co_filename] += 1

    take_step = Trainer.take_step

    def take_step_and_look(trainer: Trainer, micro_batches: Any) -> None:
        take_step(trainer, micro_batches)
        if trainer.step in (FIRST, LAST):
            sys.setprofile(count if trainer.step == FIRST else None)

    monkeypatch.setattr(Trainer, "take_step", take_step_and_look)
    try:
        toy.train("training.max_steps=40", "logging.every=1000", "checkpoint.every=null")
    finally:
        sys.setprofile(None)
    own = sum(number for file, number in calls.items() if file.startswith(HOME))
    return own / (LAST - FIRST), calls.total() / (LAST - FIRST)


def test_a_step_calls_few_functions(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    own, total = calls_per_step(toy, monkeypatch)
    assert own <= OWN_CALLS
    assert total <= ALL_CALLS


def test_a_layer_of_callbacks_would_be_noticed(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    take_step = Trainer.take_step

    def with_a_layer(trainer: Trainer, micro_batches: Any) -> None:
        for _ in range(20):
            trainer.due(None)
        take_step(trainer, micro_batches)

    monkeypatch.setattr(Trainer, "take_step", with_a_layer)
    own, _ = calls_per_step(toy, monkeypatch)
    assert own > OWN_CALLS
