"""The layouts that `shoal verify` can prove: the table, the layout of the config itself, and the run that tests each.

A new layout joins the proofs as a row of the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil, prod
from types import MappingProxyType
from typing import Any

from shoal.config import Run, check_run, derive_batches
from shoal.config.batch import accumulation
from shoal.config.layout import Layout, check_objectives, layout_of
from shoal.config.mesh import data_size, micro_batches_needed, say_mesh
from shoal.config.schema_distributed import DeepSpeedConfig
from shoal.config.yaml import Tree
from shoal.errors import UserError
from shoal.parallel.context.ulysses import attentions
from shoal.parallel.pipeline.stages import count_stages, cut
from shoal.parallel.tensor.tensor_parallel import resolve
from shoal.parallel.zero.partition import is_installed
from shoal.weights import parameters_on_meta

OWN = "own"
"""The name of the config's own layout if it is not in LAYOUTS."""


@dataclass(frozen=True)
class Candidate:
    """A layout that can be proved against one device."""

    name: str
    description: str
    changes: Mapping[str, Any]
    """The keys of `distributed` that make this layout. A dimension of the mesh that is -1 gets all remaining processes,
    and must get at least two."""


def _fsdp(name: str, description: str, sharding: str, **mesh: int) -> Candidate:
    return Candidate(
        name, description, {"strategy": "fsdp", "fsdp": {"sharding_strategy": sharding}, "mesh": mesh or None}
    )


def _zero(stage: int, description: str) -> Candidate:
    keys = {"zero_stage": stage, "config_file": None, **({} if stage == 3 else {"offload_parameters": "none"})}
    changes = {"strategy": "deepspeed", "zero_stage": None, "offload": None, "deepspeed": keys}
    return Candidate(f"zero_{stage}", description, changes)


def _mesh(
    name: str, description: str, sequence_parallel: bool = False, schedule: str = "1f1b", **mesh: int
) -> Candidate:
    changes = {
        "strategy": "mesh",
        "fsdp": {"sharding_strategy": "FULL_SHARD"},
        "tensor": {"sequence_parallel": sequence_parallel},
        "pipeline": {"schedule": schedule},
        "mesh": {"dp_shard": 1, **mesh},
    }
    return Candidate(name, description, changes)


LAYOUTS = {
    row.name: row
    for row in (
        Candidate("single", "one device, the batch split into micro-batches", {"strategy": "single"}),
        Candidate("ddp", "DDP: replicas, each with a part of the batch", {"strategy": "ddp"}),
        _fsdp("fsdp", "FSDP: shards, gathered for the forward and again for the backward", "FULL_SHARD"),
        _fsdp("fsdp_shard_grad_op", "FSDP: shards, gathered once for forward and backward", "SHARD_GRAD_OP"),
        _fsdp("fsdp_no_shard", "FSDP: replicas", "NO_SHARD"),
        _fsdp("fsdp_hybrid", "FSDP: two replicas, sharded within each", "HYBRID_SHARD", dp_replicate=2, dp_shard=-1),
        _zero(1, "DeepSpeed: replicas, sharded optimizer"),
        _zero(2, "DeepSpeed: replicas, sharded optimizer and gradients"),
        _zero(3, "DeepSpeed: sharded optimizer, gradients and weights"),
        _mesh("tp", "tensor parallel", tp=-1),
        _mesh("tp_sp", "tensor parallel with sequence parallel", sequence_parallel=True, tp=-1),
        _mesh("tp_fsdp", "2-way tensor parallel × FSDP shards", tp=2, dp_shard=-1),
        _mesh("tp_ddp", "2-way tensor parallel × replicas", tp=2, dp_replicate=-1),
        _mesh("pp", "pipeline, 1f1b: one forward and one backward in turn", pp=-1),
        _mesh("pp_gpipe", "pipeline, gpipe: all forwards before all backwards", schedule="gpipe", pp=-1),
        _mesh("pp_interleaved", "pipeline, interleaved: two stages per process", schedule="interleaved", pp=-1),
        _mesh("pp_zbv", "pipeline, zbv: two stages per process, each backward in two halves", schedule="zbv", pp=-1),
        _mesh("pp_fsdp", "2 pipeline stages × FSDP shards", pp=2, dp_shard=-1),
        _mesh("pp_ddp", "2 pipeline stages × replicas", pp=2, dp_replicate=-1),
        _mesh("pp_tp", "2 pipeline stages × tensor parallel", pp=2, tp=-1),
        _mesh("pp_tp_fsdp", "2 pipeline stages × 2-way tensor parallel × FSDP shards", pp=2, tp=2, dp_shard=-1),
        _mesh("cp", "context parallel", cp=-1),
        _mesh("cp_fsdp", "2-way context parallel × FSDP shards", cp=2, dp_shard=-1),
    )
}


