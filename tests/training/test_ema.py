"""The moving average of the weights: what it is, that every layout has the same one, and where it goes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ToyRun
from pool import Pool
from safetensors.torch import load_file
from torch import Tensor

from shoal.callbacks.average import Average
from shoal.checkpoint import open_checkpoint
from shoal.config import load_run
from shoal.errors import UserError
from shoal.strategies.local_weights import LocalWeights
from shoal.training import train

EMA = "callbacks=[{name: ema, decay: 0.9OPTIONS}]"
CONSTANT = "training.lr_scheduler=constant"


def ema(options: str = "") -> str:
    return EMA.replace("OPTIONS", f", {options}" if options else "")


def weights(output: Path, step: int) -> dict[str, Tensor]:
    return open_checkpoint(output / "checkpoints" / f"step_{step:08d}").read().model


def average(output: Path, step: int = 10) -> dict[str, Tensor]:
    tensors = open_checkpoint(output / "checkpoints" / f"step_{step:08d}").read().callbacks
    return {name.removeprefix("ema/average/"): tensor for name, tensor in tensors.items()}


def train_here(config: Path, overrides: list[str]) -> dict[str, Any]:
    return train(load_run(config, overrides)).metrics


def expected(steps: list[dict[str, Tensor]], decays: list[float]) -> dict[str, Tensor]:
    """Averages the weights of some steps in float64."""
    values = {name: tensor.double() for name, tensor in steps[0].items()}
    for decay, step in zip(decays, steps[1:], strict=True):
        values = {name: decay * values[name] + (1 - decay) * step[name].double() for name in values}
    return {name: value.float() for name, value in values.items()}


@pytest.mark.parametrize(
    ("options", "steps", "decays"),
    [
        ("start_step: 1", [*range(1, 9)], [0.9] * 7),
        ("start_step: 2, every: 3", [2, 5, 8], [0.9] * 2),
        ("start_step: 1, warmup: true", [*range(1, 9)], [(1 + n) / (10 + n) for n in range(7)]),
    ],
)
def test_it_is_the_average_of_the_steps(toy: ToyRun, options: str, steps: list[int], decays: list[float]) -> None:
    toy.train("training.max_steps=8", "checkpoint.every=1", "checkpoint.keep_last=9", ema(options))
    wanted = expected([weights(toy.output, step) for step in steps], decays)
    torch.testing.assert_close(average(toy.output, 8), wanted, rtol=1e-6, atol=1e-7)
    assert any(not torch.equal(wanted[name], tensor) for name, tensor in weights(toy.output, 8).items())


def test_it_begins_with_the_initial_weights(toy: ToyRun) -> None:
    toy.train("training.max_steps=1", "training.learning_rate=1e-30", "training.weight_decay=0.0", ema())
    torch.testing.assert_close(average(toy.output, 1), weights(toy.output, 1), rtol=0, atol=0)


def test_evaluation_uses_the_average_and_leaves_no_trace(toy: ToyRun) -> None:
    """Training is the same to the bit; the loss is that of the average."""
    toy.train(f"experiment.output_dir={toy.folder}/plain", "training.eval_steps=2")
    toy.train(ema(), "training.eval_steps=2")
    toy.train(ema("use_for_evaluation: false"), "training.eval_steps=2", f"experiment.output_dir={toy.folder}/beside")
    for other in ("plain", "beside"):
        torch.testing.assert_close(weights(toy.output, 10), weights(toy.folder / other, 10), rtol=0, atol=0)
    torch.testing.assert_close(average(toy.output), average(toy.folder / "beside"), rtol=0, atol=0)
    plain, beside = (toy.metrics("eval/loss", toy.folder / folder) for folder in ("plain", "beside"))
    assert plain == beside
    model = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Identity(), torch.nn.Linear(16, 1))
    model.load_state_dict(average(toy.output))
    x = torch.arange(17)[:, None] / 17
    loss = ((model(x) - x * x) ** 2).mean().item()
    assert toy.metrics("eval/loss")[10] == pytest.approx(loss, rel=1e-5)
    assert plain[10] != pytest.approx(loss, rel=1e-3)


def test_it_does_not_move_when_an_update_is_skipped(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe(
        "        return ((output - batch",
        "        self.calls = getattr(self, 'calls', 0) + output.requires_grad\n"
        "        if self.calls == 3:\n            return (output * float('nan')).sum()\n"
        "        return ((output - batch",
    )
    toy.train("training.max_steps=3", "checkpoint.every=1", "training.eval_steps=null", ema())
    assert toy.metrics("train/skipped_steps")[3] == 1
    torch.testing.assert_close(average(toy.output, 3), average(toy.output, 2), rtol=0, atol=0)
    assert not torch.equal(average(toy.output, 2)["0.weight"], average(toy.output, 1)["0.weight"])


MESH = "distributed.strategy=mesh"
ZERO = "distributed.strategy=deepspeed"
PARTITIONED = "distributed.deepspeed.stage3_param_persistence_threshold=0"
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "ddp": (2, []),
    "fsdp": (2, ["distributed.strategy=fsdp"]),
    "grad_op": (2, ["distributed.strategy=fsdp", "distributed.fsdp.sharding_strategy=SHARD_GRAD_OP"]),
    "tp": (2, [MESH, "distributed.mesh.tp=2"]),
    "pp": (2, [MESH, "distributed.mesh.pp=2", "distributed.mesh.dp_shard=1"]),
    "zero1": (2, [ZERO, "distributed.zero_stage=1"]),
    "zero2": (2, [ZERO, "distributed.zero_stage=2", "distributed.offload=optimizer"]),
    "zero3": (2, [ZERO, "distributed.zero_stage=3", PARTITIONED]),
    "tp_fsdp": (4, [MESH, "distributed.mesh.tp=2", "distributed.mesh.dp_shard=2"]),
    "pp_tp": (4, [MESH, "distributed.mesh.pp=2", "distributed.mesh.tp=2", "distributed.mesh.dp_shard=1"]),
}
CHOSEN = ("fsdp", "pp")
EACH_LAYOUT = [pytest.param(name, marks=() if name in CHOSEN else pytest.mark.slow) for name in LAYOUTS]


def layout_keys(layout: str) -> list[str]:
    keys = ["training.global_batch_size=12", "training.batch_size=2", "model.dropout=0.0", CONSTANT, ema()]
    return [*keys, "recipe=toy_recipe:Divisible", "training.eval_steps=5", *LAYOUTS.get(layout, (1, []))[1]]


@pytest.mark.parametrize("layout", EACH_LAYOUT)
def test_every_layout_has_the_same_average(toy: ToyRun, pool2: Pool, pool4: Pool, layout: str) -> None:
    """Also if a run moves from the layout to one device and back, and evaluates in between."""
    if layout.startswith("zero") and find_spec("deepspeed") is None:
        pytest.skip("the package deepspeed is not installed")
    single = [*layout_keys("single"), f"experiment.output_dir={toy.folder}/single"]
    train_here(toy.config, single)
    pool, keys = {2: pool2, 4: pool4}[LAYOUTS[layout][0]], layout_keys(layout)
    pool.run(train_here, toy.config, [*keys, "training.max_steps=4"], init=False)
    train_here(toy.config, [*layout_keys("single"), "training.max_steps=6"])
    pool.run(train_here, toy.config, keys, init=False)
    wanted = average(toy.folder / "single")
    assert len(wanted) == 4
    torch.testing.assert_close(average(toy.output), wanted, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weights(toy.output, 10), weights(toy.folder / "single", 10), rtol=1e-4, atol=1e-6)
    losses = toy.metrics("eval/loss"), toy.metrics("eval/loss", toy.folder / "single")
    assert losses[0][10] == pytest.approx(losses[1][10], rel=1e-4)
    assert losses[0][5] == pytest.approx(losses[1][5], rel=1e-4)


def test_it_is_stored_in_pieces(toy: ToyRun, pool2: Pool) -> None:
    pool2.run(train_here, toy.config, [*layout_keys("fsdp"), "training.max_steps=2"], init=False)
    folder = toy.output / "checkpoints" / "step_00000002"
    sizes = [load_file(folder / f"callbacks-0000{rank}-of-00002.safetensors") for rank in (1, 2)]
    assert [tensors["ema/average/0.weight"].shape for tensors in sizes] == [(8, 1), (8, 1)]


@pytest.mark.parametrize(
    "layout", ["single", "fsdp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "zero3"))]
)
def test_an_interrupted_run_has_the_same_bits(toy: ToyRun, pool2: Pool, layout: str) -> None:
    def run(*keys: str) -> None:
        whole = [*layout_keys(layout), *keys]
        _ = (
            train_here(toy.config, whole)
            if layout == "single"
            else pool2.run(train_here, toy.config, whole, init=False)
        )

    run(f"experiment.output_dir={toy.folder}/whole")
    run("checkpoint.keep_last=9")
    for step in (6, 8, 10):
        shutil.rmtree(toy.output / "checkpoints" / f"step_{step:08d}")
    run()
    torch.testing.assert_close(average(toy.output), average(toy.folder / "whole"), rtol=0, atol=0)
    assert toy.metrics("eval/loss") == toy.metrics("eval/loss", toy.folder / "whole")


def test_the_average_is_exported(toy: ToyRun) -> None:
    toy.train(ema())
    step, out = toy.output / "checkpoints" / "step_00000010", toy.folder / "ema.safetensors"
    result = toy.call("checkpoint", "export", str(step), str(out), "--to", "safetensors", "--average", "ema")
    assert result.returncode == 0, result.stderr
    assert "4 tensors are the average of ema" in result.stdout
    torch.testing.assert_close(load_file(out), average(toy.output), rtol=0, atol=0)
    refused = toy.call("checkpoint", "export", str(step), f"{out}.2", "--to", "safetensors", "--average", "swa")
    assert refused.returncode == 2
    assert "has no average of this callback; it has those of ema" in refused.stderr


def test_the_best_weights_are_those_that_were_evaluated(toy: ToyRun) -> None:
    best = ("checkpoint.keep_best=1", "checkpoint.load_best_model_at_end=true", "training.eval_steps=2")
    outcome = toy.train(ema(), *best)
    wanted = average(toy.output, outcome.best_step)
    torch.testing.assert_close({**outcome.model.state_dict()}, wanted, rtol=0, atol=0)


def test_two_averages_for_one_evaluation_are_refused(toy: ToyRun) -> None:
    with pytest.raises(UserError, match=r"ema and ema\.2 both replace the weights"):
        toy.train("callbacks=[ema, ema]")


def test_bf16_weights_are_averaged_in_fp32(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    """Small changes would be lost in bf16, and the weights must come back to the bit after an evaluation."""
    change_recipe(
        "    def inputs",
        "    def weights(self):\n        from shoal.types import Weights\n\n"
        "        return Weights('built')\n\n    def inputs",
    )
    change_recipe("        return nn.Sequential(\n", "        return Half(\n")
    change_recipe(
        "class Toy",
        "class Half(nn.Sequential):\n"
        "    def __init__(self, *modules):\n        super().__init__(*modules)\n        self.bfloat16()\n\n"
        "    def forward(self, input):\n        return super().forward(input.bfloat16()).float()\n\n\nclass Toy",
    )
    toy.train(ema(), "training.eval_steps=1", "checkpoint.keep_last=99", "checkpoint.every=1")
    toy.train("training.eval_steps=1", f"experiment.output_dir={toy.folder}/plain")
    torch.testing.assert_close(weights(toy.output, 10), weights(toy.folder / "plain", 10), rtol=0, atol=0)
    averages = [average(toy.output, step)["0.weight"] for step in range(1, 11)]
    assert averages[0].dtype == torch.float32
    assert all(not torch.equal(a, b) for a, b in pairwise(averages))


def test_a_rank_may_hold_nothing_of_the_first_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """And parameters are updated in several buckets as in one."""
    model = torch.nn.ParameterList([torch.ones(0), torch.ones(3), torch.ones(2), torch.ones(4)])
    for numel in (4, 1 << 26):
        monkeypatch.setattr("shoal.callbacks.average._BUCKET_NUMEL", numel)
        average = Average(LocalWeights(model))
        with torch.no_grad():
            for parameter in model:
                parameter += 1
        average.update(torch.tensor(0.5))
        assert all(torch.equal(average.values[str(i)], model[i] - 0.5) for i in range(4))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="the package deepspeed is not installed")
def test_zero_on_one_process_has_the_same_average(toy: ToyRun) -> None:
    keys = ("training.max_steps=3", "training.eval_steps=2", "model.dropout=0.0", ema())
    toy.train(*keys, f"experiment.output_dir={toy.folder}/single")
    toy.train(*keys, "distributed.strategy=deepspeed", "distributed.zero_stage=3", PARTITIONED)
    torch.testing.assert_close(average(toy.output, 3), average(toy.folder / "single", 3), rtol=1e-4, atol=1e-6)
    losses = toy.metrics("eval/loss"), toy.metrics("eval/loss", toy.folder / "single")
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
