"""What a step computes, and what the loop does around it."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import math
import re
import sys
import types
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ToyRun
from pool import Pool
from torch import nn

from shoal.config import load_run
from shoal.config.schema import TrainingConfig
from shoal.errors import UserError
from shoal.recipes import Recipe
from shoal.strategies import SingleStrategy
from shoal.training import train
from shoal.training.meter import Meter
from shoal.training.optimizers import build_optimizer
from shoal.training.schedules import build_schedule
from shoal.types import MicroBatch, ParallelPlan


class Words(Recipe):
    """Sequences of different lengths: the count is tokens, not samples."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))

    def inputs(self, batch: Any) -> dict[str, Any]:
        return {"input": batch["input_ids"]}

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def words(size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 11, (size, 5), generator=generator)
    labels = ids.roll(-1, 1)
    for row in range(size):
        labels[row, 1 + row % 5 :] = -100  # ragged: 1 to 5 labels
    return {"input_ids": ids, "labels": labels}


def pieces(batch: dict[str, torch.Tensor], sizes: list[int]) -> list[MicroBatch]:
    start, made = 0, []
    for size in sizes:
        data = {key: value[start : start + size] for key, value in batch.items()}
        made.append(MicroBatch(data, [0] * size, list(range(start, start + size))))
        start += size
    return made


def gradients(micro_batches: list[MicroBatch]) -> tuple[list[torch.Tensor], float]:
    recipe, strategy = Words(), SingleStrategy(device="cpu")
    torch.manual_seed(0)
    model = recipe.build_model()
    model, _ = strategy.prepare(model, lambda model: torch.optim.SGD(model.parameters()), ParallelPlan())
    output = strategy.forward_backward(model, micro_batches, recipe, step=0)
    return [p.grad for p in model.parameters() if p.grad is not None], output.loss.item()


@pytest.mark.parametrize("sizes", [[7, 5], [4, 4, 4], [5, 5, 2], [1] * 12])
def test_splitting_a_ragged_batch_changes_nothing(sizes: list[int]) -> None:
    """A forgotten 1/accumulation, or a mean of means, is far outside this bound."""
    batch = words(12)
    whole, loss = gradients(pieces(batch, [12]))
    split, split_loss = gradients(pieces(batch, sizes))
    assert split_loss == pytest.approx(loss, rel=1e-6)
    for a, b in zip(whole, split, strict=True):
        assert (a - b).norm() <= 1e-6 * a.norm()
    model = Words().build_model()
    torch.manual_seed(0)
    model = Words().build_model()
    mean = nn.functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
    assert loss == pytest.approx(mean.item(), rel=1e-6)


def test_a_filler_micro_batch_counts_for_nothing() -> None:
    batch = words(4)
    filler = MicroBatch({key: value[:2] for key, value in batch.items()}, [0, 0], [0, 1], weight=0)
    whole, loss = gradients(pieces(batch, [4]))
    filled, filled_loss = gradients([*pieces(batch, [2, 2]), filler])
    assert filled_loss == pytest.approx(loss, rel=1e-6)
    for a, b in zip(whole, filled, strict=True):
        assert (a - b).norm() <= 1e-6 * a.norm()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_non_finite_gradient_skips_the_whole_update(optimizer: str) -> None:
    training = TrainingConfig(max_steps=1, optimizer=optimizer, weight_decay=0.5)  # type: ignore[arg-type]
    model = nn.Linear(3, 2)
    strategy = SingleStrategy(device="cpu")
    model, built = strategy.prepare(
        model, lambda m: build_optimizer(training, [{"params": list(m.parameters())}]), ParallelPlan()
    )
    model(torch.ones(1, 3)).sum().backward()
    info = strategy.step(built, 1.0)
    assert info.skipped.item() == 0
    before = copy.deepcopy([p.detach() for p in model.parameters()])
    moments = copy.deepcopy({k: v for s in built.state.values() for k, v in s.items()})
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is not None
    model.weight.grad[0, 0] = math.nan
    info = strategy.step(built, 1.0)
    assert info.skipped.item() == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    after = {k: v for s in built.state.values() for k, v in s.items()}
    assert all(torch.equal(moments[k], after[k]) for k in moments)
    assert all(p.grad is None for p in model.parameters())


