"""Several objectives in a step: the same numbers as a plain loop with two optimizers, in every layout, and resumed."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch import nn
from verify.runs import failed, runner_on

from shoal.checkpoint import open_checkpoint
from shoal.config import Run, load_run
from shoal.config.layout import check_layout
from shoal.data import BatchSchedule
from shoal.errors import UserError
from shoal.processes.world import World
from shoal.strategies import SingleStrategy, from_config
from shoal.strategies.contract import prepare_batch
from shoal.training import train
from shoal.training.session import assemble
from shoal.verify import prove

EXAMPLE = Path(__file__).parents[2] / "examples" / "gan"
SMALL = (
    *("training.batch_size=4", "training.global_batch_size=10", "training.max_steps=6"),
    *("checkpoint.every=2", "checkpoint.keep_last=9"),
    *("logging.console=off", "logging.tensorboard=false", "logging.every=1", "training.device=cpu"),
)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield
    sys.modules.pop("ring_gan", None)


def gan(folder: Path, *overrides: str) -> Run:
    return load_run(EXAMPLE / "run.yaml", [*SMALL, f"experiment.output_dir={folder}", *overrides])


def weights_at(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return open_checkpoint(folder / "checkpoints" / f"step_{step:08d}").read().model


def plain_gan(run: Run, steps: int) -> dict[str, torch.Tensor]:
    """Trains as a script in plain PyTorch does: two optimizers, and gradients cleared by hand."""
    recipe, training = run.recipe_type(run.recipe_config), run.config.training
    with SingleStrategy(device="cpu") as strategy:
        session = assemble(recipe, strategy, training, 0)
        model = nn.Module()
        model.generator, model.discriminator = session.model.generator, session.model.discriminator
        loader = session.loader(recipe.train_data(), BatchSchedule.constant(10, 4))
    rates, clips = {"discriminator": 1e-3, "generator": 5e-4}, {"discriminator": None, "generator": 1.0}
    optimizers = {
        name: torch.optim.AdamW(model.get_submodule(name).parameters(), rate, (0.5, 0.9), weight_decay=0.0)
        for name, rate in rates.items()
    }
    for _, micro_batches in zip(range(steps), loader, strict=False):
        for name, optimizer in optimizers.items():
            for micro in micro_batches:
                batch = prepare_batch(micro, recipe, 0, torch.device("cpu"))
                (recipe.objective_loss(name, _Callable(model), batch) / 10).backward()
            if clips[name]:
                nn.utils.clip_grad_norm_(model.get_submodule(name).parameters(), clips[name])
            optimizer.step()
            model.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


class _Callable:
    """The model of the plain script."""

    def __init__(self, model: Any):
        self.generator, self.discriminator = model.generator, model.discriminator

    def __call__(self, noise: torch.Tensor) -> torch.Tensor:
        return self.generator(noise)


def test_a_run_is_what_a_plain_loop_computes(tmp_path: Path) -> None:
    run = gan(tmp_path, "training.max_steps=3", "training.lr_scheduler=constant", "checkpoint.every=3")
    outcome = train(run)
    trained, expected = weights_at(tmp_path, 3), plain_gan(run, 3)
    assert trained.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-5, atol=1e-6)
    metrics = outcome.metrics
    assert metrics["train/loss"] == pytest.approx(
        metrics["train/discriminator_loss"] + metrics["train/generator_loss"], rel=1e-6
    )
    assert metrics["eval/loss"] == pytest.approx(metrics["eval/discriminator_loss"] + metrics["eval/generator_loss"])
    report = (tmp_path / "report.txt").read_text()
    assert "discriminator (6 tensors, learning rate 0.001, not clipped), then generator (6 tensors, learn" in report


RAGGED = "training.global_batch_size=11"


@pytest.mark.parametrize(
    ("layout", "keys"),
    [
        ("ddp", ()),
        ("fsdp", ("distributed.fsdp.wrap_classes=[Sequential]",)),
        pytest.param(
            "fsdp",
            (
                "training.mixed_precision=bf16",
                "distributed.fsdp.param_dtype=bf16",
                "distributed.fsdp.wrap_classes=[Sequential]",
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param("fsdp_shard_grad_op", ("distributed.fsdp.wrap_classes=[Linear]",), marks=pytest.mark.slow),
        pytest.param("fsdp_no_shard", (), marks=pytest.mark.slow),
        pytest.param(
            "fsdp",
            (
                "training.activation_checkpointing={mode: full, classes: [Sequential]}",
                "distributed.fsdp.reduce_every_micro_batch=true",
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param("ddp", ("training.mixed_precision=fp16",), marks=pytest.mark.slow),
        pytest.param(
            "ddp", ("training.mixed_precision=bf16", "distributed.ddp.static_graph=true"), marks=pytest.mark.slow
        ),
    ],
)
def test_layouts_are_proved(pool2: Pool, tmp_path: Path, layout: str, keys: tuple[str, ...]) -> None:
    (verdict,) = prove(gan(tmp_path, RAGGED, *keys), 2, [layout], 2, runner=runner_on(pool2, adamw=False))
    assert failed(verdict) == {}
    assert verdict.outcome == "same"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "fsdp_hybrid"])
def test_layouts_are_proved_on_four(pool4: Pool, tmp_path: Path, layout: str) -> None:
    (verdict,) = prove(gan(tmp_path, RAGGED, "training.batch_size=2"), 4, [layout], runner=runner_on(pool4))
    assert failed(verdict) == {}


def train_with(run: Run, world: World | None = None) -> None:
    train(run, world)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of the last checkpoint, those of both optimizers among them."""
    state = open_checkpoint(folder / "checkpoints" / "step_00000006").read()
    moments = {f"{name} {slot}": t for name, slots in state.optimizer.items() for slot, t in slots.items()}
    return {**state.model, **moments}