def layout_on(run: Run, procs: int) -> Layout:
    """Returns the layout of a run on `procs` processes of one machine; strategy `single` has only one process."""
    size = 1 if run.config.distributed.strategy == "single" else procs
    return layout_of(run.config.training, run.config.distributed, size, size)


def own_candidate(run: Run, procs: int) -> Candidate:
    """Returns the layout that the config itself asks for: a row of LAYOUTS, or a candidate named OWN.

    Its description is in the words of the config. Raises a UserError if the config does not fit `procs` processes.
    """
    strategy = run.config.distributed.strategy
    if strategy == "auto":
        strategy = "ddp" if run.config.launch.processes > 1 else "single"
    layout = layout_on(with_changes(run, {"strategy": strategy}), procs)
    description, zero = identity = _identity(layout)
    for row in LAYOUTS.values():
        with suppress(UserError):  # this row does not fit the config or the number of processes
            if _identity(layout_on(with_changes(run, row.changes), procs)) == identity:
                return replace(row, description=description)
    if zero is not None:
        return Candidate(OWN, description, {"zero_stage": None, "offload": None, "deepspeed": zero.model_dump()})
    return Candidate(OWN, description, {"mesh": {**layout.mesh}})  # all other keys stay as in the config


def _identity(layout: Layout) -> tuple[str, DeepSpeedConfig | None]:
    """Returns what distinguishes a layout from others: a description, and the options of ZeRO."""
    strategy, mesh, sharding = layout.strategy, layout.mesh, layout.fsdp.sharding_strategy
    if strategy == "deepspeed":
        return f"deepspeed ZeRO-{layout.zero.stage}", layout.zero.model_copy(update={"zero_stage": layout.zero.stage})
    is_fsdp, is_mesh = strategy == "fsdp", strategy == "mesh"
    words = {
        f"fsdp {sharding}" if is_fsdp else strategy: True,
        say_mesh(mesh): is_mesh or (is_fsdp and sharding == "HYBRID_SHARD"),
        layout.schedule: is_mesh and mesh["pp"] > 1,
        "sequence parallel": layout.sequence_parallel,
        sharding: is_mesh and mesh["dp_shard"] * mesh["cp"] > 1 and sharding != "FULL_SHARD",
    }
    return ", ".join(word for word, applies in words.items() if applies), None


def why_not(run: Run, candidate: Candidate, procs: int) -> str | None:
    """Returns the reason why a candidate cannot run this config on `procs` processes, or None if it can."""
    try:
        new_run = with_changes(run, candidate.changes)
        strategy, mesh = new_run.config.distributed.strategy, candidate.changes.get("mesh") or {}
        if strategy in ("single", "ddp") and (half := _half_weights(run)):
            return f"{strategy} does not support {half}; use fsdp or bf16"
        if strategy == "deepspeed" and not is_installed():
            return "the package deepspeed is not installed; run pip install 'shoal[deepspeed]'"
        needed = 2 * prod(size for size in mesh.values() if size != -1)
        if -1 in mesh.values() and procs < needed:
            return f"{procs} processes are too few for this mesh; use --procs {needed} or more"
        layout = layout_on(new_run, procs)
        check_objectives(layout, run.recipe_type(run.recipe_config))
        return _why_model_does_not_fit(new_run, layout) if strategy == "mesh" else None
    except UserError as error:
        return str(error)


