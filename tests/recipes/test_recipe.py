"""What a recipe can say of itself without overriding anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.errors import UserError
from shoal.recipes import Recipe

TOKENS = torch.arange(12).view(2, 6)


class Counting(Recipe):
    """Samples are their own index; the collated batch is a list of them."""

    def __init__(self, data: Any = range(5)):
        super().__init__()
        self.data = data

    def train_data(self) -> Any:
        return self.data

    def collate(self, samples: list[Any]) -> Any:
        return samples


def test_labels_are_those_of_the_batch() -> None:
    assert torch.equal(Recipe().labels({"labels": TOKENS + 1}), TOKENS + 1)
    for batch in ({"input_ids": TOKENS}, TOKENS, {"labels": [1, 2]}):
        with pytest.raises(UserError, match=r"recipe Recipe: a batch has no tensor `labels`.* override labels"):
            Recipe().labels(batch)


def test_the_sequence_length_is_that_of_the_tokens() -> None:
    assert Recipe().sequence_length({"input_ids": TOKENS}) == 6
    for batch in ({"x": TOKENS}, TOKENS, {"input_ids": TOKENS[0]}):
        with pytest.raises(UserError, match=r"no tensor `input_ids` of \(batch, time\).* override sequence_length"):
            Recipe().sequence_length(batch)


class OneOrder:
    def open(self, start: int) -> Iterator[int]:
        return iter(range(start, 5))


class Shards:
    num_shards = 2

    def open(self, shard: int, offset: int) -> Iterator[int]:
        while True:
            yield 2 * offset + shard
            offset += 1


def test_an_example_batch_has_the_first_samples() -> None:
    for data in (range(5), OneOrder(), Shards()):
        assert Counting(data).example_batch(3) == [0, 1, 2]
    assert Counting(range(2)).example_batch(3) == [0, 1, 0]  # the next epoch follows
    assert Counting(OneOrder()).example_batch(8) == [0, 1, 2, 3, 4]
    for empty in (range(0), type("Ended", (OneOrder,), {"open": lambda self, start: iter(())})()):
        with pytest.raises(UserError, match="train_data"):
            Counting(empty).example_batch(1)


def test_an_example_batch_is_collated() -> None:
    recipe = type("Stacked", (Counting,), {"collate": Recipe.collate})([{"x": torch.ones(2)}, {"x": torch.zeros(2)}])
    batch: dict[str, Tensor] = recipe.example_batch(2)
    assert torch.equal(batch["x"], torch.tensor([[1.0, 1.0], [0.0, 0.0]]))


def test_terms_of_the_loss_are_counted() -> None:
    labels = torch.tensor([[1, -100, 3], [-100, -100, 2]])
    assert Recipe().count({"x": torch.zeros(2, 9), "labels": labels}) == 3
    assert Recipe().count({"x": torch.zeros(2, 9)}) == 2


@pytest.mark.parametrize("shape", [(4,), (4, 10), (4, 10, 2)])
def test_labels_that_are_no_integers_count_as_samples(shape: tuple[int, ...]) -> None:
    assert Recipe().count({"x": torch.zeros(4, 9), "labels": torch.rand(shape)}) == 4


def test_names_that_are_nearly_those_of_others_are_found() -> None:
    names = {"metric": lambda self: 0, "evaldata": lambda self: 0, "loss_of_pair": lambda self: 0, "label": 3}
    found = type("Typos", (Recipe,), names | {"size_varies": True})().misspelt_names()
    assert found == {"metric": "metrics", "evaldata": "eval_data", "size_varies": "sizes_vary"}
    assert Counting([]).misspelt_names() == {}


def test_methods_may_be_given_to_an_object() -> None:
    """What a recipe defines is asked of the object: a method that it was given later must not be left out."""
    recipe = Recipe()
    assert not recipe.has_metrics
    assert not recipe.prepares_batches
    recipe.metrics = lambda output, batch: {}
    recipe.prepare_batch = lambda batch, rng: batch
    assert recipe.has_metrics
    assert recipe.prepares_batches
