"""Folders that DeepSpeed's own save_checkpoint wrote become checkpoints of ours, when they are named as trusted."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from strategies.test_fsdp import Narrow, whole
from typer.testing import CliRunner
from verify.planted import Words

from shoal.checkpoint import open_checkpoint
from shoal.checkpoint.deepspeed import import_deepspeed
from shoal.checkpoint_commands import app
from shoal.data import BatchSchedule, Loader
from shoal.errors import UserError
from shoal.parallel.weights import build
from shoal.strategies import DeepSpeedStrategy, SingleStrategy

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="the package deepspeed is not installed")


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(Narrow().param_groups(model), lr=1e-2)


def saved_by_deepspeed(folder: str, stage: int) -> dict[str, Any]:
    """What DeepSpeed wrote there, as our own state has it."""
    recipe = Narrow()
    with DeepSpeedStrategy(device="cpu", stage=stage) as strategy:
        model, weights = build(recipe.build_model, recipe.weights(), seed=0)
        model, optimizer = strategy.prepare(model, adamw, recipe.parallel_plan(model), weights)
        batches, rank = BatchSchedule.constant(11, 2), strategy.data_rank
        loader = Loader(Words(), recipe.collate, batches, seed=0, data_rank=rank, data_size=2)
        for step, micro_batches in zip(range(2), loader, strict=False):
            strategy.forward_backward(model, micro_batches, recipe, step)
            strategy.step(optimizer, 1.0)
        strategy.engine.save_checkpoint(folder, tag="global_step2")  # type: ignore[operator]
        state = strategy.state(model, optimizer)
        moments = {f"{n}/{slot}": whole(t) for n, slots in state.optimizer.items() for slot, t in slots.items()}
        return {name: whole(tensor) for name, tensor in state.model.items()} | moments


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_folders_of_all_stages(pool2: Pool, tmp_path: Path, stage: int) -> None:
    """Two groups, frozen layers, a shared one, and parameters that do not divide."""
    expected, _ = pool2.run(saved_by_deepspeed, str(tmp_path / "theirs"), stage, init=False)
    out = tmp_path / "ours"
    result = CliRunner().invoke(app, ["import", "--trust", str(tmp_path / "theirs"), str(out)])
    assert result.exit_code == 0, result.output
    assert f"19 tensors, optimizer exp_avg, exp_avg_sq, step, of step 2 of ZeRO {stage} on 2 ranks" in result.output
    read = open_checkpoint(out).read()
    moments = {f"{name}/{slot}": t for name, slots in read.optimizer.items() for slot, t in slots.items()}
    got = {name: tensor.numpy() for name, tensor in {**read.model, **moments}.items()}
    assert got.keys() == expected.keys()
    assert all((tensor == expected[name]).all() for name, tensor in got.items())
    recipe = Narrow()
    with SingleStrategy(device="cpu") as strategy:
        model, weights = build(recipe.build_model, recipe.weights(), seed=1)
        model, optimizer = strategy.prepare(model, adamw, recipe.parallel_plan(model), weights)
        assert strategy.load_checkpoint(out, model, optimizer) == {"step": 2}
        assert (model.get_parameter("4.up.weight").detach().numpy() == expected["4.up.weight"]).all()
    if stage == 1:  # a rank's part is gone
        (tmp_path / "theirs" / "global_step2" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
        with pytest.raises(UserError, match=r"has the parts of 1 ranks, but was written by \[2, 2\]"):
            import_deepspeed(tmp_path / "theirs", tmp_path / "third")
        with pytest.raises(UserError, match="ours exists; name a new folder"):
            import_deepspeed(tmp_path / "theirs", out)


def test_what_is_no_such_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        import_deepspeed(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no \*_optim_states.pt, so ZeRO did not write it"):
        import_deepspeed(tmp_path / "empty", tmp_path / "out")
    (tmp_path / "empty" / "x_optim_states.pt").write_bytes(b"no pickle")
    (tmp_path / "empty" / "x_model_states.pt").write_bytes(b"no pickle")
    with pytest.raises(UserError, match="cannot be read"):
        import_deepspeed(tmp_path / "empty", tmp_path / "out")


def test_nothing_is_opened_without_trust(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["import", str(tmp_path), str(tmp_path / "out")])
    assert result.exit_code == 2
