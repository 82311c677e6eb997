from __future__ import annotations

import json
from pathlib import Path

import torch

from shoal.config.schema import ProfileConfig
from shoal.observe.profiler import Profiler


def run(profiler: Profiler, first: int, last: int) -> None:
    """Runs steps in which step n multiplies n matrices, so that the trace shows which steps it contains."""
    matrix = torch.eye(4)
    for step in range(first, last + 1):
        profiler.step(step)
        for _ in range(step):
            torch.mm(matrix, matrix)
    profiler.close()


def events(output_dir: Path, trace: str) -> list[str]:
    return [event.get("name", "") for event in json.loads((output_dir / "profile" / trace).read_text())["traceEvents"]]


def test_the_trace_contains_exactly_the_chosen_steps(tmp_path: Path) -> None:
    run(Profiler(ProfileConfig(start=3, steps=2), tmp_path), 1, 7)
    names = events(tmp_path, "trace_step_3-4.json")
    assert names.count("aten::mm") == 3 + 4
    assert [names.count(f"step {step}") for step in range(1, 8)] == [0, 0, 1, 1, 0, 0, 0]
    summary = (tmp_path / "profile" / "summary.txt").read_text()
    assert "aten::mm" in summary
    assert len(list((tmp_path / "profile").iterdir())) == 2


def test_a_run_that_ends_early_writes_the_steps_it_recorded(tmp_path: Path) -> None:
    run(Profiler(ProfileConfig(start=3, steps=10), tmp_path), 1, 4)
    assert events(tmp_path, "trace_step_3-4.json").count("aten::mm") == 7


def test_a_resumed_run_profiles_only_the_chosen_steps_that_it_runs(tmp_path: Path) -> None:
    run(Profiler(ProfileConfig(start=3, steps=3), tmp_path), 5, 7)
    assert events(tmp_path, "trace_step_5-5.json").count("aten::mm") == 5
    run(Profiler(ProfileConfig(start=3, steps=3), tmp_path / "past"), 6, 7)
    assert not (tmp_path / "past").exists()


def test_without_a_config_nothing_happens(tmp_path: Path) -> None:
    run(Profiler(None, tmp_path), 1, 3)
    assert list(tmp_path.iterdir()) == []
