"""Tensor parallelism, activation checkpointing and torch.compile together: like blocks are one unbroken graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pool import Pool
from verify.runs import llama

from shoal.config import derive_batches
from shoal.data import BatchSchedule
from shoal.strategies import from_config
from shoal.torch_private import compile_counts
from shoal.training.session import assemble

BLOCKS = 4


def graphs(folder: Path, mode: str, sequence_parallel: bool, backend: str) -> tuple[list[float], int, int, int]:
    """Returns the losses of two steps, and the numbers of compiled modules, of graphs and of breaks in them."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    distributed = {"strategy": "mesh", "mesh": {"tp": 2}, "tensor": {"sequence_parallel": sequence_parallel}}
    mode, _, offload = mode.partition(", ")
    recompute = {"mode": mode, "offload": bool(offload)}
    options: dict[str, Any] = {"compile": backend != "none", "activation_checkpointing": recompute}
    run = llama(folder, distributed, global_batch_size=4, learning_rate=0.1, **options)
    compile, recipe = torch.compile, run.recipe_type(run.recipe_config)
    with (
        patch.object(torch, "compile", lambda function, **options: compile(function, backend=backend)),
        from_config(run.config) as strategy,
    ):
        session = assemble(recipe, strategy, run.config.training, 0)
        loader = session.loader(recipe.train_data(), BatchSchedule(derive_batches(run.config.training, 1)))
        losses = []
        for step, micro_batches in zip(range(2), loader, strict=False):
            losses.append(strategy.forward_backward(session.model, micro_batches, recipe, step).loss.item())
            strategy.step(session.optimizer, 1.0)
        compiled = strategy.engaged.compiled
        modules = len(compiled.modules) - compiled.eager_calls if compiled else 0
        return losses, modules, compile_counts().graphs, compile_counts().breaks


MODES = ("none", "full", "full, inputs on the host", "selective")
CASES = [(mode, sequence, "aot_eager") for mode in MODES for sequence in (False, True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "sequence_parallel", "backend"), [*CASES, ("full", False, "inductor"), ("selective", True, "inductor")]
)
def test_like_blocks_are_one_graph(
    tmp_path: Path, pool2: Pool, mode: str, sequence_parallel: bool, backend: str
) -> None:
    """With aot_eager graphs are captured and differentiated as ever, but run without generated code."""
    eager = pool2.run(graphs, tmp_path, "none", sequence_parallel, "none", init=False)
    compiled = pool2.run(graphs, tmp_path, mode, sequence_parallel, backend, init=False, timeout=280)
    for (expected, *_), (losses, modules, number, breaks) in zip(eager, compiled, strict=True):
        assert losses == pytest.approx(expected, rel=1e-4)
        assert losses[0] != losses[1]
        assert (modules, number, breaks) == (BLOCKS, 1, 0)
