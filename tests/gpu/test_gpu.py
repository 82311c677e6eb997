"""What only a GPU can show. `make test-gpu` runs it and writes docs/gpu.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ToyRun

import shoal
from shoal.config import check_run, load_run
from shoal.launch.functions import run_function
from shoal.training import train
from shoal.training.trainer import Trainer
from shoal.verify import prove

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")]

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"


@pytest.fixture(scope="module")
def note() -> Iterator[Callable[[str, str], None]]:
    """Collects rows of the result table, which is written when all tests have run."""
    rows: list[tuple[str, str]] = []
    yield lambda what, result: rows.append((what, result))
    device, today = torch.cuda.get_device_name(), date.today().isoformat()
    versions = f"torch {torch.__version__}, shoal {shoal.__version__}"
    head = f"# On a GPU\n\nWritten by `make test-gpu` on {today}: {device}, {versions}.\n"
    table = "".join(f"| {what} | {result} |\n" for what, result in rows)
    PAGE.write_text(f"{head}\n| what | result |\n| --- | --- |\n{table}")


def bdh(tmp_path: Path, **training: Any) -> dict[str, Any]:
    (tmp_path / "text.txt").write_text("".join(f"{i} squared is {i * i}\n" for i in range(4000)))
    return {
        "recipe": "bdh",
        "experiment": {"output_dir": str(tmp_path / "out"), "deterministic": training.pop("deterministic", False)},
        "model": {"n_layer": 3, "n_embd": 64, "n_head": 4, "mlp_internal_dim_multiplier": 16, "dropout": 0.0},
        "dataset": {"name": "text", "files": str(tmp_path / "text.txt"), "seq_length": 128, "cache_dir": str(tmp_path)},
        "training": {"max_steps": 30, "batch_size": 16, "learning_rate": 3e-3, "device": "cuda", **training},
        "logging": {"every": 10, "console": "off", "tensorboard": False},
        "checkpoint": {"every": 10},
    }


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_precisions(tmp_path: Path, note: Callable[[str, str], None], precision: str, compiled: bool) -> None:
    outcome = train(check_run(bdh(tmp_path, mixed_precision=precision, compile=compiled)))
    assert outcome.metrics["train/loss"] < 3.0  # from 5.6
    assert outcome.metrics["train/skipped_steps"] <= (3 if precision == "fp16" else 0)
    name = f"BDH, {precision}{', compiled' if compiled else ''}, 30 steps"
    note(name, f"loss 5.6 → {outcome.metrics['train/loss']:.3f}")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_two_ranks_on_one_gpu_equal_one(tmp_path: Path, note: Callable[[str, str], None], precision: str) -> None:
    tree = bdh(tmp_path, mixed_precision=precision, gradient_accumulation=2)
    tree["training"] |= {"batch_size": None, "global_batch_size": 22}
    tree["distributed"] = {"backend": "gloo"}
    verdicts = prove(check_run(tree), procs=2)
    for verdict in verdicts:
        failed = {check.name: check.detail for check in verdict.checks if not check.passed}
        assert failed == {}
        gradients = {check.name: check.detail for check in verdict.checks}["gradients"]
        layout = f"{verdict.layout} on {verdict.procs}, {precision}, over gloo"
        note(f"`shoal verify`, {layout}", f"same; gradients {gradients}")


def test_a_resumed_run_repeats_to_the_bit(tmp_path: Path, note: Callable[[str, str], None]) -> None:
    tree = bdh(tmp_path, deterministic=True, mixed_precision="bf16")
    train(check_run(tree))
    out = Path(tree["experiment"]["output_dir"])
    whole = json.loads((out / "checkpoints" / "step_00000030" / "manifest.json").read_text())["tensors"]
    for step in (20, 30):
        (out / "checkpoints" / f"step_{step:08d}").rename(tmp_path / f"gone_{step}")
    train(check_run(tree))
    again = json.loads((out / "checkpoints" / "step_00000030" / "manifest.json").read_text())["tensors"]
    digests = [{name: about["pieces"][0]["sha256"] for name, about in part.items()} for part in (whole, again)]
    assert digests[0] == digests[1]
    note("deterministic bf16, resumed at step 10 of 30", f"bit-equal in {len(digests[0])} tensors")


def test_no_step_waits_for_the_device(
    toy: ToyRun, note: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two lines of the log nothing may synchronise: torch raises if something does."""
    take_step = Trainer.take_step

    def watched(self: Trainer, micro_batches: Any) -> None:
        torch.cuda.set_sync_debug_mode("error" if self.step > self.first_step else "default")
        try:
            take_step(self, micro_batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Trainer, "take_step", watched)
    for precision in ("fp32", "bf16", "fp16"):
        toy.train(f"training.mixed_precision={precision}", f"experiment.output_dir={toy.folder}/{precision}")
    note("host synchronisations in a step, fp32, bf16, fp16", "none (torch.cuda.set_sync_debug_mode)")


def test_the_published_bdh_is_quick(tmp_path: Path, note: Callable[[str, str], None]) -> None:
    # In a process of its own: the shapes of the other tests would make torch.compile go for dynamic ones.
    (metrics,) = run_function(_train_published_bdh, (str(tmp_path),), 1, "spawn")
    assert metrics["train/mfu"] > 0
    speed = f"{metrics['train/tokens_per_second']:,.0f} tokens/s, MFU {metrics['train/mfu']:.1%}"
    note("published BDH, 32 × 512 tokens, bf16, compiled", f"{speed}, {metrics['train/memory_gib']:.1f} GiB")


def _train_published_bdh(folder: str) -> dict[str, float]:
    config = Path(__file__).parents[2] / "configs" / "bdh_stdlib.yaml"
    keys = ["training.max_steps=150", "training.eval_steps=null", "training.eval_batches=1"]
    keys += ["logging.every=50", "logging.console=off", f"experiment.output_dir={folder}/out"]
    return train(load_run(config, keys)).metrics


def _train_bdh(folder: str) -> None:
    tree = bdh(Path(folder), mixed_precision="bf16")
    tree["distributed"] = {"backend": "gloo"}
    train(check_run(tree))


def test_ddp_trains_on_a_shared_gpu(tmp_path: Path, note: Callable[[str, str], None]) -> None:
    run_function(_train_bdh, (str(tmp_path),), 2, "spawn")
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert losses[-1] < 3.0
    note("DDP, two ranks on one GPU over gloo, bf16, 30 steps", f"loss 5.6 → {losses[-1]:.3f}")
