"""A checkpoint written on any number of ranks opens on any other, with optimizer and data position."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ToyRun
from pool import Pool

from shoal.checkpoint import open_checkpoint, write_checkpoint
from shoal.config import load_run
from shoal.processes.desync import Desync
from shoal.strategies import from_config
from shoal.training import train
from shoal.training.optimizers import build_optimizer
from shoal.weights import build

FSDP = ["distributed.strategy=fsdp"]
HYBRID = [*FSDP, "distributed.fsdp.sharding_strategy=HYBRID_SHARD", "distributed.mesh.dp_replicate=2"]
MESH = ["distributed.strategy=mesh"]
ZERO = ["distributed.strategy=deepspeed", "distributed.deepspeed.stage3_param_persistence_threshold=0"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "single": (1, []),
    "ddp2": (2, []),
    "ddp4": (4, []),
    "fsdp1": (1, FSDP),
    "fsdp2": (2, FSDP),
    "fsdp4": (4, FSDP),
    "grad_op2": (2, [*FSDP, "distributed.fsdp.sharding_strategy=SHARD_GRAD_OP"]),
    "no_shard2": (2, [*FSDP, "distributed.fsdp.sharding_strategy=NO_SHARD"]),
    "hybrid4": (4, HYBRID),
    "tp2": (2, [*MESH, "distributed.mesh.tp=2"]),
    "pp2": (2, [*MESH, "distributed.mesh.pp=2", "distributed.mesh.dp_shard=1"]),
    "pp2_fsdp2": (4, [*MESH, "distributed.mesh.pp=2", "distributed.mesh.dp_shard=2"]),
    "tp2_fsdp2": (4, [*MESH, "distributed.mesh.tp=2", "distributed.mesh.dp_shard=2"]),
    "pp2_tp2": (4, [*MESH, "distributed.mesh.pp=2", "distributed.mesh.tp=2", "distributed.mesh.dp_shard=1"]),
    "zero1_on2": (2, [*ZERO, "distributed.zero_stage=1"]),
    "zero2_on2": (2, [*ZERO, "distributed.zero_stage=2", "distributed.offload=optimizer"]),
    "zero3_on2": (2, [*ZERO, "distributed.zero_stage=3"]),
    "zero3_on1": (1, [*ZERO, "distributed.zero_stage=3", "distributed.offload=all"]),
}
PAIRS = [(a, b) for a in LAYOUTS for b in LAYOUTS if a != b]
# By default some pairs, of sizes and kinds that are far apart; `make test-slow` has all of them.
CHOSEN = [
    ("single", "tp2"),
    ("ddp2", "pp2"),
    ("fsdp2", "pp2_tp2"),
    ("no_shard2", "zero3_on2"),
    ("hybrid4", "zero3_on1"),
]


def train_here(config: Path, overrides: list[str]) -> int:
    return train(load_run(config, overrides)).step


def skip_without_package(layout: str) -> None:
    if layout.startswith("zero") and find_spec("deepspeed") is None:
        pytest.skip("the package deepspeed is not installed")


def train_on(layout: str, toy: ToyRun, pools: dict[int, Pool], *overrides: str) -> None:
    keys = ["training.global_batch_size=12", "training.batch_size=2", "model.dropout=0.0", *overrides]
    keys += ["recipe=toy_recipe:Divisible"]
    procs, layout_keys = LAYOUTS[layout]
    skip_without_package(layout)
    keys += layout_keys
    if procs == 1:
        train_here(toy.config, keys)
    else:
        pools[procs].run(train_here, toy.config, keys, init=False)


def state(output: Path, step: int = 10) -> dict[str, Any]:
    read = open_checkpoint(output / "checkpoints" / f"step_{step:08d}").read()
    moments = {f"{name}/{slot}": t for name, slots in read.optimizer.items() for slot, t in slots.items()}
    return {name: tensor.numpy() for name, tensor in {**read.model, **moments}.items()}


@pytest.mark.parametrize(
    ("first", "second"),
    [*CHOSEN, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS if pair not in CHOSEN)],
)
def test_layouts_continue_each_other(toy: ToyRun, pool2: Pool, pool4: Pool, first: str, second: str) -> None:
    pools = {2: pool2, 4: pool4}
    # A constant rate: other schedules depend on max_steps, which is not the same in both halves.
    train_on(first, toy, pools, "training.lr_scheduler=constant", "training.max_steps=4")
    train_on(second, toy, pools, "training.lr_scheduler=constant")
    train_on("single", toy, pools, "training.lr_scheduler=constant", f"experiment.output_dir={toy.folder}/constant")
    assert toy.metrics().keys() == set(range(1, 11))
    expected = toy.metrics(output=toy.folder / "constant")
    assert toy.metrics() == pytest.approx(expected, rel=1e-4)
    whole = state(toy.folder / "constant")
    for name, tensor in state(toy.output).items():
        assert np.allclose(tensor, whole[name], rtol=1e-4, atol=1e-6), name
    progress = [json.loads((path / "trainer.json").read_text()) for path in (toy.output / "checkpoints").glob("step_*")]
    assert {p["step"]: p["samples"] for p in progress}[10] == 120


@pytest.mark.parametrize(
    "layout",
    [
        "fsdp2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("pp2_tp2", "hybrid4", "tp2_fsdp2", "pp2_fsdp2")),
    ],
)
def test_a_layout_goes_on_as_if_it_had_not_stopped(toy: ToyRun, pool2: Pool, pool4: Pool, layout: str) -> None:
    pools, keys = {2: pool2, 4: pool4}, ["training.lr_scheduler=constant"]
    train_on(layout, toy, pools, *keys, "training.max_steps=4")
    train_on(layout, toy, pools, *keys)
    train_on(layout, toy, pools, *keys, f"experiment.output_dir={toy.folder}/undisturbed")
    folders = (toy.output, toy.folder / "undisturbed")
    interrupted, undisturbed = (open_checkpoint(f / "checkpoints" / "step_00000010").read() for f in folders)
    assert bits(interrupted) == bits(undisturbed)
    assert toy.metrics() == toy.metrics(output=toy.folder / "undisturbed")


@pytest.mark.parametrize("layout", ["single", "ddp2", pytest.param("hybrid4", marks=pytest.mark.slow)])
def test_saving_in_the_background_saves_the_same(toy: ToyRun, pool2: Pool, pool4: Pool, layout: str) -> None:
    """Every step, so that each save has the one before to wait for."""
    pools, folders = {2: pool2, 4: pool4}, [toy.folder / "now", toy.folder / "meanwhile"]
    for folder, background in zip(folders, ("false", "true"), strict=True):
        keys = [f"checkpoint.async_save={background}", "checkpoint.every=1", f"experiment.output_dir={folder}"]
        train_on(layout, toy, pools, *keys)
    assert "in the background" in (folders[1] / "report.txt").read_text()
    for step in (8, 9, 10):
        now, meanwhile = (open_checkpoint(f / "checkpoints" / f"step_{step:08d}").read() for f in folders)
        assert bits(now) == bits(meanwhile)
    assert len(list((folders[1] / "checkpoints").iterdir())) == 3


def read_and_write(config: Path, overrides: list[str], source: Path, target: Path) -> None:
    run = load_run(config, ["recipe=toy_recipe:Divisible", "model.dropout=0.0", *overrides])
    strategy, recipe = from_config(run.config), run.recipe_type(run.recipe_config)
    with strategy:
        model, _ = build(recipe.build_model, recipe.weights(), seed=7)
        model, optimizer = strategy.prepare(
            model, lambda m: build_optimizer(run.config.training, recipe.param_groups(m)), recipe.parallel_plan(model)
        )
        strategy.load_state(model, optimizer, open_checkpoint(source).checked_state(strategy.held()))
        write_checkpoint(target, strategy.state(model, optimizer), {"step": 4}, {})


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "single"])
def test_every_layout_reads_and_writes_the_same_bits(toy: ToyRun, pool2: Pool, pool4: Pool, layout: str) -> None:
    train_on("single", toy, {}, "training.max_steps=4")
    source, target = toy.output / "checkpoints" / "step_00000004", toy.folder / "again"
    procs, keys = LAYOUTS[layout]
    skip_without_package(layout)
    arguments = (toy.config, keys, source, target)
    if procs == 1:
        read_and_write(*arguments)
    else:
        {2: pool2, 4: pool4}[procs].run(read_and_write, *arguments, init=False)
    tensors = open_checkpoint(target).manifest["tensors"]
    files = {piece["file"] for about in tensors.values() for piece in about["pieces"]}
    empty = 1 if layout == "pp2_fsdp2" else 0  # the last layer has one row for two shards
    assert len([file for file in files if file.startswith("model")]) == procs - empty  # every rank writes a part
    stored = sum(piece_elements(piece) for about in tensors.values() for piece in about["pieces"])
    assert stored == sum(piece_elements(about) for about in tensors.values())  # and replicas once
    expected, got = (bits(open_checkpoint(folder).read()) for folder in (source, target))
    assert got == expected


def piece_elements(about: dict[str, Any]) -> int:
    return int(np.prod(about["shape"]))


def bits(read: Any) -> dict[str, bytes]:
    moments = {f"{name}/{slot}": t for name, slots in read.optimizer.items() for slot, t in slots.items()}
    return {name: tensor.numpy().tobytes() for name, tensor in {**read.model, **moments}.items()}


def test_the_global_batch_stays_when_the_ranks_change(toy: ToyRun, pool2: Pool, pool4: Pool) -> None:
    keys = ["training.batch_size=3", "training.gradient_accumulation=2", "model.dropout=0.0"]  # 12 on two ranks
    pool2.run(train_here, toy.config, [*keys, "training.max_steps=4"], init=False)
    pool4.run(train_here, toy.config, keys, init=False)
    manifest = open_checkpoint(toy.output / "checkpoints" / "step_00000010").manifest
    assert manifest["batches"] == [[0, 12]]
    assert manifest["layout"]["world_size"] == 4
    samples = json.loads((toy.output / "checkpoints" / "step_00000010" / "trainer.json").read_text())["samples"]
    assert samples == 120


def drift(config: Path, overrides: list[str]) -> str:
    """Trains with one replica nudged between two steps."""
    import torch

    from shoal.training.trainer import RecipeBody

    take_step = RecipeBody.take_step

    def nudged(self: RecipeBody, micro_batches: Any, step: int) -> Any:
        taken = take_step(self, micro_batches, step)
        if step == 2 and self.strategy.rank == 1:
            with torch.no_grad():
                next(self.model.parameters()).add_(1e-3)
        return taken

    RecipeBody.take_step = nudged  # type: ignore[method-assign]
    try:
        train(load_run(config, overrides))
    except Desync as alarm:
        return str(alarm)
    finally:
        RecipeBody.take_step = take_step  # type: ignore[method-assign]
    return ""


def test_the_alarm_stops_a_run_that_drifts(toy: ToyRun, pool2: Pool) -> None:
    keys = ["training.global_batch_size=12", "training.batch_size=2", "distributed.desync_steps=2"]
    result = pool2.run(drift, toy.config, keys, init=False)
    assert all("0.weight" in text and "rank 1" in text for text in result)
