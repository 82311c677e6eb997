"""What `make soak` counts as growth. The soak itself takes an hour."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def soak() -> Any:
    path = Path(__file__).parent.parent.parent / "scripts" / "soak.py"
    spec = importlib.util.spec_from_file_location("soak", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("leak_mib", "leaked_files", "grown"),
    [
        (0.0, 0, []),
        (3.0, 0, ["rank_mib"]),
        (0.0, 1, ["rank_files"]),
    ],
)
def test_growth(soak: Any, leak_mib: float, leaked_files: int, grown: list[str]) -> None:
    samples = [soak.Sample(800 + n % 3 + leak_mib * n, 60 + leaked_files * n, 300, 21) for n in range(100)]
    assert [problem.split()[0] for problem in soak.growth_problems(samples)] == grown


def test_too_few_samples_prove_nothing(soak: Any) -> None:
    assert soak.growth_problems([soak.Sample(800, 60, 300, 21)]) == ["only 1 samples of memory were taken"]


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
def test_a_sample_counts_open_files(soak: Any, tmp_path: Path) -> None:
    before = soak.take_sample(os.getpid(), [os.getpid()])
    files = [(tmp_path / str(number)).open("w") for number in range(5)]
    after = soak.take_sample(os.getpid(), [os.getpid()])
    for file in files:
        file.close()
    assert after.rank_files - before.rank_files == after.launcher_files - before.launcher_files == 5
    assert before.rank_mib > 50
    assert soak.take_sample(os.getpid(), [2**22 + 1]) is None, "the process does not exist"
