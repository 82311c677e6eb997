"""`held()` says without moving data which part of the model a rank has: the parts that `state()` gives."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from pool import Pool
from strategies.nets import PLAN, Points, build, make, micro_batch, rows, sgd
from torch import nn

from shoal.checkpoint.regions import coverage_problem, local_region
from shoal.tensors import local_part
from shoal.types import Weights

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="the package deepspeed is not installed")


def with_buffers() -> nn.Module:
    model = build()
    model.scale.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
    model.scale.register_buffer("passing", torch.zeros(2), persistent=False)
    return model


def compare(kind: str) -> dict[str, Any]:
    """Returns what this rank holds, after it was compared with the state before and after a step."""
    with make(kind) as strategy:
        model, optimizer = strategy.prepare(with_buffers(), sgd, PLAN, Weights("built"))
        held = dict(strategy.held())
        for step in range(2):
            state = strategy.state(model, optimizer).model
            assert {name for name, one in held.items() if one.region is not None} == state.keys()
            for name, tensor in state.items():
                assert (held[name].shape, held[name].dtype) == (tuple(tensor.shape), tensor.dtype), name
                assert held[name].region == local_region(tensor), name
                assert held[name].region.shape == tuple(local_part(tensor).shape), name
            batch = [micro_batch(*rows(2, strategy.data_rank)) for _ in range(2)]
            strategy.forward_backward(model, batch, Points(), step)
            strategy.step(optimizer)
        assert strategy.held() == held
        assert list(strategy.held()) == list(held)
        return {name: (one.shape, one.nbytes, one.region) for name, one in held.items()}


PARTS = {"single": 1, "ddp": 1, "fsdp": 2, "hybrid": 2, "tp": 2, "tp_fsdp": 4, "pp": 1, "zero_1": 1, "zero_3": 2}
"""The number of different parts of up.weight, over all ranks."""


@pytest.mark.parametrize(
    "kind",
    [
        *("single", "ddp", "fsdp", "tp", "pp", "hybrid", "tp_fsdp"),
        *(pytest.param(kind, marks=needs_deepspeed) for kind in ("zero_1", "zero_3")),
    ],
)
def test_it_is_what_the_state_gives(request: pytest.FixtureRequest, kind: str) -> None:
    if kind == "single":
        by_rank = [compare(kind)]
    else:
        pool: Pool = request.getfixturevalue("pool4" if kind in ("hybrid", "tp_fsdp") else "pool2")
        by_rank = pool.run(compare, kind, init=False)
    expected = {name: (tuple(t.shape), t.nbytes) for name, t in with_buffers().state_dict().items()}
    for held in by_rank:
        assert {name: (shape, nbytes) for name, (shape, nbytes, _) in held.items()} == expected
    for name, (shape, _) in expected.items():
        regions = {held[name][2] for held in by_rank} - {None}
        assert coverage_problem(shape, [region for region in regions if region.numel or not shape[0]]) is None, name
    assert len({held["up.weight"][2] for held in by_rank} - {None}) == PARTS[kind]
    elsewhere = [sum(region is None for _, _, region in held.values()) for held in by_rank]
    assert all(elsewhere) if kind == "pp" else not any(elsewhere)
