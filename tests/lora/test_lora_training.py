"""Runs with adapters: recomputation, chunked loss, compilation, resuming, the best checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import PATIENCE_SECONDS
from pool import Pool
from safetensors.torch import load_file
from torch import Tensor

from lora.test_lora_run import LORA, save_base, tree_for
from shoal.config import check_run
from shoal.config.layout import check_layout
from shoal.errors import UserError
from shoal.training import train

transformers = pytest.importorskip("transformers")

DORA = {**LORA, "target_modules": "all-linear", "use_dora": True, "dropout": 0.1}
VARIED = {"initializer_range": 0.3}
"""For a frozen base that was never trained: with the usual small weights its head could not tell tokens apart."""
CONSTANT = {"lr_scheduler": "constant", "warmup_steps": 0}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora_training")


@pytest.fixture(scope="module")
def base(root: Path) -> Path:
    return save_base(root / "base")


def finish(tree: dict[str, Any]) -> None:
    train(check_run(tree))


def weights(folder: Path, step: int) -> dict[str, Tensor]:
    files = sorted((folder / "checkpoints" / f"step_{step:08}").glob("model*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("mode", ["full", pytest.param("selective", marks=pytest.mark.slow)])
def test_recomputed_blocks_train_all_adapters(root: Path, base: Path, mode: str) -> None:
    """No input of the first block requires a gradient; every adapter is trained all the same, as without."""
    if not (root / "kept").exists():
        train(check_run(tree_for(root, base, {**DORA, "r": 2}, "kept", loss_chunks=3)))
    options = {"activation_checkpointing": mode, "loss_chunks": 3}
    train(check_run(tree_for(root, base, {**DORA, "r": 2}, mode, **options)))
    kept, recomputed = weights(root / "kept", 4), weights(root / mode, 4)
    assert len(recomputed) == 14 * 3
    for name, tensor in recomputed.items():
        torch.testing.assert_close(tensor, kept[name], rtol=1e-4, atol=1e-5)
        assert tensor.any(), name
    assert f"recomputed   2 modules, {mode}" in (root / mode / "report.txt").read_text().replace("    ", "   ")


@pytest.mark.parametrize("dora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_fused_dropout_is_recomputed_as_it_was(root: Path, base: Path, dora: bool) -> None:
    found = []
    for mode in ("none", "full"):
        name, lora = f"fused_{mode}_{dora}", {**DORA, "r": 2, "use_dora": dora}
        train(check_run(tree_for(root, base, lora, name, activation_checkpointing=mode, kernels="fused")))
        found.append(weights(root / name, 4))
    assert len(found[0]) == 14 * (3 if dora else 2)
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], rtol=1e-4, atol=1e-5)
    report = (root / f"fused_full_{dora}" / "report.txt").read_text()
    assert "fused in 14 modules" in report
    assert "in PyTorch: Triton needs a CUDA device, and this is cpu" in report


def test_the_report_of_a_stage_speaks_of_its_own_adapters(root: Path, base: Path, pool2: Pool) -> None:
    """Names are collected before the model is split; those of the first stage do not exist on the second."""
    lora = {**LORA, "target_modules": "all-linear", "dropout": 0.1}
    tree = tree_for(root, base, lora, "stages", kernels="fused", gradient_accumulation=2, global_batch_size=4)
    del tree["training"]["batch_size"]
    tree["distributed"] = {"strategy": "mesh", "mesh": {"pp": 2}}
    pool2.run(finish, tree, init=False)
    assert "fused in 7 modules" in (root / "stages" / "report.txt").read_text()


def resumed(tree: dict[str, Any], out: str) -> None:
    """Trains one step, and in a second call three more."""
    tree = {**tree, "experiment": {"output_dir": out}, "checkpoint": {"every": 1}}
    for steps in (1, 4):
        finish({**tree, "training": {**tree["training"], "max_steps": steps}})


@pytest.mark.parametrize("strategy", ["single", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_run_resumes_to_the_bit(root: Path, base: Path, pool2: Pool, strategy: str) -> None:
    tree = tree_for(root, base, DORA, f"{strategy}_whole", eval_batches=1, **CONSTANT)
    tree["distributed"] = {"strategy": strategy}
    if strategy == "single":
        finish(tree)
        resumed(tree, str(root / "single_parts"))
    else:
        pool2.run(finish, tree, init=False)
        pool2.run(resumed, tree, str(root / "fsdp_parts"), init=False)
    whole, parts = (weights(root / f"{strategy}_{kind}", 4) for kind in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.slow
def test_the_best_checkpoints_of_a_run_are_kept(root: Path, base: Path) -> None:
    tree = tree_for(root, base, LORA, "best", max_steps=6, eval_steps=1, eval_batches=1)
    tree["dataset"]["eval_fraction"] = 0.2
    tree["checkpoint"] = {"every": 1, "keep_last": 1, "keep_best": 1, "metric": "eval/loss"}
    train(check_run(tree))
    steps = [folder.name for folder in sorted((root / "best" / "checkpoints").iterdir())]
    assert len(steps) <= 2
    rows = [json.loads(line) for line in (root / "best" / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["eval/loss"] for row in rows if "eval/loss" in row}
    assert f"step_{min(losses, key=losses.__getitem__):08}" in steps


def test_fp8_is_refused(root: Path, base: Path) -> None:
    run = check_run(tree_for(root, base, LORA, "fp8", mixed_precision="fp8"))
    with pytest.raises(UserError, match=r"mixed_precision = fp8 replaces the layers that lora: adapts; use bf16"):
        check_layout(run.config, run.make_recipe(), 1, 1)


@pytest.mark.parametrize(("key", "value"), [("modules_to_save", ["lm_head"]), ("bias", "all")])
def test_trained_parameters_beside_a_base_in_half_precision_need_autocast(
    root: Path, base: Path, key: str, value: Any
) -> None:
    for precision in ("fp32", "bf16"):
        tree = tree_for(root, base, {**LORA, key: value}, "half", mixed_precision=precision)
        tree["model"]["dtype"] = "bf16"
        run = check_run(tree)
        if precision == "bf16":
            check_layout(run.config, run.make_recipe(), 1, 1)
            continue
        with pytest.raises(UserError, match=rf"model.dtype = bf16: lora.{key}.* set training.mixed_precision: bf16"):
            check_layout(run.config, run.make_recipe(), 1, 1)


def test_compiled_blocks_are_refused_with_adapted_parameters(root: Path, base: Path) -> None:
    run = check_run(tree_for(root, base, {**LORA, "target_parameters": ["k_proj.weight"]}, "compiled", compile=True))
    with pytest.raises(UserError, match=r"training.compile = true: compiled blocks would keep .*target_parameters"):
        check_layout(run.config, run.make_recipe(), 1, 1)


def test_targets_are_refused_before_the_text_is_prepared(root: Path, base: Path, tmp_path: Path) -> None:
    tree = tree_for(root, base, {"target_modules": ["qproj"]}, "refused")
    tree["dataset"]["cache_dir"] = str(tmp_path / "cache")
    with pytest.raises(UserError, match=r"no module of the model matches; did you mean q_proj\?"):
        train(check_run(tree))
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "full"])
def test_compiled_blocks_have_no_graph_breaks(root: Path, base: Path, mode: str) -> None:
    """The first block has a graph of its own: its input requires no gradient, since the embedding is frozen."""
    options = {"activation_checkpointing": mode, "compile": True, "max_steps": 2}
    for name, lora in (("lora", {**LORA, "target_modules": "all-linear"}), ("dora", DORA)):
        train(check_run(tree_for(root, base, lora, f"compiled_{name}_{mode}", **options)))
        report = (root / f"compiled_{name}_{mode}" / "report.txt").read_text()
        assert "2 modules, 2 graphs, no breaks" in report


@pytest.mark.slow
def test_a_killed_run_ends_as_an_undisturbed_one(root: Path, base: Path) -> None:
    tree = tree_for(root, base, DORA, "chaos", max_steps=30, **CONSTANT)
    tree |= {"launch": {"procs_per_node": 2}, "distributed": {"strategy": "fsdp"}, "checkpoint": {"every": 5}}
    (root / "chaos.yaml").write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-m", "shoal", "chaos", "chaos.yaml", "--kills", "1"]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "checkpoint and logs agree bit for bit" in result.stdout


def memorise(root: Path, base: Path, lora: dict[str, Any], samples: int, steps: int) -> list[float]:
    """Trains on a text of few windows, and returns the losses."""
    out = f"memorised_{samples}_{'dora' if lora.get('use_dora') else 'lora'}"
    text = root / f"{out}.txt"
    generator = torch.Generator().manual_seed(0)
    text.write_bytes(bytes((torch.randint(26, (samples * 16 + 1,), generator=generator) + 97).tolist()))
    tree = tree_for(root, base, lora, out, max_steps=steps, batch_size=16, learning_rate=1e-2, weight_decay=0.0)
    tree["dataset"]["files"] = str(text)
    train(check_run(tree))
    rows = [json.loads(line) for line in (root / out / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


def test_adapters_memorise_a_few_samples(root: Path) -> None:
    base = save_base(root / "varied", **VARIED)
    losses = memorise(root, base, {"r": 16, "alpha": 32, "target_modules": "all-linear"}, samples=8, steps=40)
    assert losses[0] > 3
    assert losses[-1] < 1


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True])
def test_adapters_memorise_64_samples(root: Path, dora: bool) -> None:
    base = save_base(root / f"wide_{dora}", **VARIED, hidden_size=64, intermediate_size=128)
    lora = {"r": 32, "alpha": 64, "target_modules": "all-linear", "use_dora": dora}
    losses = memorise(root, base, lora, samples=64, steps=400)
    assert losses[-1] < 0.1
