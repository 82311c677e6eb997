"""Calls as people write them for other code run as they are written; docs/familiar.md is made from the same files.

A file of `calls` is one script. In it `#:` begins a call: the comment says what it does here, the lines up to the next
empty one are the call, and what follows checks it.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from familiar.page import CALLS, is_slow, page, processes_of

ROOT = Path(__file__).parent.parent.parent


def run_script(path: str) -> None:
    runpy.run_path(path, run_name="__main__")


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * is_slow(path)) for path in CALLS]
)
def test_calls_run_as_they_are_written(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool2) -> None:
    monkeypatch.chdir(tmp_path)
    if processes_of(path) == 1:
        run_script(str(path))
    else:
        pool2.run(run_script, str(path), init=False)


def test_the_page_is_current() -> None:
    assert (ROOT / "docs" / "familiar.md").read_text() == page(), "run python tests/test_docs.py --write"
