"""Recordings of micro-batches, by a tape of operations on the CPU. `tests/gpu` has CUDA graphs."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from conftest import ToyRun
from strategies.tape import Tape
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.config.layout import layout_of
from shoal.config.schema import TrainingConfig
from shoal.config.schema_distributed import DistributedConfig
from shoal.errors import UserError
from shoal.recipes import Recipe
from shoal.seeding import mix
from shoal.strategies import Loop, SingleStrategy
from shoal.strategies.cuda_graph import RECORDING, check_host_generators, contents_of
from shoal.strategies.engines.plain import PlainEngine
from shoal.strategies.executors import Surroundings
from shoal.strategies.recorded import Expected, Recorded, Recording, _compare
from shoal.tensors import map_tensors
from shoal.training.optimizers import build_optimizer
from shoal.types import MicroBatch, StepOutput
from shoal.weights import build


def recorded_of(model: nn.Module) -> Recorded:
    layout, cpu = layout_of(TrainingConfig(max_steps=1), DistributedConfig(), 1, 1), torch.device("cpu")
    engine = PlainEngine(layout, cpu, None, "sum")
    return Recorded(engine, Surroundings(cpu, "fp32", mix(0), (0,), None), model)


CHANGES: dict[str, Callable[[nn.Sequential, dict[str, Any]], Any]] = {
    "a frozen parameter": lambda model, batch: model[0].weight.requires_grad_(False),
    "other memory": lambda model, batch: setattr(model[0].weight, "data", model[0].weight.data.clone()),
    "a buffer": lambda model, batch: model[2].register_buffer("running_mean", torch.ones(3)),
    "another mode": lambda model, batch: model.eval(),
    "the mode of a part": lambda model, batch: model[2].eval(),
    "another dropout": lambda model, batch: setattr(model[1], "p", 0.25),
    "another length": lambda model, batch: batch.update(x=torch.zeros(2, 5)),
    "another type": lambda model, batch: batch.update(x=torch.zeros(2, 4, dtype=torch.float64)),
    "other numbers that the host can read": lambda model, batch: batch.update(x=torch.ones(2, 4)),
    "another option": lambda model, batch: batch.update(scale=3),
    "an equal option of another type": lambda model, batch: batch.update(scale=2.0),
    "another nesting": lambda model, batch: batch.update(scale=[2]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_recording_is_for_one_state_of_the_model_and_one_kind_of_batch(change: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.BatchNorm1d(3))
    batch: dict[str, Any] = {"x": torch.zeros(2, 4), "scale": 2}
    recorded = recorded_of(model)

    def kind(batch: dict[str, Any]) -> Any:
        return recorded._state(), [*contents_of(batch, torch.device("cuda"))]

    before = kind(batch)
    assert before == kind({"x": torch.zeros(2, 4), "scale": 2})
    CHANGES[change](model, batch)
    assert before != kind(batch)


class Batch:
    """As some libraries have them; a copy of its tensors cannot be made without knowing it."""

    x = torch.zeros(2)


@pytest.mark.parametrize(
    ("content", "kind"),
    [(Batch(), "Batch"), (torch.eye(2).to_sparse(), "sparse or nested tensor"), ({"a": [np.zeros(2)]}, "ndarray")],
)
def test_batches_that_cannot_be_copied_are_refused(content: Any, kind: str) -> None:
    with pytest.raises(UserError, match=f"the batch holds an? {kind}, which a recording cannot copy"):
        [*contents_of(content, torch.device("cpu"))]


def test_a_recording_is_compared_often_at_first_and_then_now_and_then() -> None:
    recording = Recording(Tape(), None, [], torch.ones(()), cast(Any, None), [], torch.ones(()), None, None)
    due = [used for used in range(1, 1030) if (setattr(recording, "num_uses", used), recording.is_due())[1]]
    assert due == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024]


def test_python_state_and_loops_of_ones_own_are_refused() -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> Any:
            return {}

        def set_extra_state(self, state: Any) -> None:
            pass

    with pytest.raises(UserError, match="is Python state"):
        recorded_of(nn.Sequential(Counting(2, 2)))
    with pytest.raises(UserError, match="a loop of your own computes them itself"):
        Loop(SingleStrategy(device="cpu", cuda_graphs=True)).wrap(nn.Linear(2, 2), build_sgd)


def build_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("draw", ["random.random()", "numpy.random.rand()", "torch.rand(1)"])
def test_draws_on_the_host_are_refused(draw: str) -> None:
    surroundings = recorded_of(nn.Linear(1, 1)).surroundings
    surroundings.seed(*RECORDING)
    check_host_generators(surroundings)
    surroundings.seed(*RECORDING)
    eval(draw, {"random": __import__("random"), "numpy": __import__("numpy"), "torch": torch})
    with pytest.raises(UserError, match="draws random numbers on the host"):
        check_host_generators(surroundings)


@pytest.mark.parametrize(
    ("distributed", "training", "size", "said"),
    [
        ({"strategy": "ddp"}, {}, 2, "strategy ddp on 2 processes"),
        ({"strategy": "fsdp"}, {}, 2, "strategy fsdp on 2 processes"),
        ({"strategy": "mesh", "mesh": {"tp": 2}}, {}, 2, "strategy mesh on 2 processes"),
        ({"strategy": "deepspeed", "zero_stage": 1}, {}, 1, "this is strategy deepspeed"),
        ({}, {"activation_checkpointing": {"mode": "full", "offload": True}}, 1, "copies to host memory"),
        ({}, {"body": "mine:steps"}, 1, "training.body = 'mine:steps' computes steps itself"),
    ],
)
def test_layouts_without_recordings_are_refused(
    distributed: dict[str, Any], training: dict[str, Any], size: int, said: str
) -> None:
    config = TrainingConfig(max_steps=1, cuda_graphs=True, **training)
    with pytest.raises(UserError, match=said):
        layout_of(config, DistributedConfig(**distributed), size, size)


def test_the_report_says_that_the_cpu_has_no_cuda_graphs(toy: ToyRun) -> None:
    toy.train("training.cuda_graphs=true", "training.max_steps=2")
    assert "training.cuda_graphs: the run is on cpu" in (toy.folder / "out" / "report.txt").read_text()


def test_a_strategy_in_python_takes_the_option() -> None:
    assert SingleStrategy(device="cpu", cuda_graphs=True).layout.cuda_graphs


class Net(nn.Module):
    """A linear layer and a norm with statistics; `does` is what its forward does besides, and returns a factor."""

    def __init__(self, does: Callable[[Net], Any], dtype: torch.dtype) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 3, dtype=dtype), nn.BatchNorm1d(3, dtype=dtype)
        self.does, self.calls = does, 0
        self.register_buffer("mean", torch.zeros(3))
        self.hidden: Tensor | None = None
        self.recipe: tuple[Any, ...] = ()

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        self.hidden = self.norm(self.linear(x))
        extra = self.does(self)
        return self.hidden * factor * (1.0 if extra is None else extra)


class Fit(Recipe):
    """Fits a few numbers, with metrics of what it is given."""

    net: Net
    dtype = torch.float32
    asks_for_gradients = writes = False

    def build_model(self) -> nn.Module:
        return self.net

    def inputs(self, batch: Any) -> dict[str, Any]:
        if self.asks_for_gradients:
            batch["x"].requires_grad_()
        return {key: batch[key] for key in ("x", "factor") if key in batch}

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        if self.writes:
            batch["y"].clamp_(max=0.25)
        return (output - batch["y"]).square().sum()

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Any]:
        return {"largest": batch["y"].max(), "mean": output.mean()}


def batch_of(step: int, index: int, rows: int, dtype: torch.dtype, **options: Any) -> MicroBatch:
    generator = torch.Generator().manual_seed(100 * step + index)
    tensors = {key: torch.rand(rows, size, generator=generator, dtype=dtype) for key, size in (("x", 4), ("y", 3))}
    return MicroBatch({**tensors, **options}, [0] * rows, [*range(rows)])


def steps_of(
    recorded: bool,
    num_steps: int = 12,
    does: Callable[[Net], Any] = lambda net: None,
    micro_batches: int = 1,
    rows: Callable[[int], int] = lambda step: 6,
    options: Callable[[int], dict[str, Any]] = lambda step: {},
    change: Callable[[Net, int], Any] = lambda net, step: None,
    **recipe_keys: Any,
) -> tuple[list[Tensor], list[StepOutput], Recorded]:
    """Returns the tensors of the model after some steps, what each step gave, and what has recorded."""
    recipe = Fit()
    vars(recipe).update(recipe_keys)
    torch.manual_seed(0)
    recipe.net, training = Net(does, recipe.dtype), TrainingConfig(max_steps=1, learning_rate=0.1, optimizer="sgd")
    recipe.net.recipe = (recipe,)
    with SingleStrategy(device="cpu") as strategy:
        model, weights = build(recipe.build_model, recipe.weights(), seed=0)
        model, optimizer = strategy.prepare(
            model, lambda m: build_optimizer(training, recipe.param_groups(m)), recipe.parallel_plan(model), weights
        )
        tape = Recorded(strategy._engine, strategy._executor.surroundings, model, Tape)
        if recorded:
            strategy._executor = tape
        outputs = []
        for step in range(num_steps):
            change(model, step)
            batches = [batch_of(step, i, rows(step), recipe.dtype, **options(step)) for i in range(micro_batches)]
            outputs.append(strategy.forward_backward(model, batches, recipe, step))
            strategy.step(optimizer, 1.0)
        return [tensor.detach() for tensor in model.state_dict().values()], outputs, tape


def check_equal(**keys: Any) -> Recorded:
    """Steps with recordings have the bits of steps without: weights, statistics, losses and metrics."""
    (tensors, outputs, tape), (expected, plain, _) = (steps_of(recorded, **keys) for recorded in (True, False))
    assert tape.num_recorded > 0
    assert all(map(torch.equal, tensors, expected))
    for found, right in zip(outputs, plain, strict=True):
        assert torch.equal(found.loss, right.loss)
        assert found.metrics == right.metrics
    return tape


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_recorded_steps_have_the_bits_of_others(micro_batches: int) -> None:
    tape = check_equal(micro_batches=micro_batches)
    assert (tape.num_recorded, tape.num_plain) == (12 * micro_batches, 0)


def test_the_model_is_computed_for_comparisons_alone() -> None:
    """When it is recorded, before the first, second, fourth and eighth use after that, and in no other step."""
    calls = []
    steps_of(True, num_steps=15, does=lambda net: calls.append(1))
    assert len(calls) == 5 + 1  # and once for the recording


def test_every_kind_of_batch_has_a_recording_of_its_own() -> None:
    tape = check_equal(num_steps=16, rows=lambda step: 6 + step % 2, options=lambda step: {"factor": 1 + step // 8})
    assert len(tape.recordings) == 4
    assert tape.num_plain == 3  # the first one is recorded at once


def test_numbers_with_equal_hashes_are_of_different_kinds() -> None:
    assert hash(-1) == hash(-2)
    tape = check_equal(options=lambda step: {"factor": -1 - step % 2})
    assert len(tape.recordings) == 2


@pytest.mark.parametrize(
    "keys",
    [
        {"dtype": torch.float64},
        {"asks_for_gradients": True},
        {"writes": True},
        {"change": lambda net, step: net.linear.bias.requires_grad_(step % 4 != 3)},
        {"change": lambda net, step: setattr(net.linear.weight, "data", net.linear.weight.data.clone() * 1.01)},
    ],
    ids=["float64", "gradients of the batch", "a batch that is written to", "frozen", "other memory"],
)
def test_recipes_and_models_that_recordings_follow(keys: dict[str, Any]) -> None:
    check_equal(**keys)


def counts(net: Net) -> float:
    net.calls += 1
    return 1.0 + net.calls


def replaces_a_buffer(net: Net) -> None:
    net.mean = net.mean * 0.9 + 0.1  # type: ignore[has-type]


def moves_a_parameter(net: Net) -> None:
    net.linear.bias.data.mul_(0.99)  # autograd does not count this as a change


def moves_an_attribute(net: Net) -> None:
    net.table.mul_(0.99)  # type: ignore[operator, union-attr]


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (counts, "computes otherwise than the model does"),
        (replaces_a_buffer, "puts other tensors in the place of parameters, buffers or attributes"),
        (moves_a_parameter, "changes parameters or attributes of modules in place"),
        (moves_an_attribute, "changes parameters or attributes of modules in place"),
    ],
)
def test_what_a_recording_cannot_follow_is_refused(does: Callable[[Net], Any], said: str) -> None:
    def change(net: Net, step: int) -> None:
        net.table = torch.ones(3) if step == 0 else net.table  # type: ignore[assignment, has-type]

    with pytest.raises(UserError, match=said) as error:
        steps_of(True, does=does, change=change)
    assert "\n" not in str(error.value)


def test_a_table_in_an_attribute_may_be_replaced_between_steps() -> None:
    def change(net: Net, step: int) -> None:
        if step % 5 == 0:
            net.table = torch.full((3,), 1.0 + step)  # type: ignore[assignment]

    tape = check_equal(does=lambda net: net.table, change=change)
    assert tape.num_plain >= 2


@pytest.mark.parametrize("kind", [lambda table: table, lambda table: (table, 1), lambda table: {"a": [table]}])
def test_a_table_that_a_forward_makes_when_it_needs_another_is_followed(kind: Callable[[Tensor], Any]) -> None:
    """As the angles of rotary embeddings, which an evaluation of another length replaces, also in a tuple or dict."""

    def does(net: Net) -> Any:
        assert net.hidden is not None
        if getattr(net, "length", 0) != len(net.hidden):
            net.length, net.made = len(net.hidden), kind(torch.full((3,), 1.0 + len(net.hidden)))  # type: ignore[assignment]
        return next(leaf for leaf in tree_leaves(net.made) if isinstance(leaf, Tensor))

    tape = check_equal(does=does, num_steps=20, rows=lambda step: 6 + step // 5 % 2)
    assert tape.num_plain >= 3
    (watched,) = (name for _, name in tape._attributes)
    assert watched == "made"
    assert all(len(recording.kept) == 1 for recording in tape.recordings.values())


def test_a_table_of_the_recipe_is_followed() -> None:
    def does(net: Net) -> Any:
        return net.recipe[0].tables["factor"]  # type: ignore[index, union-attr]

    def change(net: Net, step: int) -> None:
        if step % 5 == 0:
            net.recipe[0].tables = {"factor": torch.full((3,), 1.0 + step)}  # type: ignore[index, union-attr]

    assert check_equal(does=does, change=change).num_plain >= 1


def test_a_lack_of_memory_for_more_recordings_ends_no_run() -> None:
    """Of batches of 7 rows, whose comparison there is no memory for."""

    def does(net: Net) -> None:
        computed_by = {frame.name for frame in traceback.extract_stack()}
        if net.hidden is not None and len(net.hidden) == 7 and "_expect" in computed_by:
            raise torch.OutOfMemoryError("out of memory")

    with pytest.warns(UserWarning, match="no memory to record more kinds of micro-batches"):
        tape = check_equal(does=does, rows=lambda step: 6 + step % 2)
    assert len(tape.recordings) == 1
    assert tape.num_plain == 6


def test_a_recording_that_there_is_no_memory_to_compare_is_used() -> None:
    def does(net: Net) -> None:
        net.calls += "_expect" in {frame.name for frame in traceback.extract_stack()}
        if net.calls > 2:
            net.calls = 0
            raise torch.OutOfMemoryError("out of memory")

    with pytest.warns(UserWarning, match="no memory to compare recordings with the model"):
        check_equal(does=does)


def test_a_warning_says_that_most_micro_batches_are_not_recorded() -> None:
    """Also late in a run, and once."""
    with pytest.warns(UserWarning, match="33 of 64 micro-batches were computed without a recording") as warned:
        steps_of(True, num_steps=300, rows=lambda step: 6 if step < 95 else step)
    assert len([warning for warning in warned if "without a recording" in str(warning.message)]) == 1


@pytest.mark.parametrize(
    ("found", "expected", "is_near"),
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2.1], [1.0, 2.0], False),
        ([1.0 + 1e-6, float("nan")], [1.0, float("nan")], True),
        ([1.4, float("inf")], [1.0, float("inf")], False),
        ([1.0, float("inf")], [1.0, float("nan")], True),
        ([1.0, 2.0], [1.0, float("nan")], False),
    ],
)
def test_comparisons_of_steps_that_overflow(found: list[float], expected: list[float], is_near: bool) -> None:
    parameters = [nn.Parameter(torch.ones(())) for _ in found]
    gradients = [(p, torch.tensor(value)) for p, value in zip(parameters, found, strict=True)]
    loss = torch.ones(())
    recording = Recording(Tape(), None, [], loss, cast(Any, None), gradients, loss, None, None)
    right = Expected(loss, {p: torch.tensor(value) for p, value in zip(parameters, expected, strict=True)})
    if is_near:
        _compare(recording, right)
        return
    with pytest.raises(UserError, match="computes otherwise"):
        _compare(recording, right)


def test_outputs_of_transformers_are_copied() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    output = outputs.CausalLMOutputWithPast(logits=torch.ones(2))
    copied = map_tensors(torch.clone, output)
    assert type(copied) is type(output)
    assert torch.equal(copied.logits, output.logits)
    assert copied.logits is not output.logits
    assert copied["logits"] is copied.logits