@pytest.mark.parametrize("strategy", ["single", "ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_an_interrupted_run_ends_as_an_undisturbed_one(pool2: Pool, tmp_path: Path, strategy: str) -> None:
    run = gan(tmp_path / "out", f"distributed.strategy={strategy}")

    def go() -> dict[str, torch.Tensor]:
        if strategy == "single":
            train(run)
        else:
            pool2.run(train_with, run, init=False)
        return tensors_in(tmp_path / "out")

    whole = go()
    assert len(whole) == 12 * 4  # each parameter with its step and its two averages
    for step in (4, 6):
        shutil.rmtree(tmp_path / "out" / "checkpoints" / f"step_{step:08d}")
    again = go()
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())


@pytest.mark.slow
def test_processes_that_are_killed_change_nothing(tmp_path: Path) -> None:
    import subprocess

    keys = (*SMALL, f"experiment.output_dir={tmp_path / 'out'}", "launch.procs_per_node=2", "training.max_steps=60")
    command = [sys.executable, "-m", "shoal", "chaos", str(EXAMPLE / "run.yaml"), *keys, "--kills", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit for bit" in done.stdout


def gradient_names(run: Run) -> dict[str, list[str]]:
    """Returns which parameters have a gradient after each objective's backward."""
    recipe = run.recipe_type(run.recipe_config)
    with from_config(run.config) as strategy:
        session = assemble(recipe, strategy, run.config.training, 0)
        loader = session.loader(recipe.train_data(), BatchSchedule.constant(8, 2))
        micro_batches, names = next(iter(loader)), {}
        for turn in session.turns:
            strategy.forward_backward(session.model, micro_batches, turn.objective, 0, turn.parameters)
            names[turn.name] = sorted({name.split(".")[0] for name in strategy.gradients(session.model)})
            strategy.step(turn.optimizer, turn.max_norm)
        return names


def test_others_get_no_gradient(pool2: Pool, tmp_path: Path) -> None:
    expected = {"discriminator": ["discriminator"], "generator": ["generator"]}
    # Units that begin without gradients are reduced in the dtype of their parameters all the same.
    in_bf16 = (
        *("training.mixed_precision=bf16", "distributed.fsdp.param_dtype=bf16"),
        "distributed.fsdp.wrap_classes=[Sequential]",
    )
    for strategy, keys in (("ddp", ()), ("fsdp", in_bf16)):
        run = gan(tmp_path, f"distributed.strategy={strategy}", *keys)
        assert pool2.run(gradient_names, run, init=False) == [expected, expected]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (("distributed.strategy=deepspeed",), r"distributed.strategy = deepspeed is not for .* \(discriminator, gen"),
        (("distributed.strategy=mesh", "distributed.mesh={pp: 1}"), "distributed.strategy = mesh is not for"),
        (("training.loss_chunks=2",), "training.loss_chunks = 2 is not for"),
    ],
)
def test_layouts_that_cannot_take_turns_are_refused(tmp_path: Path, keys: tuple[str, ...], words: str) -> None:
    run = gan(tmp_path, *keys)
    with pytest.raises(UserError, match=words):
        check_layout(run.config, run.recipe_type(run.recipe_config), 1, 1)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("training.compile=true", "training.compile = true: with several objectives the plan's blocks"),
        ("training.objectives={critic: {learning_rate: 1.0}}", r"training.objectives.critic: the recipe has discr"),
    ],
)
def test_keys_that_do_not_fit_the_objectives_are_refused(tmp_path: Path, key: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        train(gan(tmp_path, key))


@pytest.mark.parametrize(
    ("objectives", "words"),
    [
        ({"a": ["generator"], "b": ["generator.0"]}, r"objectives a and b both train generator.0.bias"),
        ({"a": ["critic"]}, r"objective a names 'critic', but the model has no trained parameter"),
        ({"a": "generator"}, r"give a list, \['generator'\]"),
        ({"a": []}, "objective a has no parameters"),
    ],
)
def test_wrong_objectives_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objectives: Any, words: str
) -> None:
    run = gan(tmp_path)
    monkeypatch.setattr(run.recipe_type, "objectives", lambda self: objectives)
    tree = run.config.training.model_copy(update={"objectives": {}})
    with SingleStrategy(device="cpu") as strategy, pytest.raises(UserError, match=words):
        assemble(run.recipe_type(run.recipe_config), strategy, tree, 0)


