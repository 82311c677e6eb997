"""Which graph of torch.compile computes a batch depends on that batch alone, and not on the batches before."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes.test_text_lora import tree
from torch import Tensor, nn

from shoal.config import check_run
from shoal.training import train
from shoal.transform.chunked_loss import ChunkedHead
from shoal.transform.compile import MOST_SIZES, CompiledModules, GraphChoice
from shoal.types import ParallelPlan

Used = list[tuple[bool, list[int]]]


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[Used]:
    """Notes for each call of a compiled function whether its graph is for all sizes, and the sizes it was made for."""
    calls: Used = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        is_for_all = any(isinstance(value, torch.SymInt) for value in inputs)
        made_for = [int(size) for value in inputs if isinstance(value, Tensor) for size in value.shape]

        def run(*args: Any) -> Any:
            calls.append((is_for_all, [] if is_for_all else made_for))
            return graph.forward(*args)

        return run

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, dynamic=None, **_: compile(f, backend=backend, dynamic=dynamic))
    torch.compiler.reset()
    yield calls
    torch.compiler.reset()


def build(num_blocks: int = 2) -> tuple[nn.Sequential, CompiledModules]:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_blocks)))
    compiled = CompiledModules(model, ParallelPlan(blocks=tuple(map(str, range(num_blocks)))))
    compiled.compile(torch.device("cpu"))
    return model, compiled


def compute(shapes: list[tuple[int, int]], used: Used, sizes_vary: bool = False, grad: bool = False) -> Used:
    """Returns which graphs computed batches of these shapes, one after another in a new model."""
    model, compiled = build()
    compiled.choice.sizes_vary = sizes_vary
    found: Used = []
    for shape in shapes:
        used.clear()
        with torch.set_grad_enabled(grad):
            model(torch.ones(*shape, 8))
        found.append(used[-1])
    return found


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("order", [[0, 1, 0, 2, 1], [1, 0], [2, 1, 0]])
def test_every_size_has_a_graph_of_its_own_whatever_came_before(order: list[int], used: Used, grad: bool) -> None:
    """Sizes of the batch, of short micro-batches, and of tensors that are made inside of a model."""
    shapes = [(4, 6), (3, 6), (4, 5)]
    found = compute([shapes[kind] for kind in order], used, grad=grad)
    assert found == [(False, [8, 8, 8, *shapes[kind], 8]) for kind in order]


@pytest.mark.parametrize("lengths", [[8, 16, 8], [16, 4, 8]])  # 8 is also the width: sizes that are equal by chance
def test_one_graph_fits_all_lengths_where_a_recipe_says_that_they_vary(lengths: list[int], used: Used) -> None:
    torch._dynamo.utils.counters.clear()
    found = compute([(4, length) for length in lengths], used, sizes_vary=True)
    assert found == [(True, [])] * 3
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_the_last_chunk_of_a_loss_does_not_change_which_graph_computes_others(used: Used) -> None:
    head = ChunkedHead(nn.Sequential(nn.Linear(8, 16)), ParallelPlan(head="0"), 3, GraphChoice())
    for number, chunks in ((7, [3, 3, 1]), (6, [2, 2, 2]), (7, [3, 3, 1]), (6, [2, 2, 2])):
        used.clear()
        with head.scoring(torch.zeros(number, dtype=torch.long)):
            head._linear(torch.ones(number, 8))  # type: ignore[misc]
        assert [(is_for_all, sizes[0]) for is_for_all, sizes in used] == [(False, chunk) for chunk in chunks]


def test_many_sizes_unsaid_are_left_to_torch_with_one_warning(used: Used) -> None:
    """Or a block would be compiled for each, and run uncompiled when torch keeps no more graphs."""
    model, compiled = build()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "training.compile")
        for length in [*range(2, 2 + MOST_SIZES), 2, 3]:
            model(torch.ones(4, length, 8))
    with pytest.warns(UserWarning, match=f"with more than {MOST_SIZES} sizes of tensors.*`sizes_vary = Tr"):
        model(torch.ones(4, 20, 8))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "training.compile")
        for length in (21, 22, 23):
            model(torch.ones(4, length, 8))
        assert used[-1][0]  # a graph for all sizes
        with torch.no_grad():
            model(torch.ones(4, 2, 8))
        assert not used[-1][0]  # evaluation has sizes of its own
    assert compiled.eager_calls == 0


def test_losses_of_evaluation_do_not_count_for_training(used: Used) -> None:
    head = ChunkedHead(nn.Sequential(nn.Linear(8, 16)), ParallelPlan(head="0"), 3, GraphChoice())
    for number in range(9, 9 + 3 * MOST_SIZES, 3):
        with head.scoring(torch.zeros(number, dtype=torch.long)), torch.no_grad():
            head._linear(torch.ones(number, 8))  # type: ignore[misc]
    for number in (100, 103, 100):
        used.clear()
        with head.scoring(torch.zeros(number, dtype=torch.long)):
            head._linear(torch.ones(number, 8))  # type: ignore[misc]
        assert not any(is_for_all for is_for_all, _ in used)


@pytest.mark.parametrize(("keys", "for_all"), [({}, True), ({"pad_to_max": True}, False), ({"packing": True}, False)])
def test_instructions_are_computed_by_graphs_for_all_lengths(
    tmp_path: Path, used: Used, keys: dict[str, Any], for_all: bool
) -> None:
    training = {"compile": True, "max_steps": 1, "batch_size": 1 if "packing" in keys else 4}
    train(check_run(tree(tmp_path, dataset=keys, training=training)))
    assert {is_for_all for is_for_all, _ in used} == {for_all}


class Scaled(nn.Module):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.linear, self.place = nn.Linear(8, 8), place

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.place


def test_blocks_that_differ_in_a_number_are_compiled_for_several_sizes(used: Used) -> None:
    model = nn.Sequential(*(Scaled(place) for place in range(5)))
    compiled = CompiledModules(model, ParallelPlan(blocks=tuple(map(str, range(5)))))
    compiled.compile(torch.device("cpu"))
    for rows in (4, 3, 2):
        model(torch.ones(rows, 6, 8))
    assert compiled.eager_calls == 0
    assert not any(is_for_all for is_for_all, _ in used)


def test_many_blocks_that_differ_in_a_number_stay_compiled(used: Used) -> None:
    """They are left to torch before it keeps no more graphs of their class."""
    model = nn.Sequential(*(Scaled(place) for place in range(1, 13)))
    compiled = CompiledModules(model, ParallelPlan(blocks=tuple(map(str, range(12)))))
    compiled.compile(torch.device("cpu"))
    with warnings.catch_warnings(record=True) as caught:
        for length in range(2, 12):
            model(torch.ones(4, length, 8))
    assert sum("or with other numbers each time" in str(warning.message) for warning in caught) == 1
    assert compiled.eager_calls == 0


def test_blocks_that_are_one_module_are_compiled_once(used: Used) -> None:
    block = nn.Linear(8, 8)
    model = nn.Sequential(block, block)
    CompiledModules(model, ParallelPlan(blocks=("0", "1"))).compile(torch.device("cpu"))
    model(torch.ones(2, 8))
    assert len(used) == 2
