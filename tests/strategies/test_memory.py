"""What sharding is for: a rank holds less, at the start and in every step."""

from __future__ import annotations

import json
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PATIENCE_SECONDS
from pool import start_process
from safetensors.torch import save_file
from torch import Tensor, nn

from shoal.config.schema import TrainingConfig
from shoal.launch.spawn import run_function
from shoal.recipes import Recipe
from shoal.strategies import DDPStrategy, FSDPStrategy
from shoal.training.optimizers import build_optimizer
from shoal.types import MicroBatch, Weights
from shoal.weights import build

MIB = 2**20
WIDTH, BLOCKS = 1024, 16
BLOCK_BYTES = 4 * 2 * WIDTH * WIDTH
MODEL_BYTES = BLOCKS * BLOCK_BYTES  # 128 MiB

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="only Linux tells how much a process has"
)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Large(Recipe):
    files: tuple[Path, ...] = ()

    def build_model(self) -> nn.Module:
        return nn.Sequential(*(Wide() for _ in range(BLOCKS)))

    def weights(self) -> Weights:
        return Weights("files", files=self.files) if self.files else Weights("init")

    def inputs(self, batch: Any) -> dict[str, Any]:
        return {"input": batch["x"]}

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return output.square().sum()


def own_bytes(field: str = "RssAnon") -> int:
    """Memory of the process that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) * 1024


@contextmanager
def peak() -> Iterator[list[int]]:
    """The most that the process grew by, looked at every millisecond."""
    before, result, done = own_bytes(), [0], threading.Event()

    def look() -> None:
        while not done.is_set():
            result[0] = max(result[0], own_bytes() - before)
            time.sleep(0.001)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield result
    finally:
        done.set()
        watcher.join()


def start(files: tuple[Path, ...]) -> tuple[int, float]:
    """How much a rank takes to start with its part of the model; and a number made of its weights."""
    recipe = Large()
    recipe.files = files
    with FSDPStrategy(device="cpu") as strategy:
        with peak() as grown:
            model, weights = build(recipe.build_model, recipe.weights(), seed=0)
            plan = recipe.parallel_plan(model)
            model, _ = strategy.prepare(model, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), plan, weights)
        total = sum(p.to_local().double().abs().sum() for p in model.parameters())  # type: ignore[operator]
        return grown[0], float(strategy.sum_over_data(torch.as_tensor(total)))


def start_two(files: tuple[Path, ...], results: Path) -> None:
    results.write_text(json.dumps(run_function(start, (files,), 2, "fork")))


@pytest.mark.parametrize("kind", [pytest.param("init", marks=pytest.mark.slow), "files"])
def test_a_rank_starts_with_its_shard_and_one_block(tmp_path: Path, kind: str) -> None:
    model, _ = build(Large().build_model, Weights("built"), seed=0)
    files: tuple[Path, ...] = ()
    if kind == "files":
        files = (tmp_path / "model.safetensors",)
        save_file(model.state_dict(), files[0])
        expected = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    del model
    results = tmp_path / "results.json"
    process = start_process(start_two, files, results)  # a new one: the workers of a pool reuse their memory
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == 0
    for grown, total in json.loads(results.read_text()):
        allowed = MODEL_BYTES / 2 + BLOCK_BYTES + 16 * MIB  # and what Python, gloo and a mesh need
        assert MODEL_BYTES / 4 <= grown <= allowed, f"{grown / MIB:.0f} MiB, allowed {allowed / MIB:.0f}"
        if kind == "files":
            assert total == pytest.approx(expected, rel=1e-9)


def train_under_a_cap(strategy_name: str, cap_bytes: int) -> str:
    """A few steps with no more than so much memory for this process beyond what it begins with."""
    recipe, training = Large(), TrainingConfig(max_steps=1)
    with (DDPStrategy if strategy_name == "ddp" else FSDPStrategy)(device="cpu") as strategy:
        began, limits = own_bytes("VmData"), resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (began + cap_bytes, limits[1]))
        try:
            model, weights = build(recipe.build_model, recipe.weights(), seed=0)
            model, optimizer = strategy.prepare(
                model, lambda m: build_optimizer(training, recipe.param_groups(m)), recipe.parallel_plan(model), weights
            )
            for step in range(2):
                batch = MicroBatch({"x": torch.randn(2, WIDTH)}, [0, 0], [0, 1])
                output = strategy.forward_backward(model, [batch], recipe, step)
                strategy.step(optimizer, 1.0)
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, limits)
        return f"trains in {(own_bytes('VmData') - began) / MIB:.0f} MiB, loss {output.loss.item():.4g}"


@pytest.mark.slow
def test_a_model_that_ddp_cannot_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, gradients and two moments are 512 MiB; half of that, and a block or two, fits where the whole does not.

    `-rP` shows both.
    """
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(MIB))  # glibc would keep freed blocks for itself
    cap = 420 * MIB
    with pytest.raises(RuntimeError, match="allocate memory") as error:
        run_function(train_under_a_cap, ("ddp", cap), 2, "spawn")
    print(f"ddp on 2 under {cap / MIB:.0f} MiB each: {str(error.value).splitlines()[-1]}")
    for result in run_function(train_under_a_cap, ("fsdp", cap), 2, "spawn"):
        assert result.startswith("trains")
    print(f"fsdp on 2 under {cap / MIB:.0f} MiB each: {result}")
