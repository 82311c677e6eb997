"""Runs with `training.kernels`: what is in force is said, layouts compute the same, and runs resume and move."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ToyRun
from pool import Pool
from safetensors.torch import load_file
from verify.runs import bdh, failed, runner_on

from shoal.config import Run, check_run
from shoal.errors import UserError
from shoal.models.bdh import fused
from shoal.models.bdh.fused import FusedHeads
from shoal.models.bdh.model import Heads
from shoal.training import train
from shoal.verify import prove


def in_folder(run: Run, folder: Path, max_steps: int = 3, **training: Any) -> Run:
    tree = run.tree()
    tree["experiment"]["output_dir"] = str(folder)
    tree["logging"] |= {"console": "off", "tensorboard": False}
    tree["training"] |= {"max_steps": max_steps, "lr_scheduler": "constant", **training}
    return check_run(tree, {f"training.{key}": "command line" for key in training})


def with_dropout(tmp_path: Path) -> Run:
    run = bdh(tmp_path, global_batch_size=4, batch_size=2)
    assert run.recipe_config.model.dropout == 0.1
    return run


def tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    checkpoint = folder / "checkpoints" / f"step_{step:08d}"
    return {
        f"{file}/{name}": tensor
        for file in ("model", "optimizer")
        for name, tensor in load_file(checkpoint / f"{file}.safetensors").items()
    }


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize(
    ("kernels", "words", "heads"),
    [
        ("auto", "plain PyTorch, because there is no GPU  (command line)", Heads),
        ("plain", "plain PyTorch  (command line)", Heads),
        (
            "fused",
            "fused in 2 modules (levels.0.heads, …), in PyTorch: Triton needs a CUDA device, and this is cpu"
            "  (command line)",
            FusedHeads,
        ),
    ],
)
def test_the_report_says_which_is_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str, words: str, heads: type[Heads]
) -> None:
    called = set()

    def watch(kind: type[Heads]) -> None:
        forward = kind.forward

        def watched(self: Heads, *args: Any, **kwargs: Any) -> torch.Tensor:
            if torch.is_grad_enabled() and not args[0].is_meta:  # not generation, and not the count of FLOPs
                called.add(kind)
            return forward(self, *args, **kwargs)

        monkeypatch.setattr(kind, "forward", watched)

    watch(Heads)
    watch(FusedHeads)
    train(in_folder(with_dropout(tmp_path), tmp_path / "out", kernels=kernels))
    rows = [line for line in (tmp_path / "out" / "report.txt").read_text().splitlines() if line.startswith("kernels ")]
    assert [row.removeprefix("kernels").strip() for row in rows] == [words]
    assert called == {heads}


def test_a_model_without_a_fused_path_is_refused_and_has_no_row(toy: ToyRun) -> None:
    with pytest.raises(
        UserError, match=r"training.kernels = fused: Sequential has nothing that can be fused, .*; use auto"
    ) as error:
        toy.train("training.kernels=fused")
    assert "\n" not in str(error.value)
    toy.train("training.kernels=plain")
    assert "\nkernels" not in (toy.output / "report.txt").read_text()


def test_runs_repeat_resume_and_move(tmp_path: Path) -> None:
    """With dropout: to the bit with the same kernels, and within rounding from one to the other."""
    run, weights = with_dropout(tmp_path), {}
    for name, kernels in (("first", "fused"), ("again", "fused"), ("resumed", "fused"), ("moved", "plain")):
        train(in_folder(run, tmp_path / name, 4 if name in ("first", "again") else 2, kernels="fused"))
        if name in ("resumed", "moved"):
            train(in_folder(run, tmp_path / name, 4, kernels=kernels))
        weights[name] = tensors(tmp_path / name, 4)
    assert differing(weights["again"], weights["first"]) == []
    assert differing(weights["resumed"], weights["first"]) == []
    assert differing(weights["moved"], weights["first"])  # the other kernels did compute
    for name, tensor in weights["first"].items():
        if name.startswith("model/"):
            torch.testing.assert_close(weights["moved"][name], tensor, rtol=1e-4, atol=1e-6)
    shutil.rmtree(tmp_path / "moved")
    train(in_folder(run, tmp_path / "moved", 2, kernels="plain"))
    train(in_folder(run, tmp_path / "moved", 4, kernels="fused"))
    for name, tensor in tensors(tmp_path / "moved", 4).items():
        if name.startswith("model/"):
            torch.testing.assert_close(tensor, weights["first"][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "layouts",
    [
        {"tp": 0.45},
        pytest.param({"single": 0.95, "ddp": 0.60, "fsdp": 0.60}, marks=pytest.mark.slow),
        pytest.param({"zero_1": 0.60, "zero_3": 0.60}, marks=pytest.mark.slow),
    ],
)
def test_layouts_with_fused_kernels_equal_one_device_with_plain_ones(
    tmp_path: Path, pool2: Pool, layouts: dict[str, float]
) -> None:
    if "zero_1" in layouts:
        pytest.importorskip("deepspeed")
    # Numbers are FLOPs as a fraction of the plain reference, which show that every layout computes with fused kernels.
    run = bdh(tmp_path, global_batch_size=11, gradient_accumulation=3, kernels="fused")
    for verdict in prove(run, 2, [*layouts], runner=runner_on(pool2, adamw=False)):
        assert failed(verdict) == {}
        flops = next(check.detail for check in verdict.checks if check.name == "matmul FLOPs")
        assert flops.startswith(f"{layouts[verdict.layout]:.2f} of one device"), (verdict.layout, flops)


def test_a_wrong_gradient_is_found(tmp_path: Path, pool2: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference of a proof has plain kernels: otherwise both sides would be wrong alike."""
    monkeypatch.setattr(fused, "_through_relu", lambda gradient, output: gradient)
    run = bdh(tmp_path, global_batch_size=4, kernels="fused")
    (verdict,) = prove(run, 2, ["single"], runner=runner_on(pool2, adamw=False))
    assert "gradients" in failed(verdict)


@pytest.mark.slow
def test_compiled_and_recomputed(tmp_path: Path) -> None:
    options = {"compile": True, "activation_checkpointing": "full", "mixed_precision": "bf16", "kernels": "fused"}
    train(in_folder(with_dropout(tmp_path), tmp_path / "out", **options))
    report = (tmp_path / "out" / "report.txt").read_text()
    assert "fused in 2 modules" in report
    assert "2 modules, 1 graph, no breaks" in report
