"""Inputs of recomputed blocks in host memory: the same gradients, and the inputs are not kept on the device."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from conftest import ToyRun
from torch import Tensor, nn
from transform.test_activation_checkpointing import compile_light, run, settings, stack

from shoal.errors import UserError
from shoal.torch_private import compile_counts
from shoal.transform.activation_checkpointing import apply_activation_checkpointing, num_recomputed
from shoal.transform.compile import CompiledModules
from shoal.transform.host_inputs import keep_inputs_on_host


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_gradients_stay_and_inputs_go(mode: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are compiled draw the same masks in the recomputation as in their forward."""
    compile_light(monkeypatch)
    torch.compiler.reset()
    model, plan, inputs = stack()
    expected, recomputed, graphs = run(model, inputs), num_recomputed(), compile_counts().graphs
    blocks = CompiledModules(model, plan) if compiled else None
    names = apply_activation_checkpointing(model, plan, settings(mode))
    if blocks:
        blocks.compile()
    on_host = keep_inputs_on_host([model.get_submodule(name) for name in names], torch.device("cpu"))
    seen: list[weakref.ref[Tensor]] = []

    def note(block: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(weakref.ref(args[0]))

    handles = [model.get_submodule(name).register_forward_pre_hook(note) for name in names]
    torch.manual_seed(1)
    output = model(inputs)
    gc.collect()
    assert [one() is None for one in seen] == [False, True, True, True]  # the first is the test's own
    del output
    for handle in handles:
        handle.remove()
    for _ in range(2):  # a second step does not wait for what the first has kept
        for value, wanted in zip(run(model, inputs), expected, strict=True):
            assert torch.equal(value, wanted)
    assert on_host.num_kept == 3 * len(names)
    assert num_recomputed() - recomputed == (0 if compiled else 2 * len(names))  # in a graph it is not counted
    assert compile_counts().graphs - graphs == compiled
    assert not (blocks and blocks.eager_calls)


def test_on_a_cpu_it_is_said_to_have_no_effect(toy: ToyRun) -> None:
    offload = "training.activation_checkpointing={mode: full, offload: true, classes: [Tanh]}"
    toy.train("training.max_steps=1", offload)
    report = (toy.output / "report.txt").read_text()
    assert "not in force  training.activation_checkpointing.offload: the run is on the CPU" in report


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["training.activation_checkpointing={offload: true}"], "`every`, `classes` and `offload` have no effect"),
        (
            ["training.activation_checkpointing={mode: full, offload: true, classes: [Tanh]}", "training.compile=true"],
            "only the inputs of the compiled blocks can be moved",
        ),
    ],
)
def test_what_does_not_fit_is_refused(toy: ToyRun, keys: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        toy.train(*keys)


def test_a_device_without_copies_beside_the_computation_is_refused() -> None:
    with pytest.raises(UserError, match=r"between a CUDA device and the host, and this run is on meta; leave it out"):
        keep_inputs_on_host([], torch.device("meta"))
