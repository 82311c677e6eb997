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
from shoal.data import BatchSchedule, Loader
from shoal.training import train
from shoal.transform.chunked_loss import ChunkedHead
from shoal.transform.compile import BatchSizes, CompiledModules
from shoal.types import MicroBatch, ParallelPlan

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


def micro(rows: int, length: int = 6, usual: bool = True) -> MicroBatch:
    return MicroBatch({"x": torch.ones(rows, length, 8)}, [0] * rows, range(rows), is_usual_size=usual)


def compute(batches: list[MicroBatch], used: Used, sizes_vary: bool = False) -> Used:
    """Returns which graphs computed each of these batches in a new model."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    compiled = CompiledModules(model, ParallelPlan(blocks=("0", "1")))
    compiled.compile(torch.device("cpu"))
    found: Used = []
    for batch in batches:
        used.clear()
        compiled.sizes.look_at([batch], sizes_vary)
        with torch.no_grad():
            model(batch.data["x"])
        found.append(used[-1])
    return found


@pytest.mark.parametrize("order", [[0, 1, 0, 2, 1], [1, 0], [2, 1, 0]])
def test_short_micro_batches_do_not_change_which_graph_computes_others(order: list[int], used: Used) -> None:
    kinds = [micro(4), micro(3, usual=False), micro(2, usual=False)]
    found = compute([kinds[kind] for kind in order], used)
    assert found == [(False, [8, 8, 8, rows, 6, 8]) for rows in (4 - kind for kind in order)]


@pytest.mark.parametrize("lengths", [[8, 16, 8], [16, 4, 8]])  # 8 is also the width: sizes that are equal by chance
def test_one_graph_fits_all_lengths_where_a_recipe_says_that_they_vary(lengths: list[int], used: Used) -> None:
    torch._dynamo.utils.counters.clear()
    found = compute([micro(4, length) for length in lengths], used, sizes_vary=True)
    assert found == [(True, [])] * 3
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_the_last_chunk_of_a_loss_does_not_change_which_graph_computes_others(used: Used) -> None:
    head = ChunkedHead(nn.Sequential(nn.Linear(8, 16)), ParallelPlan(head="0"), 3, BatchSizes())
    for number, chunks in ((7, [3, 3, 1]), (6, [2, 2, 2]), (7, [3, 3, 1]), (6, [2, 2, 2])):
        used.clear()
        with head.scoring(torch.zeros(number, dtype=torch.long)):
            head._linear(torch.ones(number, 8))  # type: ignore[misc]
        assert [(is_for_all, sizes[0]) for is_for_all, sizes in used] == [(False, chunk) for chunk in chunks]


def test_a_loader_says_which_micro_batches_are_of_unusual_sizes() -> None:
    """Ten samples in micro-batches of at most four; the last step of the run has three."""
    data = [{"x": i} for i in range(10)]
    loader = Loader(data, list, BatchSchedule.constant(10, 4), seed=0, end=13)
    steps = [[(len(micro.ids), micro.is_usual_size) for micro in step] for step in loader]
    assert steps == [[(4, True), (4, True), (2, False)], [(3, False)]]


def test_lengths_that_vary_unsaid_are_warned_of_once() -> None:
    sizes = BatchSizes()
    with pytest.warns(UserWarning, match=r"of shape \[6, 8\], now one of \[7, 8\].*`sizes_vary = True`"):
        sizes.look_at([micro(4), micro(3), micro(4, 7)], False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sizes.look_at([micro(4, 9), micro(4, 7)], False)
        declared = BatchSizes()
        declared.look_at([micro(4), micro(4, 7)], True)
        with torch.no_grad():  # evaluation may have other lengths
            BatchSizes().look_at([micro(4), micro(4, 7)], False)
    assert declared.kind == "any"


@pytest.mark.parametrize(("keys", "for_all"), [({}, True), ({"pad_to_max": True}, False), ({"packing": True}, False)])
def test_instructions_are_computed_by_graphs_for_all_lengths(
    tmp_path: Path, used: Used, keys: dict[str, Any], for_all: bool
) -> None:
    training = {"compile": True, "max_steps": 1, "batch_size": 1 if "packing" in keys else 4}
    train(check_run(tree(tmp_path, dataset=keys, training=training)))
    assert {is_for_all for is_for_all, _ in used} == {for_all}


def test_an_evaluation_before_training_does_not_change_which_graph_computes_it(used: Used) -> None:
    """A run that was stopped before an evaluation evaluates first when it goes on."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    compiled = CompiledModules(model, ParallelPlan(blocks=("0", "1")))
    compiled.compile(torch.device("cpu"))
    for length in (5, 7):
        batch = micro(3, length)
        with torch.no_grad():
            compiled.sizes.look_at([batch], False)
            model(batch.data["x"])
    used.clear()
    compiled.sizes.look_at([micro(4)], False)
    model(micro(4).data["x"])
    assert [is_for_all for is_for_all, _ in used] == [False, False]


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
        compiled.sizes.look_at([micro(rows, usual=False)], False)
        model(micro(rows).data["x"])
    assert compiled.eager_calls == 0