def test_clipping_and_the_reported_norm() -> None:
    training = TrainingConfig(max_steps=1, optimizer="sgd", learning_rate=1.0, weight_decay=0.0)  # type: ignore[arg-type]
    strategy = SingleStrategy(device="cpu")
    model, optimizer = strategy.prepare(
        nn.Linear(2, 1, bias=False), lambda m: build_optimizer(training, [{"params": list(m.parameters())}])
    )
    before = model.weight.detach().clone()
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    info = strategy.step(optimizer, max_norm=0.5)
    assert info.grad_norm.item() == pytest.approx(5.0)
    assert torch.allclose(before - model.weight, torch.tensor([[0.3, 0.4]]), atol=1e-5)


def test_many_skips_in_a_row_stop_the_run_and_name_the_module(
    toy: ToyRun, change_recipe: Callable[[str, str], None]
) -> None:
    change_recipe("nn.Tanh()", "Log()")
    change_recipe(
        "class Toy", "class Log(nn.Module):\n    def forward(self, x):\n        return (x - 100).log()\n\n\nclass Toy"
    )
    with pytest.raises(UserError, match=r"last 3 updates were skipped .* the output of 1 \(Log\)"):
        toy.train("training.max_skipped_steps=3")
    steps = toy.metrics("train/skipped_steps")
    assert steps[3] == 3


