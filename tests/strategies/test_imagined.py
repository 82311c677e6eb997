"""A world of 512 ranks that is only imagined: rank 0 prepares and steps without memory, as a planner does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from verify.runs import llama

from shoal.processes.world import World
from shoal.strategies import from_config
from shoal.training.optimizers import build_optimizer
from shoal.types import MicroBatch, Weights
from shoal.weights import parameters_on_meta

RANKS, TOKENS, MICRO_BATCHES = 512, 24, 4
MESHES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "tp_fsdp": {"strategy": "mesh", "mesh": {"tp": 2, "dp_shard": RANKS // 2}},
    "cp_fsdp": {"strategy": "mesh", "mesh": {"cp": 2, "dp_shard": RANKS // 2}},
    "pp_fsdp": {"strategy": "mesh", "mesh": {"pp": 2, "dp_shard": RANKS // 2}},
}


@pytest.fixture
def imagined() -> Iterator[World]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield World(0, RANKS, 0, 8, group="imagined")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "layout", [name if name == "pp_fsdp" else pytest.param(name, marks=pytest.mark.slow) for name in MESHES]
)
def test_rank_0_of_512_takes_two_steps_without_memory(tmp_path: Path, imagined: World, layout: str) -> None:
    run = llama(tmp_path, MESHES[layout], global_batch_size=MICRO_BATCHES * RANKS, gradient_accumulation=MICRO_BATCHES)
    recipe = run.recipe_type(run.recipe_config)
    strategy, memory = from_config(run.config, imagined), FakeTensorMode(allow_non_fake_inputs=True)
    strategy.setup()
    with parameters_on_meta():
        model = recipe.build_model()
    whole_bytes = sum(p.nbytes for p in model.parameters())
    model, optimizer = strategy.prepare(
        model,
        lambda m: build_optimizer(run.config.training, recipe.param_groups(m)),
        recipe.parallel_plan(model),
        Weights("empty"),
        memory=memory,
    )
    with memory:
        tokens = torch.zeros(1, TOKENS, dtype=torch.long)
        micro_batches = [MicroBatch({"input_ids": tokens, "labels": tokens}, [0], [i]) for i in range(MICRO_BATCHES)]
        for step in range(2):
            output = strategy.forward_backward(model, micro_batches, recipe, step)
            info = strategy.step(optimizer, 1.0)
    assert output.loss.shape == info.grad_norm.shape == ()
    held = strategy.engaged.parameter_bytes
    assert held == whole_bytes if layout == "ddp" else held < whole_bytes / 16
    moments = [value for slots in optimizer.state.values() for value in slots.values() if value.ndim]
    assert sum(value.nbytes for value in moments) == 2 * held
