"""The built-in callbacks besides the moving average."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ToyRun
from pool import Pool
from safetensors.torch import load_file
from torch import Tensor

from shoal.checkpoint import open_checkpoint
from shoal.config import load_run
from shoal.data.order import samples_at
from shoal.errors import UserError
from shoal.training import train


def outcome_of(config: Path, overrides: list[str]) -> tuple[int, str | None]:
    outcome = train(load_run(config, overrides))
    return outcome.step, outcome.stop_reason


def callback_state(output: Path, step: int) -> dict[str, Any]:
    return open_checkpoint(output / "checkpoints" / f"step_{step:08d}").trainer["callbacks"]


# Early stopping

STOPPING = "callbacks=[{name: early_stopping, patience: 2, min_delta: 10}]"
"""No loss improves by 10, so that the first one stays the best."""


def test_a_run_stops_when_nothing_improves(toy: ToyRun) -> None:
    outcome = toy.train("training.eval_steps=2", STOPPING)
    assert outcome.step == 6
    best = toy.metrics("eval/loss")[2]
    assert outcome.stop_reason == f"eval/loss is not better than {best:.6g} since 2 evaluations"
    assert sorted(toy.metrics("eval/loss")) == [2, 4, 6]
    assert callback_state(toy.output, 6) == {"early_stopping": {"best": best, "since_best": 2}}


def test_what_was_best_survives_a_restart(toy: ToyRun) -> None:
    toy.train("training.eval_steps=2", STOPPING)
    shutil.rmtree(toy.output / "checkpoints" / "step_00000006")
    outcome = toy.train("training.eval_steps=2", STOPPING)
    assert (outcome.first_step, outcome.step) == (4, 6)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_improvements_keep_a_run_going(toy: ToyRun, mode: str) -> None:
    """The loss falls at this learning rate, which is an improvement in one mode only."""
    keys = ("training.eval_steps=1", "training.learning_rate=1e-4", "model.dropout=0.0")
    outcome = toy.train(*keys, f"callbacks=[{{name: early_stopping, patience: 2, mode: {mode}}}]")
    assert outcome.step == (10 if mode == "min" else 3)


def test_early_stopping_needs_its_metric(toy: ToyRun) -> None:
    with pytest.raises(UserError, match=r"early_stopping needs evaluations .* set training\.eval_steps"):
        toy.train("callbacks=[early_stopping]")
    with pytest.raises(UserError, match=r"early_stopping\.metric = 'eval/x': .* it gives eval/loss"):
        toy.train("training.eval_steps=1", "callbacks=[{name: early_stopping, metric: eval/x}]")


# Time limit


def test_time_adds_up_over_restarts(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by ten seconds whenever it is read: once at the start, after each step, and at each save."""
    now = iter(range(0, 100_000, 10))
    monkeypatch.setattr("shoal.callbacks.time_limit.time", SimpleNamespace(monotonic=lambda: next(now)))
    limit, keys = "callbacks=[{name: time_limit, minutes: 2}]", ("checkpoint.every=2", "checkpoint.keep_last=9")
    assert toy.train("training.max_steps=4", limit, *keys).stop_reason is None
    assert callback_state(toy.output, 4) == {"time_limit": {"seconds": 60}}
    outcome = toy.train("training.max_steps=100", limit, *keys)
    assert (outcome.step, outcome.stop_reason) == (9, "the time limit of 2 minutes is over")
    assert toy.train("training.max_steps=100", limit, *keys).step == 9
    assert toy.train("training.max_steps=100", limit.replace("2}", "3}"), *keys).step == 12


def test_a_time_limit_is_hours_or_minutes(toy: ToyRun) -> None:
    for options in ("", ", hours: 1, minutes: 1"):
        with pytest.raises(UserError, match=r"^callbacks\.time_limit.*give either hours or minutes"):
            load_run(toy.config, [f"callbacks=[{{name: time_limit{options}}}]"])


@pytest.mark.slow
def test_the_first_clock_stops_all_ranks(toy: ToyRun, pool2: Pool) -> None:
    keys = ["callbacks=[{name: time_limit, minutes: 1e-9}]", "training.batch_size=2"]
    assert pool2.run(outcome_of, toy.config, keys, init=False) == [(1, "the time limit of 1e-09 minutes is over")] * 2


# Stochastic weight averaging


