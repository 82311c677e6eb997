"""The layout that a config itself asks for: one of those that are proved anyway, or one more."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from shoal.config import Run
from shoal.config.deepspeed_json import fit_file
from shoal.config.mesh import fill_mesh, say_mesh
from shoal.config.schema_distributed import DeepSpeedConfig, DistributedConfig
from shoal.errors import UserError
from shoal.verify.layouts import LAYOUTS, Layout, distributed_as, mesh_layout, sharded

OWN = "own"
"""The name of a layout that is none of LAYOUTS."""


def own_layout(run: Run, procs: int) -> Layout:
    """The config's layout on so many processes, in words as its `about`; UserError if they cannot be it."""
    distributed = run.config.distributed
    if distributed.strategy == "auto":
        resolved = "ddp" if run.config.launch.processes > 1 else "single"
        distributed = distributed.model_copy(update={"strategy": resolved})
    about, zero = wanted = _essence(run, distributed, procs)
    for layout in LAYOUTS.values():
        with suppress(UserError):  # so many processes cannot be that one
            if _essence(run, distributed_as(run, layout.changes(procs)), procs) == wanted:
                return replace(layout, about=about)
    if zero is not None:
        keys: dict[str, object] = {"zero_stage": None, "offload": None, "deepspeed": zero.model_dump()}
        return replace(LAYOUTS[f"zero_{zero.stage}"], name=OWN, about=about, changes=lambda procs: keys)
    sizes = _sizes(distributed, procs)
    if distributed.strategy == "fsdp":
        return Layout(OWN, about, lambda procs: {"mesh": sizes}, lambda case: sharded(case, sizes["dp_shard"], (1, 2)))
    longer = {side: size for side, size in sizes.items() if size > 1}
    sequence, schedule = distributed.tensor.sequence_parallel, distributed.pipeline.schedule
    layout = mesh_layout(OWN, about, sequence, schedule, **longer)
    return replace(layout, changes=lambda procs: {"mesh": sizes})  # all other keys are the config's


def _essence(run: Run, distributed: DistributedConfig, procs: int) -> tuple[str, DeepSpeedConfig | None]:
    """What makes a layout another one: what can be said of it, and the options of ZeRO."""
    strategy, sharding = distributed.strategy, distributed.fsdp.sharding_strategy
    if strategy == "deepspeed":
        zero = _zero(run, distributed, procs)
        return f"deepspeed ZeRO-{zero.stage}", zero
    if strategy == "fsdp":
        hybrid = f", {say_mesh(_sizes(distributed, procs))}" if sharding == "HYBRID_SHARD" else ""
        return f"fsdp {sharding}{hybrid}", None
    if strategy != "mesh":
        return strategy, None
    sizes = _sizes(distributed, procs)
    words = [f"mesh, {say_mesh(sizes)}"]
    if sizes["pp"] > 1:
        words.append(distributed.pipeline.schedule)
    if sizes["tp"] > 1 and distributed.tensor.sequence_parallel:
        words.append("sequence parallel")
    if sizes["dp_shard"] * sizes["cp"] > 1 and sharding != "FULL_SHARD":
        words.append(sharding)
    return ", ".join(words), None


def _sizes(distributed: DistributedConfig, procs: int) -> dict[str, int]:
    if distributed.mesh is None:
        raise UserError("without distributed.mesh nothing says who shards and who replicates on one machine; give it")
    return fill_mesh(distributed.mesh.model_dump(), procs)


def _zero(run: Run, distributed: DistributedConfig, procs: int) -> DeepSpeedConfig:
    zero, path = distributed.zero, distributed.deepspeed.config_file
    if path is not None:
        zero = DeepSpeedConfig(**fit_file(path, run.config.training, procs).options)
    return zero.model_copy(update={"zero_stage": zero.stage})
