"""What recordings in CUDA graphs depend on, and where they are refused. `tests/gpu` makes some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from conftest import ToyRun
from torch import nn

from shoal.config.layout import layout_of
from shoal.config.schema import TrainingConfig
from shoal.config.schema_distributed import DistributedConfig
from shoal.errors import UserError
from shoal.seeding import mix
from shoal.strategies import Loop, SingleStrategy
from shoal.strategies.engines.plain import PlainEngine
from shoal.strategies.executors import Surroundings
from shoal.strategies.recorded import RECORDING, Recorded, Recording, _contents, check_host_generators


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
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_recording_is_for_one_state_of_the_model_and_one_kind_of_batch(change: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.BatchNorm1d(3))
    batch: dict[str, Any] = {"x": torch.zeros(2, 4), "scale": 2}
    recorded = recorded_of(model)
    before = recorded._state(), [*_contents(batch)]
    assert before == (recorded._state(), [*_contents({"x": torch.zeros(2, 4), "scale": 2})])
    CHANGES[change](model, batch)
    assert before != (recorded._state(), [*_contents(batch)])


class Batch:
    """As some libraries have them; a copy of its tensors cannot be made without knowing it."""

    x = torch.zeros(2)


@pytest.mark.parametrize("content", [Batch(), torch.eye(2).to_sparse(), {"a": [np.zeros(2)]}])
def test_batches_that_cannot_be_copied_are_refused(content: Any) -> None:
    with pytest.raises(UserError, match="which a recording cannot copy"):
        [*_contents(content)]


def test_a_recording_is_compared_often_at_first_and_then_now_and_then() -> None:
    recording = Recording(None, [], torch.ones(()), cast(Any, None), [], torch.ones(()), None, None)
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