def test_parameters_of_no_objective_are_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = gan(tmp_path)
    monkeypatch.setattr(run.recipe_type, "objectives", lambda self: {"generator": ["generator"]})
    with SingleStrategy(device="cpu") as strategy:
        session = assemble(run.recipe_type(run.recipe_config), strategy, run.config.training, 0)
    assert all(name.startswith("discriminator") for name in session.ungrouped)
    assert len(session.ungrouped) == 6


def test_metrics_of_one_output_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = gan(tmp_path)
    monkeypatch.setattr(run.recipe_type, "has_metrics", True)
    with pytest.raises(UserError, match=r"recipe RingGan: metrics is not called with several objectives \(discr"):
        check_layout(run.config, run.recipe_type(run.recipe_config), 1, 1)


@pytest.mark.parametrize(
    ("returned", "words"),
    [(lambda loss: loss.item(), "float for discriminator"), (lambda loss: loss[None], r"of shape \[1\]")],
)
def test_a_loss_that_is_no_number_is_refused_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returned: Any, words: str
) -> None:
    run = gan(tmp_path)
    objective_loss = run.recipe_type.objective_loss

    def wrong(self: Any, *args: Any) -> Any:
        return returned(objective_loss(self, *args))

    monkeypatch.setattr(run.recipe_type, "objective_loss", wrong)
    with pytest.raises(UserError, match=rf"test_objectives.py:\d+: objective_loss returned a .*{words}"):
        train(run)


def test_hooks_see_the_gradients_of_each_objective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen, rates = gan(tmp_path, "training.max_steps=2", "training.lr_scheduler=constant"), [], []

    def before_update(self: Any, handle: Any) -> None:
        seen.append({name.split(".")[0] for name in handle.strategy.gradients(handle.model)})

    def after_step(self: Any, handle: Any) -> None:
        rates.append(handle.optimizer.param_groups[0]["lr"])
        handle.scale_learning_rate(0.5)

    monkeypatch.setattr(run.recipe_type, "before_update", before_update)
    monkeypatch.setattr(run.recipe_type, "after_step", after_step)
    train(run)
    assert seen == [{"discriminator"}, {"generator"}] * 2
    assert rates == [1e-3, 5e-4]


