"""DeepSpeed import: folders that DeepSpeed's save_checkpoint wrote become checkpoints of shoal, if named as trusted."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pool import Pool
from strategies.test_fsdp import Narrow, whole
from torch import nn
from typer.testing import CliRunner
from verify.planted import Words

from shoal.checkpoint import open_checkpoint
from shoal.checkpoint.deepspeed_import import import_deepspeed
from shoal.cli.checkpoint import app
from shoal.data import BatchSchedule, Loader
from shoal.errors import UserError
from shoal.parallel.zero.partition import load_deepspeed
from shoal.strategies import DeepSpeedStrategy, Loop, SingleStrategy
from shoal.weights import build

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="the package deepspeed is not installed")


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(Narrow().param_groups(model), lr=1e-2)


def saved_by_deepspeed(folder: str, stage: int) -> dict[str, Any]:
    """Trains and saves with DeepSpeed, and returns the tensors of the strategy's state by name."""
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


@pytest.mark.parametrize("stage", [1, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (2, 3))])
def test_checkpoints_of_all_stages_are_imported(pool2: Pool, tmp_path: Path, stage: int) -> None:
    """The model has two parameter groups, frozen layers, a tied one, and parameters that do not divide evenly."""
    expected, _ = pool2.run(saved_by_deepspeed, str(tmp_path / "theirs"), stage, init=False)
    out = tmp_path / "ours"
    result = CliRunner().invoke(app, ["import", "--trust", str(tmp_path / "theirs"), str(out)])
    assert result.exit_code == 0, result.output
    assert f"19 tensors, optimizer exp_avg, exp_avg_sq, step, step 2 of ZeRO {stage} on 2 ranks" in result.output
    read = open_checkpoint(out).read()
    moments = {f"{name}/{slot}": t for name, slots in read.optimizer.items() for slot, t in slots.items()}
    got = {name: tensor.numpy() for name, tensor in {**read.model, **moments}.items()}
    assert got.keys() == expected.keys()
    assert all((tensor == expected[name]).all() for name, tensor in got.items())
    recipe = Narrow()
    with SingleStrategy(device="cpu") as strategy:
        loop = Loop(strategy)
        model, _ = loop.wrap(recipe.build_model(), adamw)
        assert loop.load(out) == {"step": 2}
        assert (model.get_parameter("4.up.weight").detach().numpy() == expected["4.up.weight"]).all()
    if stage == 1:  # the file of one rank is missing
        (tmp_path / "theirs" / "global_step2" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
        with pytest.raises(UserError, match=r"has files of 1 ranks, but was written by \[2, 2\]"):
            import_deepspeed(tmp_path / "theirs", tmp_path / "third")
        with pytest.raises(UserError, match="ours exists; choose a new folder"):
            import_deepspeed(tmp_path / "theirs", out)


def saved_by_another_engine(folder: str, stage: int, keys: dict[str, Any]) -> dict[str, Any]:
    """Saves with an engine that has another DeepSpeed config; the model has 267 elements, so that ZeRO adds padding."""
    with DeepSpeedStrategy(device="cpu", stage=stage) as strategy:
        deepspeed = strategy._deepspeed
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Embedding(13, 6), nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 6), nn.Linear(6, 13, bias=False)
        )
        zero = {"stage": stage, **keys.get("zero_optimization", {})}
        config = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True, **keys}
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
            config={**config, "zero_optimization": zero},
            dist_init_required=False,
        )
        for step in range(2):
            engine.backward(engine(torch.arange(8) + step + strategy.world.rank).float().logsumexp(-1).mean())
            engine.step()
        engine.save_checkpoint(folder)
        whole_state = deepspeed.utils.safe_get_full_optimizer_state
        expected = {}
        for name, p in model.named_parameters():
            expected[name] = deepspeed.utils.safe_get_full_fp32_param(p).clone().numpy()
            expected |= {f"{name}/{slot}": whole_state(p, slot).clone().numpy() for slot in ("exp_avg", "exp_avg_sq")}
        engine.destroy()
        return expected


