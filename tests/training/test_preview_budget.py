"""Previews take a share of the time of evaluations, and no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import ToyRun

from shoal.observe.loggers import Loggers
from shoal.training import preview_budget


@pytest.mark.parametrize(("free_seconds", "shown"), [(0.0, [2, 10]), (1e9, [2, 4, 6, 8, 10])])
def test_previews_that_take_too_long_are_left_out(
    toy: ToyRun,
    change_recipe: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    free_seconds: float,
    shown: list[int],
) -> None:
    """Only the first and that of the end are shown if there is no time for others."""
    monkeypatch.setattr(preview_budget, "SHARE", 0.0)
    monkeypatch.setattr(preview_budget, "FREE_SECONDS", free_seconds)
    steps: list[int] = []
    monkeypatch.setattr(Loggers, "text", lambda self, step, name, text: steps.append(step))
    change_recipe(
        "    def eval_data(self):", '    def preview(self, model):\n        return "x"\n\n    def eval_data(self):'
    )
    outcome: Any = toy.train("training.eval_steps=2")
    assert steps == shown
    assert outcome.preview == "x"
