"""The arithmetic of the mesh: how many ranks along each side, and where each stands."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from shoal.config.batch import accumulation, derive_batches
from shoal.config.deepspeed_json import fit_file
from shoal.config.schema import Config
from shoal.config.schema_distributed import DistributedConfig
from shoal.errors import UserError

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Outermost first."""

STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zbv": 2}
"""By the schedule of a pipeline."""


def fill_mesh(given: Mapping[str, int], world_size: int) -> dict[str, int]:
    """The sides of the mesh, -1 replaced by what is left of the world."""
    sizes = {"dp_replicate": 1, "dp_shard": -1, **given}
    open_sides = [name for name, size in sizes.items() if size == -1]
    if len(open_sides) > 1:
        raise UserError(f"distributed.mesh: {' and '.join(open_sides)} are both -1; give one of them")
    product = prod(size for size in sizes.values() if size != -1)
    rest, remainder = divmod(world_size, product)
    if remainder or (rest > 1 and not open_sides):
        shown = " × ".join(f"{name} {sizes[name]}" for name in DIMENSIONS if sizes.get(name, -1) != -1)
        raise UserError(
            f"distributed.mesh: {shown} does not divide the {world_size} processes there are"
            if open_sides
            else f"distributed.mesh: {shown} = {product}, but there are {world_size} processes"
        )
    return {name: rest if size == -1 else size for name, size in sizes.items()}


def say_mesh(sizes: Mapping[str, int]) -> str:
    """The sides that are longer than one."""
    return " × ".join(f"{name} {sizes[name]}" for name in DIMENSIONS if sizes.get(name, 1) > 1) or "one process"


def data_size(sizes: Mapping[str, int]) -> int:
    """How many different slices of a batch there are."""
    return prod(sizes.get(name, 1) for name in ("dp_replicate", "dp_shard"))


def coordinates(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Where a rank stands on the mesh."""
    place = {}
    for name in reversed(DIMENSIONS):
        rank, place[name] = divmod(rank, sizes.get(name, 1))
    return place


def data_rank(place: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    """Which slice of a batch is that of the rank at this place."""
    return place["dp_replicate"] * sizes.get("dp_shard", 1) + place["dp_shard"]


def micro_batches_needed(schedule: str, num_stages: int) -> int:
    """With fewer, the schedule of a pipeline cannot run."""
    return num_stages if schedule == "1f1b" else 1


def check_cut(recipe: Any, distributed: DistributedConfig, sizes: Mapping[str, int]) -> None:
    """Refuses a mesh that the recipe's model cannot be cut into, as far as that is known without the model."""
    recipe.check_mesh(sizes)
    pp, schedule, blocks = sizes["pp"], distributed.pipeline.schedule, recipe.num_blocks()
    needed = pp * STAGES_PER_RANK[schedule]
    if pp > 1 and blocks is not None and blocks < needed:
        fewer = ", or distributed.pipeline.schedule 1f1b, which has one stage per rank" if needed > pp else ""
        raise UserError(
            f"distributed.pipeline.schedule = {schedule} on distributed.mesh.pp = {pp} has {needed} stages and needs "
            f"{needed} blocks, but the model has {blocks}; use a smaller pp{fewer}"
        )


def check_layout(config: Config, recipe: Any, processes: int) -> int:
    """Refuses a mesh that so many processes are not, that the model cannot be cut into, or that batches do not fill,
    and a DeepSpeed JSON that says otherwise than the run; how many slices of a batch there are.

    Processes need not run yet.
    """
    distributed = config.distributed
    if distributed.strategy == "deepspeed" and distributed.deepspeed.config_file is not None:
        fit_file(distributed.deepspeed.config_file, config.training, processes)
    if distributed.strategy != "mesh" or distributed.mesh is None:
        return processes
    sizes = fill_mesh(distributed.mesh.model_dump(), processes)
    check_cut(recipe, distributed, sizes)
    slices, stages, schedule = data_size(sizes), sizes["pp"], distributed.pipeline.schedule
    for phase in derive_batches(config.training, slices):
        times, needed = accumulation(phase, slices), micro_batches_needed(schedule, stages)
        if times < needed:
            raise UserError(
                f"distributed.mesh.pp = {stages} with schedule {schedule} needs {needed} micro-batches a step, but "
                f"training.global_batch_size {phase.global_batch_size} = batch_size {phase.batch_size} × {times} × "
                f"{slices} data-parallel; lower batch_size, or use gpipe"
            )
    return slices
