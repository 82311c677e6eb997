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
from shoal.types import ParallelPlan


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
        blocks.compile(torch.device("cpu"))
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


class Mixing(nn.Module):
    """A block with inputs of several kinds, of which only x is to be moved."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor, weight: Tensor, table: Tensor) -> Tensor:
        return self.conv(x).tanh() * weight + table


@pytest.mark.parametrize("compiled", [False, True])
def test_inputs_keep_their_strides_and_others_stay(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_light(monkeypatch)
    torch.compiler.reset()

    def gradients(on_host: bool) -> tuple[int, list[Tensor]]:
        torch.manual_seed(0)
        blocks = nn.Sequential(*(Mixing() for _ in range(3))).to(memory_format=torch.channels_last)
        plan, weight, table = ParallelPlan(blocks=("0", "1", "2")), nn.Parameter(torch.ones(8)), torch.ones(8)
        apply_activation_checkpointing(blocks, plan, settings("full"))
        if compiled:
            CompiledModules(blocks, plan).compile(torch.device("cpu"))
        kept = keep_inputs_on_host([*blocks], torch.device("cpu")) if on_host else None
        x = torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
        y = x
        for block in blocks:
            y = block(y, weight, table)
        assert y.is_contiguous(memory_format=torch.channels_last)
        y.square().sum().backward()
        found = [x.grad, weight.grad, *(parameter.grad for parameter in blocks.parameters())]
        return kept.num_kept if kept else 0, [gradient for gradient in found if gradient is not None]

    (_, expected), (num_kept, found) = gradients(False), gradients(True)
    assert num_kept == 3
    assert len(found) == len(expected) == 8
    for value, wanted in zip(found, expected, strict=True):
        assert torch.equal(value, wanted)


# Uncompiled, a recomputation reads the weight again, with and without host memory.
@pytest.mark.parametrize(("what", "compiled"), [("input", False), ("input", True), ("weight", True)])
def test_what_is_modified_before_the_backward_is_an_error(
    what: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without host memory; torch does not check what hooks have taken."""
    compile_light(monkeypatch)
    torch.compiler.reset()
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    plan = ParallelPlan(blocks=("",))
    apply_activation_checkpointing(block, plan, settings("full"))
    if compiled:
        CompiledModules(block, plan).compile(torch.device("cpu"))
    keep_inputs_on_host([block], torch.device("cpu"))
    x = torch.ones(2, 4, requires_grad=True) * 1
    y = block(x).sum()
    with torch.no_grad():
        (x if what == "input" else block[0].weight).mul_(2)
    with pytest.raises(RuntimeError, match="was modified by an inplace operation"):
        y.backward()


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
