"""Mesh arithmetic: how many ranks lie along each dimension, and the coordinates of each rank."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from shoal.config.schema_distributed import DistributedConfig
from shoal.errors import UserError

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The dimensions of the mesh, outermost first."""

STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zbv": 2}
"""How many pipeline stages a rank holds, by the schedule."""


def fill_mesh(mesh: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Returns the size of each dimension; -1 becomes the number of ranks that the other dimensions leave."""
    sizes = {"dp_replicate": 1, "dp_shard": -1, **mesh}
    open_dimensions = [name for name, size in sizes.items() if size == -1]
    if len(open_dimensions) > 1:
        raise UserError(f"distributed.mesh: {' and '.join(open_dimensions)} are both -1; set one of them")
    product = prod(size for size in sizes.values() if size != -1)
    rest, remainder = divmod(world_size, product)
    if remainder or (rest > 1 and not open_dimensions):
        shown = " × ".join(f"{name} {sizes[name]}" for name in DIMENSIONS if sizes.get(name, 1) > 1) or "1"
        raise UserError(
            f"distributed.mesh: {shown} does not divide the {world_size} processes; change one of them"
            if open_dimensions
            else f"distributed.mesh: {shown} = {product}, but there are {world_size} processes; change one of them"
        )
    return {name: rest if size == -1 else size for name, size in sizes.items()}


def say_mesh(sizes: Mapping[str, int]) -> str:
    """Returns the dimensions with more than one rank, such as `pp 2 × tp 4`."""
    return " × ".join(f"{name} {sizes[name]}" for name in DIMENSIONS if sizes.get(name, 1) > 1) or "one process"


def data_size(sizes: Mapping[str, int]) -> int:
    """Returns the number of data-parallel ranks: those that get different samples."""
    return prod(sizes.get(name, 1) for name in ("dp_replicate", "dp_shard"))


def coordinates(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the coordinates of a rank on the mesh, by dimension."""
    by_dimension = {}
    for name in reversed(DIMENSIONS):
        rank, by_dimension[name] = divmod(rank, sizes.get(name, 1))
    return by_dimension


def data_rank(position: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    """Returns the data-parallel rank at these coordinates."""
    return position["dp_replicate"] * sizes.get("dp_shard", 1) + position["dp_shard"]


def micro_batches_needed(schedule: str, num_stages: int) -> int:
    """Returns the smallest number of micro-batches that a pipeline schedule can run with."""
    return num_stages if schedule == "1f1b" else 1


def check_cut(recipe: Any, distributed: DistributedConfig, sizes: Mapping[str, int]) -> None:
    """Refuses a mesh that does not fit the recipe's model, as far as that is known without building it."""
    recipe.check_mesh(sizes)
    pp, schedule, blocks = sizes["pp"], distributed.pipeline.schedule, recipe.num_blocks()
    needed = pp * STAGES_PER_RANK[schedule]
    if pp > 1 and blocks is not None and blocks < needed:
        fewer = ", or distributed.pipeline.schedule: 1f1b, which has one stage per rank" if needed > pp else ""
        raise UserError(
            f"distributed.pipeline.schedule = {schedule} on distributed.mesh.pp = {pp} has {needed} stages and needs "
            f"{needed} blocks, but the model has {blocks}; use a smaller pp{fewer}"
        )