WRITTEN_WITH: dict[str, tuple[int, dict[str, Any]]] = {
    "padded, stage 1": (1, {}),
    "padded, stage 2": (2, {}),
    "padded, stage 3": (3, {}),
    "elastic_checkpoint": (1, {"zero_optimization": {"elastic_checkpoint": True}}),
    "round_robin_gradients": (2, {"zero_optimization": {"round_robin_gradients": True}}),
    "bf16 weights and fp32 sums": (1, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}),
}


@pytest.mark.parametrize("name", WRITTEN_WITH)
def test_checkpoints_of_other_engines_are_imported(pool2: Pool, tmp_path: Path, name: str) -> None:
    expected, _ = pool2.run(saved_by_another_engine, str(tmp_path / "theirs"), *WRITTEN_WITH[name], init=False)
    import_deepspeed(tmp_path / "theirs", tmp_path / "ours")
    read = open_checkpoint(tmp_path / "ours").read()
    steps = {slots.pop("step").item() for slots in read.optimizer.values()}
    moments = {f"{name}/{slot}": t for name, slots in read.optimizer.items() for slot, t in slots.items()}
    got = {name: tensor.numpy() for name, tensor in {**read.model, **moments}.items()}
    assert got.keys() == expected.keys()
    assert all(np.array_equal(tensor, expected[name]) for name, tensor in got.items())
    assert steps == {2.0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda part: part.clear(), "KeyError 'partition_count'"),
        (
            lambda part: part.pop("param_slice_mappings"),
            "it does not say where parameters are, so an old DeepSpeed wrote it",
        ),
        (
            lambda part: part.update(single_partition_of_fp32_groups=[torch.zeros(5)]),
            r"RuntimeError shape .* is invalid",
        ),
        (lambda part: part.update(base_optimizer_state={"state": 3}), "AttributeError 'int' object has no attribute"),
        (
            lambda part: part["base_optimizer_state"]["state"][0].update(factors=torch.zeros(3, 3)),
            "the optimizer's factors is neither partitioned like the weights nor a single number",
        ),
    ],
)
def test_an_unknown_format_is_refused(tmp_path: Path, change: Any, words: str) -> None:
    """The files are made by hand: as DeepSpeed writes one parameter on one rank, and as another version may."""
    load_deepspeed(torch.device("cpu"))
    from deepspeed.utils.tensor_fragment import fragment_address

    part: dict[str, Any] = {
        "zero_stage": 1,
        "partition_count": [1],
        "single_partition_of_fp32_groups": [torch.arange(6.0)],
        "base_optimizer_state": {"state": {0: {"step": torch.tensor(2.0), "exp_avg": torch.ones(6)}}},
        "param_slice_mappings": [{"w": fragment_address(numel=6, start=0)}],
    }
    model = {"module": {}, "buffer_names": [], "param_shapes": [{"w": torch.Size([2, 3])}]}
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    torch.save(model, theirs / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": part}, theirs / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert import_deepspeed(theirs, tmp_path / "good")["slots"] == ["exp_avg", "step"]
    change(part)
    torch.save({"optimizer_state_dict": part}, theirs / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(UserError, match=f"theirs has a format that shoal does not know: {words}") as caught:
        import_deepspeed(theirs, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        import_deepspeed(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no \*_optim_states.pt, so ZeRO did not write it"):
        import_deepspeed(tmp_path / "empty", tmp_path / "out")
    (tmp_path / "empty" / "x_optim_states.pt").write_bytes(b"no pickle")
    (tmp_path / "empty" / "x_model_states.pt").write_bytes(b"no pickle")
    with pytest.raises(UserError, match="cannot be read"):
        import_deepspeed(tmp_path / "empty", tmp_path / "out")


def test_no_pickle_is_opened_without_trust(tmp_path: Path) -> None:
    for folders in ([str(tmp_path), str(tmp_path / "out")], [str(tmp_path / "out")]):
        result = CliRunner().invoke(app, ["import", *folders])
        assert isinstance(result.exception, UserError)
        assert "pickles" in str(result.exception)