def test_skips_in_a_row_are_counted_over_restarts(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe(".sum()\n", '.sum() * float("nan")\n')
    for steps in (1, 2):
        toy.train("training.max_skipped_steps=3", f"training.max_steps={steps}")
    with pytest.raises(UserError, match="the last 3 updates were skipped"):
        toy.train("training.max_skipped_steps=3")
    assert max(toy.metrics()) == 3


def test_a_config_that_cannot_be_written_anew_stays(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.train("training.max_steps=1")
    before = (toy.output / "config.yaml").read_bytes()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shoal.observe.loggers.os.fsync", full)
    with pytest.raises(UserError, match=r"cannot be written.*No space left on device"):
        toy.train("training.max_steps=2", "logging.jsonl=false")
    assert (toy.output / "config.yaml").read_bytes() == before


def test_a_few_skips_are_counted_and_survived(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe(".sum()\n", '.sum() * (float("nan") if (batch["x"] == 0).any() else 1.0)\n')
    assert toy.train("dataset.size=20").step == 10
    assert toy.metrics("train/skipped_steps")[10] == 2  # 40 samples: sample 0 came by twice


@pytest.mark.parametrize("every", [1, 100])
def test_weights_that_are_not_finite_stop_the_run_and_replace_no_checkpoint(
    toy: ToyRun, change_recipe: Callable[[str, str], None], every: int
) -> None:
    """The gradient is finite in the step that spoils them, so no update is skipped."""
    toy.train("training.max_steps=2", "training.optimizer=sgd")
    keys = ["training.max_steps=6", "training.optimizer=sgd", f"checkpoint.every={every}", "checkpoint.keep_last=1"]
    with pytest.raises(UserError, match=r"parameter \d\.\w+ is not finite after step \d.* checkpoint is of step 2"):
        toy.train(*keys, "training.learning_rate=3e38", "training.weight_decay=100")
    assert [path.name for path in (toy.output / "checkpoints").iterdir()] == ["step_00000002"]
    assert toy.train(*keys).first_step == 2


def test_skipped_updates_are_told_at_the_end(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe(".sum()\n", '.sum() * float("nan")\n')
    result = toy.call("train", "run.yaml", "training.max_steps=3")
    assert result.returncode == 0, result.stderr
    assert "3 of 3 updates were skipped because their gradient was not finite" in result.stdout
    assert "1 update skipped" in result.stdout
    assert "2 updates skipped" in result.stdout


def test_the_report_tells_what_an_update_does(toy: ToyRun) -> None:
    toy.train("training.max_steps=2", "training.warmup_ratio=0.5", "training.max_grad_norm=null")
    report = (toy.output / "report.txt").read_text()
    assert "weight decay 0.1 and 0, not clipped" in report
    assert "warmup" in report


def report_of(config: Path, *overrides: str) -> str:
    run = load_run(config, overrides)
    train(run)
    return (Path(run.config.output_dir) / "report.txt").read_text()


def test_a_batch_that_depends_on_the_number_of_processes_is_told(toy: ToyRun, pool2: Pool) -> None:
    warned = "training.global_batch_size = 8 is set"
    steps = "training.max_steps=1"
    assert warned in pool2.run(report_of, toy.config, steps, f"experiment.output_dir={toy.folder}/a", init=False)[0]
    batch = "training.global_batch_size=8"
    assert warned not in pool2.run(report_of, toy.config, steps, batch, init=False)[0]


def test_a_loss_that_is_no_number_is_refused(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe("** 2).sum()", "** 2)")
    with pytest.raises(UserError, match=r"loss has shape \[4, 1\]"):
        toy.train()


def test_the_last_step_is_logged(toy: ToyRun) -> None:
    toy.train("logging.every=4")
    assert sorted(toy.metrics()) == [1, 4, 8, 10]


def test_schedules() -> None:
    def factors(total: int = 10, **keys: Any) -> list[float]:
        schedule = build_schedule(TrainingConfig(max_steps=total, **keys), total)
        return [round(schedule(step), 4) for step in range(total)]

    assert factors(lr_scheduler="constant") == [1.0] * 10
    assert factors(lr_scheduler="constant_with_warmup", warmup_steps=3)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    linear = factors(lr_scheduler="linear")
    assert linear == [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]  # the last step still trains
    cosine = factors(lr_scheduler={"name": "cosine", "min_ratio": 0.2})
    assert (cosine[0], cosine[5]) == (1.0, 0.6)
    assert cosine[9] == pytest.approx(0.2 + 0.8 * (1 + math.cos(0.9 * math.pi)) / 2, abs=1e-4)
    wsd = factors(lr_scheduler={"name": "wsd", "decay_ratio": 0.4}, warmup_ratio=0.2)
    assert wsd[2:7] == [1.0] * 5
    assert wsd[-1] == 0.25
    assert sorted(wsd[6:], reverse=True) == wsd[6:]


def test_the_learning_rate_is_stepped_once_per_update(toy: ToyRun) -> None:
    toy.train("training.gradient_accumulation=3", "training.lr_scheduler={name: linear}", "training.warmup_steps=0")
    rates = toy.metrics("train/learning_rate")
    assert [rates[step] for step in range(1, 11)] == pytest.approx([1e-2 * (1 - i / 10) for i in range(10)])


def test_epochs_see_every_sample_that_many_times(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe("x = torch", "open('seen.txt', 'a').write(f'{i}\\n'); x = torch")
    result = toy.call("train", "run.yaml", "training.max_steps=null", "training.num_epochs=2", "dataset.size=10")
    assert result.returncode == 0, result.stderr
    seen = [int(line) for line in (toy.folder / "seen.txt").read_text().split()]
    train_part = seen[:20]
    assert sorted(train_part[:10]) == sorted(train_part[10:]) == list(range(10))
    assert train_part[:10] != train_part[10:]
    assert max(toy.metrics()) == 5  # 20 samples in batches of 4, the epochs laid end to end


def test_an_accumulation_schedule_changes_at_its_epoch(toy: ToyRun) -> None:
    toy.train(
        "training.max_steps=null",
        "training.num_epochs=3",
        "dataset.size=16",
        "training.gradient_accumulation={0: 2, 1: 1}",
    )
    epochs = toy.metrics("train/epoch")
    assert [epochs[step] * 16 for step in sorted(epochs)] == [8, 16, 20, 24, 28, 32, 36, 40, 44, 48]


def test_evaluation_runs_when_due_and_does_not_disturb_training(toy: ToyRun) -> None:
    toy.train()
    plain = toy.metrics()
    other = toy.folder / "other"
    toy.train("training.eval_steps=3", f"experiment.output_dir={other}")
    assert sorted(toy.metrics("eval/loss", output=other)) == [3, 6, 9, 10]
    assert toy.metrics(output=other) == plain


def test_bf16_is_near_and_engages(toy: ToyRun) -> None:
    toy.train("model.dropout=0.0")  # a GPU draws other dropout masks in bf16
    other = toy.folder / "other"
    toy.train("model.dropout=0.0", "training.mixed_precision=bf16", f"experiment.output_dir={other}")
    exact, rounded = toy.metrics(), toy.metrics(output=other)
    assert rounded != exact
    assert rounded[1] == pytest.approx(exact[1], rel=0.05)
    assert "bf16" in (other / "report.txt").read_text()


def test_bf16_that_does_not_engage_is_refused(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe("return nn.Sequential(", "return Stubborn(")
    change_recipe(
        "class Toy",
        "class Stubborn(nn.Sequential):\n    def forward(self, input):\n"
        "        with torch.autocast('cpu', enabled=False):\n            return super().forward(input)\n\n\nclass Toy",
    )
    with pytest.raises(UserError, match=r"mixed_precision = bf16, but nothing"):
        toy.train("training.mixed_precision=bf16")


def test_the_report_says_who_set_what(toy: ToyRun) -> None:
    toy.train("training.learning_rate=0.5", "dataset.prefetch=3")
    report = (toy.output / "report.txt").read_text()
    assert "learning rate 0.5" in report
    assert "command line" in report
    assert "run.yaml:3" in report
    assert "dataset.prefetch: dataset.num_workers is 0" in report
    assert "drawn by name" in report


def test_the_report_says_that_weights_were_left_empty(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe(
        "    def build_model(", "    def weights(self):\n        return Weights('empty')\n\n    def build_model("
    )
    change_recipe("class Toy", "from shoal.types import Weights\n\n\nclass Toy")
    with contextlib.suppress(UserError):  # what is in the memory may not be finite
        toy.train("training.max_steps=1")
    report = (toy.output / "report.txt").read_text()
    assert "left empty: memory without values" in report
    assert "drawn by name" not in report


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic(toy: ToyRun, monkeypatch: pytest.MonkeyPatch, deterministic: bool) -> None:
    in_backward: list[bool] = []
    backward = torch.Tensor.backward

    def look(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
        in_backward.append(torch.are_deterministic_algorithms_enabled())
        backward(tensor, *args, **options)

    monkeypatch.setattr(torch.Tensor, "backward", look)
    toy.train(f"experiment.deterministic={deterministic}")
    assert in_backward == [deterministic] * 10
    assert not torch.are_deterministic_algorithms_enabled()
    report = (toy.output / "report.txt").read_text()
    assert bool(re.search(r"^deterministic +yes ", report, re.M)) == deterministic


def test_garbage_is_collected_every_so_many_steps(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []
    enabled: list[bool] = []
    add = Meter.add  # which is called once in every step

    def look(meter: Meter, *args: Any) -> None:
        enabled.append(gc.isenabled())
        add(meter, *args)

    monkeypatch.setattr(Meter, "add", look)
    monkeypatch.setattr(gc, "collect", lambda generation=2: collected.append(generation))
    toy.train("training.gc_steps=3")
    assert collected == [2, 1, 1, 1]  # all before the first step, then the young after steps 3, 6 and 9
    assert enabled == [False] * 10
    assert gc.isenabled()


@pytest.mark.parametrize("nesterov", [True, False])
def test_nesterov_moves_weights_as_torch_does(toy: ToyRun, nesterov: bool) -> None:
    key = f"training.optimizer={{name: sgd, momentum: 0.9, nesterov: {nesterov}}}"
    training = load_run(toy.config, [key]).config.training
    ours, theirs, unlike = (nn.Parameter(torch.ones(3)) for _ in range(3))
    options = {"lr": training.learning_rate, "momentum": 0.9, "weight_decay": training.weight_decay}
    optimizers = [
        build_optimizer(training, [{"params": [ours]}]),
        torch.optim.SGD([theirs], nesterov=nesterov, **options),
        torch.optim.SGD([unlike], nesterov=not nesterov, **options),
    ]
    for _ in range(3):
        for parameter, optimizer in zip((ours, theirs, unlike), optimizers, strict=True):
            optimizer.zero_grad()
            parameter.square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours, theirs)
    assert not torch.allclose(ours, unlike)


def test_streams_train_and_resume(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe(
        "        return Squares(self.config.dataset.size)",
        "        return Stream()",
    )
    change_recipe(
        "class Toy",
        "class Stream:\n    def open(self, start):\n        for i in range(start, 39):\n"
        "            yield Squares(100)[i]\n\n\nclass Toy",
    )
    outcome = toy.train("training.max_steps=50")
    assert outcome.step == 10  # 39 samples in batches of 4: the stream ends the run
    with pytest.raises(UserError, match="num_epochs needs data with a length"):
        toy.train("training.max_steps=null", "training.num_epochs=2")


def test_few_frames_between_the_loop_and_backward(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    depths: list[list[str]] = []
    original = torch.Tensor.backward

    def spy(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        frame: types.FrameType | None = sys._getframe(1)
        ours = []
        while frame:
            if "/shoal/" in frame.f_code.co_filename:
                ours.append(frame.f_code.co_name)
            frame = frame.f_back
        depths.append(ours)
        original(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "backward", spy)
    toy.train()
    assert depths[-1][: depths[-1].index("fit") + 1] == ["forward_backward", "forward_backward", "take_step", "fit"]


def test_a_user_recipe_without_a_piece_says_which(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe("def loss", "def losss")
    with pytest.raises(UserError, match="Toy needs loss"):
        toy.train()


def test_metrics_file_has_what_was_promised(toy: ToyRun) -> None:
    train(load_run(toy.config))
    row = json.loads((toy.output / "metrics.jsonl").read_text().splitlines()[0])
    for key in ("loss", "learning_rate", "grad_norm", "samples_per_second", "memory_gib", "data_seconds"):
        assert f"train/{key}" in row


GROUPS = "    def param_groups(self, model):\n        return {groups}\n\n    def inputs("


def test_parameters_in_no_group_are_frozen_and_named(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe("    def inputs(", GROUPS.format(groups="[*model[3].parameters(), model[0].bias]"))
    model = toy.train("training.max_steps=3").model
    assert [name for name, p in model.named_parameters() if p.grad is not None] == []
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["0.weight"]
    report = (toy.output / "report.txt").read_text()
    assert re.search(r"^train nothing +0\.weight \(1 in all\): in no parameter group, so frozen$", report, re.M)
    assert "33 parameters, 16 frozen" in report


@pytest.mark.parametrize(
    ("groups", "where"),
    [
        ("[{'params': model.parameters()}, {'params': [model[3].bias]}]", "groups 0 and 1"),
        ("[{'params': [*model.parameters(), model[3].bias]}]", "group 0 twice"),
        ("[{'params': [('a', model[3].bias)]}, {'params': model.named_parameters()}]", "groups 0 and 1"),
    ],
)
def test_a_parameter_in_two_groups_is_refused_by_name(
    toy: ToyRun, change_recipe: Callable[[str, str], None], groups: str, where: str
) -> None:
    change_recipe("    def inputs(", GROUPS.format(groups=groups))
    with pytest.raises(UserError, match=rf"param_groups: 3\.bias is in {where} and would be updated twice"):
        toy.train()


def test_the_rate_of_samples_is_one_of_samples(
    toy: ToyRun, change_recipe: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where `count` counts something else, such as labels. Each look at the clock takes a second here."""
    change_recipe(
        "    def inputs(self, batch):",
        "    def count(self, batch):\n        return 100 * len(batch['x'])\n\n    def inputs(self, batch):",
    )
    seconds = count()
    monkeypatch.setattr("shoal.training.meter.time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    toy.train("training.max_steps=2", "logging.every=1", "training.batch_size=4", "training.global_batch_size=4")
    assert 0 < max(toy.metrics("train/samples_per_second").values()) <= 4