def _why_model_does_not_fit(run: Run, layout: Layout) -> str | None:
    """Returns the reason why the model cannot be split over this mesh, or None. Raises a UserError with it in some
    cases. Builds the model on the meta device, without memory."""
    recipe = run.make_recipe()
    recipe.check_mesh(layout.mesh)
    with parameters_on_meta():
        model = recipe.build_model()
    plan = recipe.parallel_plan(model)
    has_sequence_modules = layout.mesh["tp"] == 1 or "sequence" in resolve(model, plan).values()
    if layout.sequence_parallel and not has_sequence_modules:
        return "the recipe's parallel plan has no modules with style `sequence`; add them, or leave this layout out"
    if layout.mesh["pp"] > 1:
        cut(model, plan, count_stages(layout.mesh["pp"], layout.schedule))
    if layout.mesh["cp"] > 1:
        attentions(model)
    return None


def _half_weights(run: Run) -> str | None:
    """Returns the setting that makes FSDP gather parameters in half precision, or None."""
    precision, dtype = run.config.training.mixed_precision, run.config.distributed.fsdp.param_dtype
    if precision == "pure_bf16":
        return "mixed_precision: pure_bf16"
    return None if dtype in (None, "fp32") else f"fsdp.param_dtype: {dtype}"


def reference_run(run: Run, procs: int) -> Run:
    """Returns the run on one device: the whole batch at once, nothing recomputed, chunked, compiled, fused or
    recorded.

    With synced BatchNorms, which mix the samples of a micro-batch of all ranks, it has these as its micro-batches.
    """
    batch = derive_batches(run.config.training, procs)[0].global_batch_size
    micro_batch = _synced_batch_size(run, procs) if run.config.training.sync_batch_norm else batch
    without_options = {
        "activation_checkpointing": {"mode": "none"},
        "loss_chunks": 1,
        "fp8_head": False,
        "compile": False,
        "kernels": "plain",
        "cuda_graphs": False,
    }
    changes = {"strategy": "fsdp" if _half_weights(run) else "single", "mesh": None}
    return with_changes(run, changes, {**_batches(batch, micro_batch), **without_options})


def candidate_run(run: Run, candidate: Candidate, procs: int) -> Run:
    """Returns the run in a candidate's layout: the same global batch, split into micro-batches as the config says, or
    into two if it does not say."""
    training, phase = run.config.training, derive_batches(run.config.training, procs)[0]
    batch_size = phase.batch_size
    layout = layout_on(with_changes(run, candidate.changes), procs)
    if training.sync_batch_norm:
        batch_size = ceil(_synced_batch_size(run, procs) / data_size(layout.mesh))
    elif training.batch_size is None:
        configured = 2 if training.gradient_accumulation is None else accumulation(phase, procs)
        least = micro_batches_needed(layout.schedule, layout.mesh["pp"])
        batch_size = ceil(phase.global_batch_size / (max(configured, least) * data_size(layout.mesh)))
    return with_changes(run, candidate.changes, _batches(phase.global_batch_size, batch_size))


def _synced_batch_size(run: Run, procs: int) -> int:
    """Returns the samples of all ranks in one micro-batch."""
    phase = derive_batches(run.config.training, procs)[0]
    return min(phase.batch_size * procs, phase.global_batch_size)


def _batches(global_batch_size: int, batch_size: int) -> Tree:
    return {"global_batch_size": global_batch_size, "batch_size": batch_size, "gradient_accumulation": None}


def with_changes(
    run: Run, distributed: Mapping[str, object], training: Mapping[str, object] = MappingProxyType({})
) -> Run:
    """Returns the run on one machine with some keys of `distributed` and `training` changed.

    A section of `distributed` keeps its other keys, except `mesh`, which is replaced.
    """
    tree: Tree = run.tree()
    for key, value in distributed.items():
        other_keys = {} if key == "mesh" else tree["distributed"][key] or {}
        tree["distributed"][key] = {**other_keys, **value} if isinstance(value, dict) else value
    tree["training"] |= training
    tree["launch"] |= {"nodes": 1, "procs_per_node": 1}
    recipe = run.recipe_type if run.recipe_object is None else run.recipe_object
    return check_run(tree, recipe=recipe, body=run.body)
