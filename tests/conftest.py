"""Shared by the tests: a recipe as a user would write it, outside the package, and a way to run it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import pytest
from garbage import keep_imports_frozen
from hypothesis import settings

settings.register_profile("shoal", deadline=None)  # a busy machine is no failure
settings.load_profile("shoal")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some virtual machines announce AMX and then trap on it; oneDNN would use it for bf16.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


@pytest.fixture(autouse=True)
def _quick_collections() -> None:
    keep_imports_frozen()


USER_RECIPE = '''
import torch
from pydantic import BaseModel
from torch import nn

from shoal.recipes import Recipe
from shoal.types import ParallelPlan


class Squares:
    """y = x² at a thousand points."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        x = torch.tensor([i / self.size])
        return {"x": x, "y": x * x}


class ModelSection(BaseModel):
    hidden: int = 16
    dropout: float = 0.1


class DataSection(BaseModel):
    size: int = 103


class Toy(Recipe):
    class Config(BaseModel):
        model: ModelSection = ModelSection()
        dataset: DataSection = DataSection()

    def build_model(self):
        hidden = self.config.model.hidden
        return nn.Sequential(
            nn.Linear(1, hidden), nn.Tanh(), nn.Dropout(self.config.model.dropout), nn.Linear(hidden, 1)
        )

    def train_data(self):
        return Squares(self.config.dataset.size)

    def eval_data(self):
        return Squares(17)

    def inputs(self, batch):
        return {"input": batch["x"]}

    def loss(self, output, batch):
        return ((output - batch["y"]) ** 2).sum()


class Divisible(Toy):
    def parallel_plan(self, model):
        order, tensor = ("0", "1", "2", "3"), {"0": "column", "3": "row"}
        return ParallelPlan(blocks=("0", "3"), order=order, entry="input", tensor=tensor)
'''

RUN = """
recipe: toy_recipe:Toy
training: {{max_steps: 10, batch_size: 4, learning_rate: 1e-2}}
experiment: {{output_dir: {output}}}
logging: {{every: 1, console: plain, tensorboard: false}}
checkpoint: {{every: 2}}
"""


def call_shoal(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command `shoal` in this process: starting another one takes seconds.

    It cannot show what only a process has (signals, workers' output): `ToyRun.shoal` starts one.
    """
    from shoal.cli.main import main

    out, err, code = io.StringIO(), io.StringIO(), None
    with (
        patch.object(sys, "argv", ["shoal", *arguments]),
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code
    assert code is None or isinstance(code, int), code
    return subprocess.CompletedProcess(arguments, code or 0, out.getvalue(), err.getvalue())


PATIENCE_SECONDS = 400
"""How long a test waits for what has to happen: so long that a busy machine decides no test."""


class ForkedShoal:
    """The command `shoal` in a process of its own, forked from one that has imported shoal: that takes tenths of a
    second, and a new one takes seconds. It has what tests use of `subprocess.Popen`."""

    def __init__(self, folder: Path, arguments: Sequence[str], out: Path | None = None):
        from pool import start_process

        self._out = out or folder / f"shoal-{uuid4().hex}.out"
        self._err = out or self._out.with_suffix(".err")
        with contextlib.chdir(folder):
            self._process = start_process(_run_shoal, arguments, out=self._out, err=self._err)
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float = PATIENCE_SECONDS) -> int | None:
        self._process.join(timeout)
        assert self.returncode is not None, "the process has not ended in time"
        return self.returncode

    def communicate(self, timeout: float = PATIENCE_SECONDS) -> tuple[str, str]:
        self.wait(timeout)
        return self._out.read_text(), self._err.read_text()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _run_shoal(arguments: Sequence[str]) -> None:
    from shoal.cli.main import main

    sys.argv = ["shoal", *arguments]
    main()


class ToyRun:
    """A folder with a user's recipe and config."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.output = folder / "out"
        self.config = folder / "run.yaml"
        (folder / "toy_recipe.py").write_text(USER_RECIPE)
        self.config.write_text(RUN.format(output=self.output))

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs the command `shoal` in this process."""
        return call_shoal(self.folder, *arguments)

    def shoal(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs the command `shoal` in a new process."""
        return subprocess.run(
            [sys.executable, "-m", "shoal", *arguments],
            capture_output=True,
            text=True,
            cwd=self.folder,
            **{"timeout": PATIENCE_SECONDS, **options},
        )

    def fork(self, *arguments: str) -> ForkedShoal:
        """Starts the command `shoal` in a process that has imported shoal already."""
        return ForkedShoal(self.folder, arguments)

    def train(self, *overrides: str) -> Any:
        """Trains in this process."""
        from shoal.config import load_run
        from shoal.training import train

        return train(load_run(self.config, overrides))

    def metrics(self, key: str = "train/loss", output: Path | None = None) -> dict[int, float]:
        lines = ((output or self.output) / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return {row["step"]: row[key] for row in rows if key in row}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyRun]:
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("toy_recipe", None)
    yield ToyRun(tmp_path)
    sys.modules.pop("toy_recipe", None)


@pytest.fixture
def change_recipe(toy: ToyRun) -> Callable[[str, str], None]:
    """Edits the user's recipe: old text → new text."""

    def change(old: str, new: str) -> None:
        path = toy.folder / "toy_recipe.py"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        sys.modules.pop("toy_recipe", None)

    return change


AT_GATE = """
import pathlib, time


def wait_at_gate():
    while pathlib.Path({gate!r}).exists():
        time.sleep(0.01)


"""


class Gate:
    """Holds a run from the checkpoint of a step on, so that a test has all the time it needs to interrupt it."""

    def __init__(self, toy: ToyRun):
        self._checkpoints = toy.output / "checkpoints"
        self._link = toy.folder / "gate"  # to the checkpoint; while that does not exist the gate is open
        recipe = toy.folder / "toy_recipe.py"
        waiting = recipe.read_text().replace('return {"x"', 'wait_at_gate(); return {"x"')
        recipe.write_text(AT_GATE.format(gate=str(self._link)) + waiting)

    def close_after(self, step: int) -> None:
        self.open()
        self._link.symlink_to(self._checkpoints / f"step_{step:08d}")

    def open(self) -> None:
        self._link.unlink(missing_ok=True)


@pytest.fixture
def gate(toy: ToyRun) -> Gate:
    return Gate(toy)


@pytest.fixture(scope="session")
def pool2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two gloo workers: `pool2.run(function, *args)` gives the results by rank (tests/pool.py)."""
    from pool import Pool

    with Pool(2, scratch=tmp_path_factory.getbasetemp()) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool4(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """As `pool2`, with four workers."""
    from pool import Pool

    with Pool(4, scratch=tmp_path_factory.getbasetemp()) as pool:
        yield pool
