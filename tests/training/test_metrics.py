"""Metrics of a user's recipe: exact over micro-batches, ranks and ragged ends, and the same after a restart."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ToyRun
from pool import Pool
from torch import Tensor

from shoal.checkpoint import open_checkpoint
from shoal.config import load_run
from shoal.config.schema import Config
from shoal.errors import UserError
from shoal.processes.world import World
from shoal.recipes import Recipe
from shoal.strategies import SingleStrategy, from_config
from shoal.strategies.measures import Measures
from shoal.training import train
from shoal.training.metric_objects import MetricObjects
from shoal.types import MicroBatch

METRICS = """
    seen = []

    def metrics(self, output, batch):
        self.seen.append(batch["x"].flatten().tolist())
        assert not torch.is_grad_enabled()
        return BODY

    def inputs("""
EXACT = '{"above": ((batch["y"] > 0.25).sum(), len(batch["y"])), "mean_x": batch["x"].mean()}'
FLOATS = '{"error": ((output - batch["y"]).abs().sum(), len(batch["y"])), "spread": output.std(correction=0)}'
OBJECTS = """
    def __init__(self, config=None):
        super().__init__(config)
        self.scores = {"mae": torchmetrics.MeanAbsoluteError(), "r2": [torchmetrics.SpearmanCorrCoef()]}
        self.top = torchmetrics.MaxMetric()

    def metrics(self, output, batch):
        self.scores["mae"].update(output, batch["y"])
        self.scores["r2"][0].update(output.flatten(), batch["y"].flatten())
        self.top.update(batch["x"])
        return {"mae": self.scores["mae"], "rank": self.scores["r2"][0], "top": self.top}

    def inputs("""

Change = Callable[[str, str], None]


@pytest.fixture
def measured(toy: ToyRun, change_recipe: Change) -> Callable[[str], ToyRun]:
    """Gives the toy recipe a method `metrics` that returns this expression."""

    def measure(body: str) -> ToyRun:
        change_recipe("    def inputs(", METRICS.replace("BODY", body))
        return toy

    return measure


@pytest.fixture
def with_objects(toy: ToyRun, change_recipe: Change) -> ToyRun:
    pytest.importorskip("torchmetrics")
    change_recipe("import torch\n", "import torch\nimport torchmetrics\n")
    change_recipe("    def inputs(", OBJECTS)
    return toy


def rows(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def values(output: Path, *names: str) -> list[dict[str, Any]]:
    """The lines of the log with the numbers that a restart and another machine repeat."""
    kept = [{name: value for name, value in row.items() if name in ("step", *names)} for row in rows(output)]
    return [row for row in kept if len(row) > 1]


def train_quietly(config: Path, overrides: list[str]) -> dict[str, float]:
    return train(load_run(config, [*overrides, "logging.console=off"])).metrics


def x_of(step: int, every: int) -> list[float]:
    """The samples x of the steps since the last line, from what the recipe saw."""
    import toy_recipe

    return [x for batch in toy_recipe.Toy.seen[step - every : step] for x in batch]


def test_a_line_has_the_exact_mean_since_the_last_one(measured: Callable[[str], ToyRun]) -> None:
    toy = measured(EXACT)
    toy.train("logging.every=4", "training.max_steps=8")
    above, mean_x = toy.metrics("train/above"), toy.metrics("train/mean_x")
    assert [*above] == [1, 4, 8]
    for step, every in ((1, 1), (4, 3), (8, 4)):
        x = x_of(step, every)
        assert above[step] == sum(one * one > 0.25 for one in x) / len(x)
        assert mean_x[step] == pytest.approx(sum(x) / len(x), rel=1e-6)
    whole = [i / 17 for i in range(17)]  # the last batch has one sample
    assert toy.metrics("eval/above") == {8: sum(x * x > 0.25 for x in whole) / 17}
    assert toy.metrics("eval/mean_x")[8] == pytest.approx(sum(whole) / 17, rel=1e-6)


def test_the_logged_loss_is_the_mean_since_the_last_line(toy: ToyRun) -> None:
    toy.train(f"experiment.output_dir={toy.folder}/each")
    toy.train("logging.every=5")
    each, means = toy.metrics(output=toy.folder / "each"), toy.metrics()
    assert means[1] == each[1]
    assert means[5] == pytest.approx(sum(each[step] for step in range(2, 6)) / 4, rel=1e-9)
    assert means[10] == pytest.approx(sum(each[step] for step in range(6, 11)) / 5, rel=1e-9)


def test_metrics_beside_the_loss(toy: ToyRun, change_recipe: Change) -> None:
    beside = '** 2).sum(), {"above": ((batch["y"] > 0.25).sum(), len(batch["y"]))}'
    change_recipe("** 2).sum()", beside)
    console = toy.call("train", str(toy.config), "training.max_steps=2", "logging.tensorboard=true").stdout
    (events,) = (toy.output / "tensorboard").iterdir()
    assert b"train/above" in events.read_bytes()
    assert b"eval/above" in events.read_bytes()
    assert 0 <= toy.metrics("eval/above")[2] <= 1
    assert f"eval above {toy.metrics('eval/above')[2]:.4g}" in console
    assert f"  above {toy.metrics('train/above')[2]:.4g}" in console


LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "ddp": (2, ["training.global_batch_size=12"]),
    "fsdp": (2, ["training.global_batch_size=12", "distributed.strategy=fsdp"]),
    "tp": (2, ["recipe=toy_recipe:Divisible", "distributed.strategy=mesh", "distributed.mesh.tp=2"]),
    "pp": (2, ["recipe=toy_recipe:Divisible", "distributed.strategy=mesh", "distributed.mesh={pp: 2, dp_shard: 1}"]),
    "zbv": (
        2,
        [
            *("recipe=toy_recipe:Deep", "distributed.strategy=mesh", "distributed.mesh={pp: 2, dp_shard: 1}"),
            *("distributed.pipeline.schedule=zbv", "training.batch_size=1"),
        ],
    ),
    "zero3": (
        2,
        [
            *("training.global_batch_size=12", "distributed.strategy=deepspeed", "distributed.zero_stage=3"),
            "distributed.deepspeed.stage3_param_persistence_threshold=0",
        ],
    ),
    "hybrid": (
        4,
        [
            *("distributed.strategy=fsdp", "distributed.fsdp.sharding_strategy=HYBRID_SHARD"),
            *("distributed.mesh.dp_replicate=2", "training.batch_size=1"),
        ],
    ),
}
DEEP = """

class Deep(Toy):
    def build_model(self):
        return nn.Sequential(*(nn.Linear(1, 1) for _ in range(4)))

    def parallel_plan(self, model):
        names = ("0", "1", "2", "3")
        return ParallelPlan(blocks=names, order=names, entry="input")
"""
SHORT = ["training.global_batch_size=12", "training.batch_size=2", "training.num_epochs=1", "training.max_steps=null"]
SHORT += ["dataset.size=29", "model.dropout=0", "logging.every=3", "checkpoint.every=null"]  # the last step has 5
NAMES = [f"{kind}/{name}" for kind in ("train", "eval") for name in ("above", "mean_x", "error")]


@pytest.mark.parametrize(
    "layout",
    ["ddp", "tp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp", "pp", "zbv", "zero3", "hybrid"))],
)
def test_every_layout_gives_the_metrics_of_one(
    request: pytest.FixtureRequest, measured: Callable[[str], ToyRun], layout: str
) -> None:
    toy = measured(EXACT[:-1] + ', "error": ((output - batch["y"]).abs().sum(), len(batch["y"]))}')
    recipe = toy.folder / "toy_recipe.py"
    recipe.write_text(recipe.read_text() + DEEP)
    if layout == "zero3":
        pytest.importorskip("deepspeed")
    size, options = LAYOUTS[layout]
    pool: Pool = request.getfixturevalue(f"pool{size}")
    model = [option for option in options if option.startswith("recipe=")]
    one = train_quietly(toy.config, [*SHORT, *model])
    ranks = pool.run(
        train_quietly, toy.config, [*SHORT, *options, f"experiment.output_dir={toy.folder}/many"], init=False
    )
    for name in NAMES:
        assert {metrics[name] for metrics in ranks} == {ranks[0][name]}
        assert ranks[0][name] == pytest.approx(one[name], rel=1e-5)
    assert ranks[0]["train/above"] == one["train/above"]  # counts have no rounding
    assert ranks[0]["eval/above"] == one["eval/above"]
    for row, other in zip(values(toy.output, *NAMES), values(toy.folder / "many", *NAMES), strict=True):
        assert row == pytest.approx(other, rel=1e-5)


RESUMED = ["logging.every=4", "checkpoint.every=3", "training.eval_steps=5", "training.gradient_accumulation=2"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_writes_the_same_lines(
    pool2: Pool, measured: Callable[[str], ToyRun], change_recipe: Change, ranks: int
) -> None:
    toy = measured(FLOATS)
    whole = toy.folder / "whole"
    for options in ([*RESUMED, f"experiment.output_dir={whole}"], RESUMED):
        if ranks == 1:
            toy.train(*options)
        else:
            pool2.run(train_quietly, toy.config, options, init=False)
    for step in (9, 10):
        shutil.rmtree(toy.output / "checkpoints" / f"step_{step:08d}")
    stored = open_checkpoint(toy.output / "checkpoints" / "step_00000006").trainer["since_log"]
    assert stored["metrics"]["error"][1] == 2 * 8 * ranks  # steps 5 and 6
    before = (toy.output / "metrics.jsonl").read_text().splitlines()
    if ranks == 1:
        toy.train(*RESUMED)
    else:
        pool2.run(train_quietly, toy.config, RESUMED, init=False)
    names = ["train/loss", "train/error", "train/spread", "eval/loss", "eval/error", "eval/spread"]
    assert values(toy.output, *names) == values(whole, *names)
    assert len(rows(toy.output)) == len(before)


def test_objects_are_computed_over_a_line_and_over_an_evaluation(with_objects: ToyRun) -> None:
    toy = with_objects
    toy.train("training.max_steps=4", "logging.every=4", "training.eval_steps=3", "training.batch_size=40")
    top = toy.metrics("train/top")
    assert [*top] == [1, 4]
    assert toy.metrics("eval/top") == {step: pytest.approx(16 / 17) for step in (3, 4)}  # not training's maximum
    assert top[4] > 0.97  # 120 of 103 samples: evaluating at step 3 did not lose what steps 2 and 3 had
    assert set(toy.metrics("eval/mae")) == set(toy.metrics("eval/rank")) == {3, 4}
    report = (toy.output / "report.txt").read_text()
    assert "Toy.metrics, with the torchmetrics objects scores.mae (MeanAbsoluteError), scores.r2.0 (Spearman" in report


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_objects_are_saved_with_the_run(pool2: Pool, with_objects: ToyRun, ranks: int) -> None:
    toy, names = with_objects, ["train/mae", "train/rank", "train/top", "eval/mae", "eval/rank"]
    options = [*RESUMED, f"experiment.output_dir={toy.folder}/whole"]

    def run(options: list[str]) -> None:
        if ranks == 1:
            toy.train(*options)
        else:
            pool2.run(train_quietly, toy.config, options, init=False)

    run(options)
    run([*RESUMED, "checkpoint.async_save=true"])  # the lists grow from one save to the next
    for step in (9, 10):
        shutil.rmtree(toy.output / "checkpoints" / f"step_{step:08d}")
    stored = open_checkpoint(toy.output / "checkpoints" / "step_00000006").stored_state().strategy
    assert f"metrics.scores.mae.sum_abs_error.0-of-{ranks}" in stored
    run(RESUMED)
    assert values(toy.output, *names) == values(toy.folder / "whole", *names)


@pytest.mark.slow  # importing torchmetrics takes seconds in every process
def test_objects_over_ranks_have_all_samples_once(pool2: Pool, with_objects: ToyRun) -> None:
    one = train_quietly(with_objects.config, SHORT)
    options = [*SHORT, f"experiment.output_dir={with_objects.folder}/two"]
    first, second = pool2.run(train_quietly, with_objects.config, options, init=False)
    for name in ("train/mae", "train/rank", "train/top", "eval/mae", "eval/rank", "eval/top"):
        assert first[name] == second[name] == pytest.approx(one[name], rel=1e-4), name


@pytest.mark.slow
def test_a_run_with_objects_moves_to_another_number_of_ranks(pool2: Pool, with_objects: ToyRun) -> None:
    toy, options = with_objects, [*SHORT[1:], "training.global_batch_size=4", "checkpoint.every=5", "logging.every=7"]
    one = train_quietly(toy.config, [*options, f"experiment.output_dir={toy.folder}/one"])
    pool2.run(train_quietly, toy.config, options, init=False)
    shutil.rmtree(toy.output / "checkpoints" / "step_00000008")
    train_quietly(toy.config, options)
    for name in ("train/mae", "train/rank", "train/top"):
        assert toy.metrics(name)[7] == pytest.approx(toy.metrics(name, toy.folder / "one")[7], rel=1e-4), name
    assert one["train/top"] == pytest.approx(toy.metrics("train/top")[8])


MEAN = "        self.top = torchmetrics.MaxMetric()\n        self.top.add_state('n', torch.zeros(()), 'mean')\n"


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        (MEAN, r"top \(MaxMetric\) keeps the state 'n' with dist_reduce_fx mean, which cannot be saved"),
        ("        self.top = torchmetrics.MinMaxMetric(torchmetrics.MeanMetric())\n", r"top \(MinMaxMetric\) wraps"),
        ("        self.top = torchmetrics.MetricCollection([torchmetrics.MaxMetric()])\n", "MetricCollection.* dict"),
        ("        self.top = torchmetrics.MaxMetric(dist_sync_on_step=True)\n", "dist_sync_on_step=True"),
    ],
)
def test_objects_that_cannot_be_added_up_are_refused(
    with_objects: ToyRun, change_recipe: Change, attribute: str, words: str
) -> None:
    change_recipe("        self.top = torchmetrics.MaxMetric()\n", attribute)
    with pytest.raises(UserError, match=words):
        with_objects.train()


def test_an_object_that_nobody_would_find_is_refused(with_objects: ToyRun, change_recipe: Change) -> None:
    change_recipe('"top": self.top}', '"top": torchmetrics.MaxMetric()}')
    with pytest.raises(UserError, match=r"'top' is a MaxMetric that was no attribute of the recipe"):
        with_objects.train()


def test_any_metric_decides_which_checkpoint_is_best(measured: Callable[[str], ToyRun]) -> None:
    toy = measured('{"bias": (output.sum(), len(output))}')
    options = ["checkpoint.keep_best=1", "checkpoint.keep_last=1", "training.eval_steps=2", "checkpoint.mode=max"]
    outcome = toy.train(*options, "checkpoint.metric=eval/bias")
    bias = toy.metrics("eval/bias")
    assert outcome.best_step == max(bias, key=lambda step: bias[step])
    with pytest.raises(UserError, match=r"'eval/bais': an evaluation does not give it; it gives eval/bias") as refused:
        toy.train(*options, "checkpoint.metric=eval/bais", f"experiment.output_dir={toy.folder}/other")
    assert "\n" not in str(refused.value)
    assert not (toy.folder / "other" / "checkpoints").exists()  # before training
    with pytest.raises(UserError, match=r"'train/bias': an evaluation does not give it"):
        toy.train(*options, "checkpoint.metric=train/bias", f"experiment.output_dir={toy.folder}/third")


def test_several_sets_are_evaluated_by_name(measured: Callable[[str], ToyRun], change_recipe: Change) -> None:
    toy = measured(EXACT)
    change_recipe("return Squares(17)", 'return {"small": Squares(5), "large": Squares(17)}')
    best = ["checkpoint.keep_best=1", "training.max_steps=4", "training.eval_steps=2"]
    with pytest.raises(UserError, match=r"'eval/loss': an evaluation does not give it; it gives eval/small/loss"):
        toy.train(*best)
    outcome = toy.train(*best, "checkpoint.metric=eval/large/loss")
    assert "eval/loss" not in outcome.metrics
    assert toy.metrics("eval/large/loss").keys() == toy.metrics("eval/small/loss").keys() == {2, 4}
    assert outcome.metrics["eval/small/above"] == 2 / 5  # 0.6 and 0.8
    assert outcome.metrics["eval/large/above"] == sum((i / 17) ** 2 > 0.25 for i in range(17)) / 17
    assert outcome.best_step in (2, 4)
    assert "sets small, large" in (toy.output / "report.txt").read_text()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("[1]", r"recipe Toy: metrics returned a Python list; return a dict"),
        ('{"a": 0.5}', r"recipe Toy: the metric 'a' is a Python float; return \(sum, count\)"),
        (
            '{"a": (0.5, 2)}',
            r"the metric 'a' has a wrong value: it is a Python float; return a tensor instead of .item",
        ),
        (
            '{"a": output}',
            r"the metric 'a' has a wrong value: it is a tensor of shape \[4, 1\]; it should be one number",
        ),
        ('{"a": (output.sum(), output)}', r"the count of it is a tensor of shape \[4, 1\]"),
        ('{"a b": output.sum()}', r"the metric 'a b' is no good name; use letters, digits"),
        ('{"grad_norm": output.sum()}', r"'grad_norm' is the name of a number that every run logs"),
    ],
)
def test_bad_metrics_are_refused_by_name(measured: Callable[[str], ToyRun], body: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as refused:
        measured(body).train()
    assert "\n" not in str(refused.value)


def test_metrics_of_logits_that_do_not_exist_are_refused(measured: Callable[[str], ToyRun]) -> None:
    with pytest.raises(
        UserError, match=r"training.loss_chunks = 2: the head gives the loss and no logits for Toy.metr"
    ):
        measured(EXACT).train("training.loss_chunks=2")


def test_a_metric_may_be_a_view_or_be_changed_later(measured: Callable[[str], ToyRun]) -> None:
    """A number that the recipe goes on changing is the one that it was when it was returned."""
    toy = measured('{"calls": (self.count_calls(), 1)}')
    recipe = toy.folder / "toy_recipe.py"
    counting = "    calls = torch.zeros(3)\n\n    def count_calls(self):\n"
    counting += "        self.calls += 1\n        return self.calls[0]\n"
    recipe.write_text(recipe.read_text().replace("    seen = []\n", f"    seen = []\n{counting}"))
    toy.train("logging.every=2", "training.max_steps=4")
    assert toy.metrics("train/calls") == {1: 1, 2: 2, 4: 3.5}


def test_empty_micro_batches_do_not_spoil_a_mean(measured: Callable[[str], ToyRun], change_recipe: Change) -> None:
    toy = measured('{"mean": batch["x"][batch["x"] > 0.5].mean()}')
    change_recipe(
        "    def inputs(", '    def count(self, batch):\n        return (batch["x"] > 0.5).sum()\n\n    def inputs('
    )
    toy.train("training.batch_size=1", "training.gradient_accumulation=8", "training.max_steps=2")
    assert all(0.5 < value < 1 for value in toy.metrics("train/mean").values())


def test_fillers_are_not_measured(pool2: Pool, measured: Callable[[str], ToyRun]) -> None:
    toy = measured('{"samples": (len(batch["x"]), 1), "x": (batch["x"].sum(), 1)}')
    options = ["dataset.size=5", "training.num_epochs=1", "training.max_steps=null", "training.global_batch_size=4"]
    options += ["training.batch_size=2"]
    pool2.run(train_quietly, toy.config, options, init=False)
    # No step has a single sample, so the steps have 3 and 2. The second rank has fillers of 2 samples alone.
    assert toy.metrics("train/samples") == {1: 3.0, 2: 2.0}


class OnMeta(Recipe):
    def loss(self, output: Tensor, batch: Any) -> Any:
        return output.sum(), {"largest": output.max()}

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Any]:
        return {"mean": output.mean(), "above": ((output > 0).sum(), len(output)), "of": (3, output.count_nonzero())}


def test_nothing_waits_for_the_device() -> None:
    """Tensors on meta have no values, so whoever reads one fails."""
    micro = MicroBatch(None, [0], [0])
    for count in (4, torch.ones((), device="meta", dtype=torch.int64)):
        measures = Measures(OnMeta(), [micro, micro], [count, count])
        for index in range(2):
            measures.loss(torch.ones(4, device="meta", requires_grad=True), None, index)
        assert measures.by_name.keys() == {"largest", "mean", "above", "of"}
        tensors = [number for pair in measures.by_name.values() for number in pair if isinstance(number, Tensor)]
        assert {(one.device.type, one.requires_grad) for one in tensors} == {("meta", False)}
        assert {one.dtype for one in tensors} <= {torch.float64, torch.int64}


def test_objects_of_two_ranks_go_on_as_one(toy: ToyRun) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    recipe = Recipe()
    recipe.sum, recipe.max, recipe.all = torchmetrics.SumMetric(), torchmetrics.MaxMetric(), torchmetrics.CatMetric()
    objects = MetricObjects(recipe, SingleStrategy(device="cpu"))
    stored = {"metrics.sum.sum_value.0-of-2": torch.tensor(3.0), "metrics.sum.sum_value.1-of-2": torch.tensor(4.0)}
    stored |= {"metrics.max.max_value.0-of-2": torch.tensor(3.0), "metrics.max.max_value.1-of-2": torch.tensor(2.0)}
    stored |= {"metrics.all.value.1-of-2": torch.tensor([4.0])}  # rank 0 had an empty list
    objects.load(stored)
    assert objects.compute({"s": "sum", "m": "max", "a": "all"}) == {"s": 7.0, "m": 3.0, "a": 4.0}
    recipe.sum.sum_value = torch.tensor(9.0)
    assert objects.compute({"s": "sum"}) == {"s": 9.0}  # not a cached value: other ranks would wait for this one
    objects.load({"metrics.sum.sum_value.0-of-1": torch.zeros(2)})  # of another shape
    assert recipe.sum.metric_state["sum_value"].tolist() == 0


@pytest.mark.parametrize(
    ("mesh", "reports"),
    [
        ({"tp": 2}, [True, False]),
        ({"pp": 2}, [False, True]),
        ({"pp": 2, "schedule": "zbv"}, [True, False]),
        ({"cp": 2}, [True, True]),
        ({"dp_shard": 2}, [True, True]),
    ],
)
def test_each_sample_is_reported_by_one_rank(mesh: dict[str, Any], reports: list[bool]) -> None:
    sides, schedule = {key: value for key, value in mesh.items() if key != "schedule"}, mesh.get("schedule", "1f1b")
    tree = {"strategy": "mesh", "mesh": {"dp_shard": 1, **sides}, "pipeline": {"schedule": schedule}}
    config = Config.model_validate(
        {"recipe": "bdh", "training": {"max_steps": 1, "device": "cpu"}, "distributed": tree}
    )
    assert [from_config(config, World(rank, 2)).reports_metrics for rank in range(2)] == reports
