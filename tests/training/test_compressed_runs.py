"""Whole runs with compressed gradients, or with local_sgd: they resume to the bit, say what is in force, and refuse."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from conftest import ToyRun
from pool import Pool

from shoal.checkpoint import open_checkpoint
from shoal.config import load_run
from shoal.training import train

SETTINGS = {
    "fp16": ["distributed.compression.method=fp16", "distributed.compression.error_feedback=true"],
    "bf16": ["distributed.compression.method=bf16"],
    "int8": ["distributed.compression.method=int8"],
    "topk": ["distributed.compression={method: topk, ratio: 0.1, start_step: 2}"],
    "powersgd": ["distributed.compression={method: powersgd, rank: 1, start_step: 2, min_compression: 0}"],
    "local_sgd": ["distributed.local_sgd.sync_every=4"],
}
STEPS = ["training.max_steps=10", "checkpoint.every=3", "checkpoint.keep_last=9"]


def run_toy(folder: Path, overrides: list[str]) -> tuple[int, dict[str, torch.Tensor]]:
    """Trains the run in `folder`; returns its first step and the parameters that it ends with."""
    outcome = train(load_run(folder / "run.yaml", [*STEPS, "logging.console=off", *overrides]))
    return outcome.first_step, {name: p.detach().clone() for name, p in outcome.model.named_parameters()}


def tensors_at(output: Path, step: int) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(output / "checkpoints" / f"step_{step:08d}")
    return {name: tensor.read() for name, tensor in checkpoint.tensors.items()}


def go_back(output: Path, copy: Path, step: int) -> None:
    """Copies a run, and removes the checkpoints after a step, as if it had been killed."""
    shutil.copytree(output, copy)
    for folder in (copy / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step_")) > step:
            shutil.rmtree(folder)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("topk", "local_sgd"))) for name in SETTINGS]
)
def test_a_run_that_resumes_repeats_one_that_does_not(pool2: Pool, toy: ToyRun, name: str) -> None:
    """Step 6 is within a round of local_sgd, and so is the end."""
    ranks = pool2.run(run_toy, toy.folder, SETTINGS[name], init=False)
    copy = toy.folder / "copy"
    go_back(toy.output, copy, 6)
    again = pool2.run(run_toy, toy.folder, [*SETTINGS[name], f"experiment.output_dir={copy}"], init=False)
    assert [first for first, _ in again] == [6, 6]
    whole, resumed = tensors_at(toy.output, 10), tensors_at(copy, 10)
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
    if name != "bf16":  # which keeps nothing
        assert any(key.startswith("strategy/rank_00001/") for key in whole)
    for _, parameters in (*ranks, *again):  # the end is equal on all ranks, also within a round
        assert all(torch.equal(value, whole[f"model/{key}"]) for key, value in parameters.items())


@pytest.mark.slow
def test_state_matters_and_is_restored(pool2: Pool, toy: ToyRun) -> None:
    """Without its residuals a resumed run ends with other weights."""
    pool2.run(run_toy, toy.folder, SETTINGS["topk"], init=False)
    copy = toy.folder / "copy"
    go_back(toy.output, copy, 6)
    pool2.run(run_toy_without_state, toy.folder, [*SETTINGS["topk"], f"experiment.output_dir={copy}"], init=False)
    whole, resumed = tensors_at(toy.output, 10), tensors_at(copy, 10)
    assert not all(torch.equal(whole[key], resumed[key]) for key in whole)


def run_toy_without_state(folder: Path, overrides: list[str]) -> None:
    from unittest.mock import patch

    from shoal.parallel.compression.exchange import CompressedExchange

    with patch.object(CompressedExchange, "load_state", lambda self, stored: ""):
        run_toy(folder, overrides)


@pytest.mark.parametrize(
    ("now", "line"),
    [
        ("topk", "the state of gradient compression starts at zero: method was int8 in the checkpoint and is topk"),
        pytest.param(
            "local_sgd",
            "it was saved with another exchange, so all ranks begin a round of local_sgd",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_state_of_another_method_starts_at_zero_and_a_line_says_so(
    pool2: Pool, toy: ToyRun, now: str, line: str
) -> None:
    pool2.run(run_toy, toy.folder, [*SETTINGS["int8"], "training.max_steps=3"], init=False)
    pool2.run(run_toy, toy.folder, SETTINGS[now], init=False)
    log = (toy.output / "logs" / "rank_0.log").read_text()
    assert log.count(line) == 1, log


@pytest.mark.slow
def test_state_of_other_processes_starts_at_zero(toy: ToyRun, pool2: Pool, pool4: Pool) -> None:
    batch = ["training.global_batch_size=8", "training.batch_size=2"]
    pool4.run(run_toy, toy.folder, [*SETTINGS["int8"], "training.max_steps=3", *batch], init=False)
    pool2.run(run_toy, toy.folder, [*SETTINGS["int8"], *batch], init=False)
    log = (toy.output / "logs" / "rank_0.log").read_text()
    assert "starts at zero: mesh was dp_replicate 4 in the checkpoint and is dp_replicate 2" in log


def test_the_report_and_the_metrics_say_what_is_sent(pool2: Pool, toy: ToyRun) -> None:
    pool2.run(run_toy, toy.folder, [*SETTINGS["topk"], "model.hidden=64"], init=False)
    (row,) = [line for line in (toy.output / "report.txt").read_text().splitlines() if line.startswith("exchange ")]
    assert "topk 0.1 of the elements, error feedback, from step 2 on, 3 of 4 parameters" in row
    assert "not the same training as on one device" in row
    sent, plain = toy.metrics("train/wire_bytes"), toy.metrics("train/wire_bytes_uncompressed")
    numel, count = 3 * 64 + 1, 3 * 6
    assert set(plain.values()) == {4 * numel}
    assert sent[1] == 4 * numel  # compression has not begun
    assert sent[10] == 8 * count + 4 + 4  # values and places, the bias that is sent whole, and whether all is finite
    assert all(seconds >= 0 for seconds in toy.metrics("train/compression_seconds").values())
    assert toy.metrics("train/exchange_seconds")[10] > 0


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["distributed.compression.method=topk", "distributed.compression.ratio=0"],
            "it is the fraction of elements that is sent; use a number above 0 and at most 1",
        ),
        (["distributed.compression={method: topk, ratio: 1.5}"], "use a number above 0 and at most 1"),
        (["distributed.compression={method: powersgd, rank: 0}"], "a product of thin matrices has at least rank 1"),
        (["distributed.compression.rank=3"], "compression has rank and no method"),
        (["distributed.compression=zip"], "distributed.compression"),
        (
            ["distributed.compression=topk", "distributed.strategy=fsdp"],
            "distributed.compression = topk: fsdp FULL_SHARD",
        ),
        (["distributed.compression=int8", "distributed.strategy=deepspeed"], "communication_data_type"),
        (
            ["distributed.compression=int8", "distributed.local_sgd.sync_every=4"],
            "distributed.compression = int8: distributed.local_sgd exchanges weights",
        ),
        (["distributed.local_sgd.sync_every=4", "distributed.strategy=fsdp"], "distributed.local_sgd.sync_every = 4"),
        (["distributed.local_sgd.sync_every=4", "callbacks=[ema]"], "the callback ema would average"),
        (["distributed.local_sgd.sync_every=0"], "distributed.local_sgd.sync_every"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(toy: ToyRun, overrides: list[str], line: str) -> None:
    result = toy.call("train", str(toy.config), "launch.procs_per_node=2", *overrides)
    assert result.returncode == 2
    assert line in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_one_process_has_nothing_to_compress(toy: ToyRun) -> None:
    toy.train("distributed.compression=topk", "training.max_steps=1")
    report = (toy.output / "report.txt").read_text()
    assert "not in force  distributed.compression: there is one replica" in report


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_killed_runs_end_as_if_nothing_had_happened(toy: ToyRun, name: str) -> None:
    overrides = [*SETTINGS[name], *STEPS[:3], "launch.procs_per_node=2", "training.device=cpu"]
    result = toy.shoal("chaos", str(toy.config), "--kills", "2", *overrides)
    assert result.returncode == 0, result.stdout + result.stderr
