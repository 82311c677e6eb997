"""What FSDP gathers at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from verify.planted import Block

from shoal.parallel.sharding.units import choose_units
from shoal.types import ParallelPlan


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(10, 16), nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 10, bias=False)
        if tied:
            self.head.weight = self.embed.weight


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]
PLAN = ParallelPlan(blocks=tuple(BLOCKS), embed="embed", head="head")


def test_the_plan() -> None:
    assert choose_units(Model(), PLAN) == ["embed", *BLOCKS, "head"]
    assert choose_units(Model(), PLAN, "transformer_based") == ["embed", *BLOCKS, "head"]
    assert choose_units(Model(), ParallelPlan()) == []


def test_what_is_tied_belongs_to_the_model() -> None:
    assert choose_units(Model(tied=True), PLAN) == BLOCKS


def test_blocks_without_parameters_are_no_units() -> None:
    model = Model()
    model.blocks[1] = nn.Identity()
    assert choose_units(model, PLAN) == ["embed", "blocks.0", "blocks.2", "head"]


@pytest.mark.parametrize(("least", "units"), [(100, ["embed"]), (500, []), (1000, BLOCKS)])
def test_by_size(least: int, units: list[str]) -> None:
    """A block has 1,120 parameters: 544 in `up`, 528 in `down`, 48 else; an embedding has 160."""
    with torch.device("meta"):
        found = choose_units(Model(), PLAN, "size_based", least)
    if least == 500:
        assert found == [f"{block}.{part}" for block in BLOCKS for part in ("up", "down")]
    elif least == 100:
        assert "embed" in found
        assert "head" in found
        assert "blocks.0.up" in found
    else:
        assert found == units


def test_by_class() -> None:
    assert choose_units(Model(), PLAN, classes=["Block", "Embedding"]) == ["embed", *BLOCKS]