def test_the_log_has_means_since_the_last_line(tmp_path: Path) -> None:
    every, rare = (
        train(gan(tmp_path / str(steps), "training.max_steps=3", f"logging.every={steps}")).metrics for steps in (1, 3)
    )
    lines = [json.loads(line) for line in (tmp_path / "1" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/generator_loss"] for line in lines if "train/generator_loss" in line]
    assert len(losses) == 3
    assert every["train/generator_loss"] == losses[-1]
    assert rare["train/generator_loss"] == pytest.approx(sum(losses[1:]) / 2, rel=1e-6)  # the first has its line


def test_a_recipe_builds_an_optimizer_for_each_objective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = gan(tmp_path)
    monkeypatch.setattr(run.recipe_type, "build_optimizer", lambda self, groups: torch.optim.RMSprop(groups))
    with SingleStrategy(device="cpu") as strategy:
        session = assemble(run.recipe_type(run.recipe_config), strategy, run.config.training, 0)
    names = {id(parameter): name.split(".")[0] for name, parameter in session.model.named_parameters()}
    for turn, rate in zip(session.turns, (1e-3, 5e-4), strict=True):
        assert isinstance(turn.optimizer, torch.optim.RMSprop)
        groups = turn.optimizer.param_groups
        assert {names[id(parameter)] for group in groups for parameter in group["params"]} == {turn.name}
        assert {group["initial_lr"] for group in groups} == {rate}


def test_the_report_names_what_is_unused_and_the_rates_of_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = gan(tmp_path, "training.max_steps=1")
    build_model = run.recipe_type.build_model

    def with_spare(self: Any) -> nn.Module:
        model = build_model(self)
        model.generator.spare = nn.Linear(1, 1, bias=False)
        model.generator.forward = lambda x: nn.Sequential(*[*model.generator][:-1])(x)
        return model

    def in_groups(self: Any, model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": model.generator.parameters()}, {"params": model.discriminator.parameters(), "lr": 2e-3}]

    monkeypatch.setattr(run.recipe_type, "build_model", with_spare)
    monkeypatch.setattr(run.recipe_type, "param_groups", in_groups)
    monkeypatch.setattr(run.recipe_type, "metric", lambda self: 0, raising=False)
    train(run)
    report = (tmp_path / "report.txt").read_text()
    assert "discriminator (6 tensors, learning rate 0.002, not" in report
    assert "RingGan.metric: nothing uses it; did you mean metrics?" in report
    (row,) = [line for line in report.splitlines() if "generator.spare.weight" in line]
    assert "discriminator" not in row
    assert "generator.0" not in row


def test_an_average_is_kept_and_statistics_of_an_average_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(gan(tmp_path / "ema", "training.max_steps=2", "callbacks=[ema]"))
    stored = open_checkpoint(tmp_path / "ema" / "checkpoints" / "step_00000002").read().callbacks
    assert len([name for name in stored if name.startswith("ema/")]) >= 12
    run = gan(tmp_path / "swa", "callbacks=[{name: swa, start_step: 1}]")
    build_model = run.recipe_type.build_model

    def with_norm(self: Any) -> nn.Module:
        model = build_model(self)
        model.generator.append(nn.BatchNorm1d(2))
        return model

    monkeypatch.setattr(run.recipe_type, "build_model", with_norm)
    with pytest.raises(UserError, match=r"callbacks.swa: .* several objectives \(discriminator, generator\)"):
        train(run)


def test_a_schedule_follows_the_sum_of_the_losses(tmp_path: Path) -> None:
    keys = ("training.lr_scheduler={name: plateau, patience: 0, min_ratio: 0.1}", "training.eval_steps=1")
    train(gan(tmp_path, *keys, "checkpoint.metric=eval/generator_loss", "checkpoint.keep_best=1"))
    noted = json.loads((tmp_path / "checkpoints" / "step_00000006" / "trainer.json").read_text())
    assert noted["schedule"]
    assert "eval/generator_loss" in noted["metrics"]