def average(output: Path, step: int = 10, kind: str = "average") -> dict[str, Tensor]:
    tensors = open_checkpoint(output / "checkpoints" / f"step_{step:08d}").read().callbacks
    prefix = f"swa/{kind}/"
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def model_of(output: Path, step: int) -> dict[str, Tensor]:
    return open_checkpoint(output / "checkpoints" / f"step_{step:08d}").read().model


SWA = "callbacks=[{name: swa, start_step: 4, every: 2}]"
CONSTANT = "training.lr_scheduler=constant"


def test_swa_is_the_mean_of_the_steps(toy: ToyRun) -> None:
    toy.train(SWA, "checkpoint.keep_last=9")
    models = [model_of(toy.output, step) for step in (4, 6, 8, 10)]
    wanted = {name: torch.stack([model[name] for model in models]).mean(0) for name in models[0]}
    torch.testing.assert_close(average(toy.output), wanted, rtol=1e-6, atol=1e-7)
    assert open_checkpoint(toy.output / "checkpoints" / "step_00000010").read().callbacks["swa/count"] == 4
    assert average(toy.output, 2) == {}


def test_a_skipped_update_is_not_averaged(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe(
        "        return ((output - batch",
        "        self.calls = getattr(self, 'calls', 0) + output.requires_grad\n"
        "        if self.calls == 6:\n            return (output * float('nan')).sum()\n"
        "        return ((output - batch",
    )
    toy.train(SWA, "checkpoint.keep_last=9", "training.max_steps=6")
    assert open_checkpoint(toy.output / "checkpoints" / "step_00000006").read().callbacks["swa/count"] == 1
    torch.testing.assert_close(average(toy.output, 6), model_of(toy.output, 4), rtol=0, atol=0)


def test_swa_is_the_same_when_sharded_and_resumed(toy: ToyRun, pool2: Pool) -> None:
    keys = ["training.global_batch_size=12", "training.batch_size=2", "model.dropout=0.0", CONSTANT, SWA]
    outcome_of(toy.config, [*keys, f"experiment.output_dir={toy.folder}/single"])
    sharded = [*keys, "distributed.strategy=fsdp"]
    pool2.run(outcome_of, toy.config, [*sharded, "training.max_steps=6"], init=False)
    pool2.run(outcome_of, toy.config, sharded, init=False)
    torch.testing.assert_close(average(toy.output), average(toy.folder / "single"), rtol=1e-4, atol=1e-6)


def with_batch_norm(change_recipe: Callable[[str, str], None]) -> None:
    change_recipe("nn.Tanh(), nn.Dropout(self.config.model.dropout)", "nn.BatchNorm1d(hidden), nn.Tanh()")


def check_statistics(output: Path) -> None:
    """Compares the statistics with those of all training data."""
    layer = torch.nn.Linear(1, 16)
    layer.load_state_dict({key: average(output)[f"0.{key}"] for key in ("weight", "bias")})
    statistics = average(output, kind="buffer")
    with torch.no_grad():
        hidden = layer(torch.arange(103)[:, None] / 103)
    mean, variance = hidden.mean(0), hidden.var(0)
    torch.testing.assert_close(statistics["1.running_mean"], mean, rtol=0.05, atol=1e-2)
    # Batches are small, so that the mean of their variances is only near the variance of all.
    torch.testing.assert_close(statistics["1.running_var"], variance, rtol=0.3, atol=1e-2)
    assert statistics["1.num_batches_tracked"] > 10


def test_batch_norm_is_estimated_anew_at_the_end(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    with_batch_norm(change_recipe)
    toy.train(SWA)
    check_statistics(toy.output)
    assert average(toy.output, 8, "buffer") == {}  # the run had not ended
    plain = f"experiment.output_dir={toy.folder}/plain"
    toy.train(plain)
    torch.testing.assert_close(model_of(toy.output, 10), model_of(toy.folder / "plain", 10), rtol=0, atol=0)
    before = average(toy.output, kind="buffer")
    toy.train(SWA)  # it has ended already
    torch.testing.assert_close(average(toy.output, kind="buffer"), before, rtol=0, atol=0)
    step, out = toy.output / "checkpoints" / "step_00000010", toy.folder / "swa.safetensors"
    result = toy.call("checkpoint", "export", str(step), str(out), "--to", "safetensors", "--average", "swa")
    assert result.returncode == 0, result.stderr
    exported = load_file(out)
    torch.testing.assert_close(exported["1.running_mean"], before["1.running_mean"], rtol=0, atol=0)
    torch.testing.assert_close(exported["0.weight"], average(toy.output)["0.weight"], rtol=0, atol=0)


def test_ranks_estimate_batch_norm_together(
    toy: ToyRun, change_recipe: Callable[[str, str], None], pool2: Pool
) -> None:
    with_batch_norm(change_recipe)
    pool2.run(outcome_of, toy.config, [SWA, "training.batch_size=4"], init=False)
    check_statistics(toy.output)


# Histograms


def events(output: Path) -> dict[tuple[int, str], Any]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found = {}
    for path in sorted((output / "tensorboard").glob("*tfevents*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "histograms":
                    found[event.step, value.tag] = torch.tensor(value.tensor.float_val or _unpack(value.tensor))
    return found


def _unpack(tensor: Any) -> list[list[float]]:
    from tensorboard.util.tensor_util import make_ndarray

    return make_ndarray(tensor).tolist()


HISTOGRAMS = ["callbacks=[{name: histograms, every: 2, bins: 8}]", "logging.tensorboard=true", "training.max_steps=5"]
SHARED = ["training.global_batch_size=12", "training.batch_size=2", "model.dropout=0.0", *HISTOGRAMS]
MESH = ["distributed.strategy=mesh", "recipe=toy_recipe:Divisible"]


@pytest.mark.parametrize(
    "keys",
    [
        ["distributed.strategy=fsdp"],
        [*MESH, "distributed.mesh.tp=2"],
        [*MESH, "distributed.mesh.pp=2", "distributed.mesh.dp_shard=1"],
    ],
    ids=["fsdp", "tp", "pp"],
)
def test_histograms_are_those_of_the_whole_tensors(toy: ToyRun, pool2: Pool, keys: list[str]) -> None:
    outcome_of(toy.config, [*SHARED, f"experiment.output_dir={toy.folder}/single"])
    pool2.run(outcome_of, toy.config, [*SHARED, *keys], init=False)
    single, sharded = events(toy.folder / "single"), events(toy.output)
    names = [f"train/{kind}/{name}" for kind in ("gradients", "weights") for name in ("0.weight", "3.bias")]
    assert {(step, name) for step in (2, 4) for name in names} <= single.keys()
    assert single.keys() == sharded.keys()
    for key, rows in single.items():
        torch.testing.assert_close(sharded[key][:, :2], rows[:, :2], rtol=1e-3, atol=1e-5, msg=str(key))
        assert (
            sharded[key][:, 2].sum()
            == rows[:, 2].sum()
            == (16 if key[1].endswith(("0.weight", "0.bias")) else 16 if key[1].endswith("3.weight") else 1)
        )
        assert (sharded[key][:, 2] - rows[:, 2]).abs().sum() <= 2  # an element may lie at the edge of two bins


def test_a_histogram_counts_every_element() -> None:
    from shoal.callbacks.histograms import count_elements

    values = torch.randn(1000)
    values[3] = float("nan")
    low, high, counts, total, squares = count_elements({"x": values}, 10)["x"]
    known = values[~values.isnan()]
    assert torch.equal(counts, torch.histc(known, 10).double())
    assert (low, high) == (known.min(), known.max())
    torch.testing.assert_close(total, known.double().sum())
    torch.testing.assert_close(squares, known.double().square().sum())
    alike = count_elements({"x": torch.ones(3)}, 4)["x"]
    assert alike.counts.sum() == 3


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["logging.tensorboard=false"], r"set logging\.tensorboard to true"),
        (["logging.every=3"], r"histograms.every = 2: .* logging.every is 3"),
    ],
)
def test_histograms_that_nobody_would_see_are_refused(toy: ToyRun, keys: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        toy.train(*HISTOGRAMS, *keys)


# Loss spikes

SPIKE = "callbacks=[{name: loss_spike, factor: 50, window: 2}]"


@pytest.fixture
def spiked(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> ToyRun:
    """A run in which one sample is far off, that of position 25: with batches of four it is in step 7."""
    ((_, sample),) = samples_at(25, 1, epoch_size=103, seed=0, shuffle=True)
    change_recipe('return {"x": x, "y": x * x}', f'return {{"x": x, "y": x * x + 100 * (i == {sample})}}')
    return toy


def ends_alike(one: Path, other: Path) -> None:
    first, second = (open_checkpoint(output / "checkpoints" / "step_00000010") for output in (one, other))
    assert {**first.trainer, "metrics": 0} == {**second.trainer, "metrics": 0}
    a, b = first.read(), second.read()
    torch.testing.assert_close(a.model, b.model, rtol=0, atol=0)
    torch.testing.assert_close(a.optimizer, b.optimizer, rtol=0, atol=0)


def test_a_run_goes_back_before_a_spike_and_leaves_the_samples_out(
    spiked: ToyRun, capfd: pytest.CaptureFixture[str]
) -> None:
    spiked.train(f"experiment.output_dir={spiked.folder}/plain")
    losses = spiked.metrics(output=spiked.folder / "plain")
    assert losses[7] > 100 * losses[6]
    capfd.readouterr()
    outcome = spiked.train(SPIKE)
    warnings = [line for line in capfd.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1
    assert "goes back from step 7 to step 6, and leaves out the samples" in warnings[0]
    assert outcome.step == 10
    kept = spiked.metrics()
    assert sorted(kept) == [*range(1, 11)]
    assert {step: kept[step] for step in range(1, 7)} == {step: losses[step] for step in range(1, 7)}
    assert max(kept.values()) < losses[7] / 100
    trainer = open_checkpoint(spiked.output / "checkpoints" / "step_00000010").trainer
    assert (trainer["samples"], trainer["skipped_samples"]) == (44, [[24, 28]])


@pytest.mark.parametrize("last", [6, *(pytest.param(step, marks=pytest.mark.slow) for step in (4, 8))])
def test_a_kill_around_a_spike_changes_nothing(spiked: ToyRun, last: int) -> None:
    """After step 4 and 6 the spike comes again; the checkpoint of step 8 was saved after it."""
    spiked.train(SPIKE, f"experiment.output_dir={spiked.folder}/whole")
    spiked.train(SPIKE, "checkpoint.keep_last=9")
    for step in range(last + 2, 12, 2):
        shutil.rmtree(spiked.output / "checkpoints" / f"step_{step:08d}")
    spiked.train(SPIKE)
    ends_alike(spiked.output, spiked.folder / "whole")
    assert spiked.metrics() == spiked.metrics(output=spiked.folder / "whole")


def test_a_spike_before_the_first_checkpoint_starts_anew(spiked: ToyRun) -> None:
    spiked.train(SPIKE, "checkpoint.every=null")
    trainer = open_checkpoint(spiked.output / "checkpoints" / "step_00000010").trainer
    assert (trainer["samples"], trainer["skipped_samples"]) == (68, [[0, 28]])


@pytest.mark.slow
def test_a_run_that_began_elsewhere_goes_back_to_its_own_checkpoint(spiked: ToyRun) -> None:
    spiked.train("training.max_steps=4", "training.lr_scheduler=constant")
    start = f"checkpoint.resume={spiked.output}/checkpoints/step_00000004"
    keys = (SPIKE, start, "training.lr_scheduler=constant", f"experiment.output_dir={spiked.folder}/other")
    spiked.train(*keys, "callbacks=[{name: loss_spike, factor: 50, window: 2}]")
    trainer = open_checkpoint(spiked.folder / "other" / "checkpoints" / "step_00000010").trainer
    assert trainer["skipped_samples"] == [[24, 28]]


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_two_ranks_go_back_together(spiked: ToyRun, pool2: Pool, strategy: str) -> None:
    keys = [SPIKE, "training.batch_size=2", f"distributed.strategy={strategy}"]
    whole = [*keys, f"experiment.output_dir={spiked.folder}/whole"]
    assert pool2.run(outcome_of, spiked.config, whole, init=False) == [(10, None)] * 2
    pool2.run(outcome_of, spiked.config, [*keys, "checkpoint.keep_last=9"], init=False)
    for step in (8, 10):
        shutil.rmtree(spiked.output / "checkpoints" / f"step_{step:08d}")
    pool2.run(outcome_of, spiked.config, keys, init=False)
    ends_alike(spiked.output, spiked.folder / "whole")
    assert open_checkpoint(spiked.output / "checkpoints" / "step_00000010").trainer["skipped_samples"] == [[24, 28]]
