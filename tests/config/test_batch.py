"""global_batch_size = batch_size × gradient_accumulation × data-parallel size."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.config.batch import accumulation, derive_batches
from shoal.config.schema import TrainingConfig
from shoal.errors import UserError


def derive(data_size: int = 1, **keys: Any) -> list[tuple[int, int, int, int]]:
    phases = derive_batches(TrainingConfig(max_steps=1, **keys), data_size)
    return [(p.first_epoch, p.global_batch_size, p.batch_size, accumulation(p, data_size)) for p in phases]


@pytest.mark.parametrize(
    ("given", "data_size", "expected"),
    [
        ({}, 1, (8, 8, 1)),
        ({}, 4, (32, 8, 1)),
        ({"batch_size": 2}, 3, (6, 2, 1)),
        ({"batch_size": 2, "gradient_accumulation": 5}, 3, (30, 2, 5)),
        ({"global_batch_size": 32}, 4, (32, 8, 1)),
        ({"global_batch_size": 32, "gradient_accumulation": 2}, 4, (32, 4, 2)),
        ({"global_batch_size": 32, "batch_size": 4}, 2, (32, 4, 4)),
        ({"global_batch_size": 10, "batch_size": 4}, 1, (10, 4, 3)),
        ({"global_batch_size": 10, "gradient_accumulation": 3}, 1, (10, 4, 3)),
        ({"global_batch_size": 24, "batch_size": 4, "gradient_accumulation": 3}, 2, (24, 4, 3)),
    ],
)
def test_missing_factors_are_derived(given: dict[str, int], data_size: int, expected: tuple[int, int, int]) -> None:
    assert derive(data_size, **given) == [(0, *expected)]


def test_a_schedule_by_epoch_changes_the_global_batch() -> None:
    assert derive(2, batch_size=3, gradient_accumulation={5: 4, 0: 8}) == [(0, 48, 3, 8), (5, 24, 3, 4)]


def test_a_schedule_under_a_fixed_global_batch_changes_the_micro_batch() -> None:
    assert derive(1, global_batch_size=24, gradient_accumulation={0: 8, 5: 2}) == [(0, 24, 3, 8), (5, 24, 12, 2)]


def test_a_contradiction_shows_the_arithmetic() -> None:
    with pytest.raises(UserError, match=r"4 × gradient_accumulation 3 × 2 data-parallel = 24, .* is 32"):
        derive(2, global_batch_size=32, batch_size=4, gradient_accumulation=3)
    with pytest.raises(UserError, match=r"16 × 4 data-parallel = 64 is more than .* 32; lower batch_size to 8"):
        derive(4, global_batch_size=32, batch_size=16)
    with pytest.raises(UserError, match="add an entry for 0"):
        derive(1, batch_size=3, gradient_accumulation={1: 4})


def test_batches_are_counted_by_data_parallel_ranks_and_not_by_processes() -> None:
    """Two processes that share every layer take one sample together."""
    from verify.runs import ragged

    from shoal.config.layout import check_layout

    mesh = {"strategy": "mesh", "mesh": {"tp": 2, "dp_shard": 1}}
    run = ragged(distributed=mesh, global_batch_size=1)
    assert check_layout(run.config, run.recipe_type(run.recipe_config), 2, 2).mesh["tp"] == 2
    run = ragged(distributed={"strategy": "ddp"}, global_batch_size=1)
    with pytest.raises(UserError, match="global_batch_size"):
        check_layout(run.config, run.recipe_type(run.recipe_config), 2, 2)
