"""A process that is killed while torch.compile writes must not keep later ones from starting."""

from __future__ import annotations

import _ctypes
import shutil
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from torch import nn

from shoal.errors import UserError
from shoal.torch_private import compile_cache_folders
from shoal.transform.compile import CompiledModules
from shoal.types import ParallelPlan


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_libraries_that_are_not_whole_are_removed_before_compiling(cache: Path) -> None:
    folder = cache / "ab"
    folder.mkdir(parents=True)
    _, locks = compile_cache_folders()
    whole = shutil.copy(_ctypes.__file__, folder / "whole.main.so")
    for name, size in (("empty", 0), ("begun", 50), ("cut", Path(whole).stat().st_size - 1), ("written_now", 0)):
        (folder / f"{name}.main.so").write_bytes(Path(whole).read_bytes()[:size])
    (folder / "headless.main.so").write_bytes(bytes(64) + Path(whole).read_bytes()[64:-9])
    (folder / "other.main.so").write_text("not a library of this system")
    (folder / "source.main.cpp").touch()
    with FileLock(locks / "written_now.lock"):
        CompiledModules(nn.Sequential(nn.Linear(2, 2)), ParallelPlan()).compile(torch.device("cpu"))
    left = {path.name.partition(".")[0] for path in folder.iterdir()}
    assert left == {"whole", "other", "written_now", "source"}


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("shoal.transform.compile_cache.compile_cache_folders", lambda: (tmp_path / "file" / "a", None))
    with pytest.raises(
        UserError, match=f"cannot write to {tmp_path}/file/a .Not a directory.; set TORCHINDUCTOR_CACHE"
    ):
        CompiledModules(nn.Sequential(nn.Linear(2, 2)), ParallelPlan()).compile(torch.device("cpu"))


@pytest.mark.slow
def test_a_process_starts_after_one_that_was_killed_while_it_compiled(cache: Path) -> None:
    def compute() -> None:
        torch.compiler.reset()
        model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        compiled = CompiledModules(model, ParallelPlan())
        compiled.compile(torch.device("cpu"))
        model(torch.ones(2, 4)).sum().backward()
        assert not compiled.eager_calls

    compute()
    libraries = [*cache.glob("??/*.so")]
    assert libraries
    for library in libraries:
        library.rename(library.with_suffix(".loaded"))  # this process has mapped it
        library.touch()
    compute()
