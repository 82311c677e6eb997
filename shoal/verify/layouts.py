"""The layouts that can be proved: the table, the one that a config itself asks for, and the run each of them makes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil, prod
from types import MappingProxyType
from typing import Any

from shoal.config import Run, check_run, derive_batches
from shoal.config.batch import accumulation
from shoal.config.layout import Layout, layout_of
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
"""The name of a config's layout that is none of LAYOUTS."""


@dataclass(frozen=True)
class Candidate:
    name: str
    about: str
    changes: Mapping[str, Any]
    """The keys of `distributed` that make this layout. A side of the mesh that is -1 is what is left of the processes,
    and has to be longer than one."""


def _fsdp(name: str, about: str, sharding: str, **mesh: int) -> Candidate:
    return Candidate(name, about, {"strategy": "fsdp", "fsdp": {"sharding_strategy": sharding}, "mesh": mesh or None})


def _zero(stage: int, about: str) -> Candidate:
    only_stage_3 = {} if stage == 3 else {"offload_parameters": "none"}
    keys = {"zero_stage": stage, "config_file": None, **only_stage_3}
    changes = {"strategy": "deepspeed", "zero_stage": None, "offload": None, "deepspeed": keys}
    return Candidate(f"zero_{stage}", about, changes)


def _mesh(name: str, about: str, sequence: bool = False, schedule: str = "1f1b", **sides: int) -> Candidate:
    changes = {
        "strategy": "mesh",
        "fsdp": {"sharding_strategy": "FULL_SHARD"},
        "tensor": {"sequence_parallel": sequence},
        "pipeline": {"schedule": schedule},
        "mesh": {"dp_shard": 1, **sides},
    }
    return Candidate(name, about, changes)


LAYOUTS = {
    row.name: row
    for row in (
        Candidate("single", "one device, the batch in micro-batches", {"strategy": "single"}),
        Candidate("ddp", "replicas, each with its share of the batch", {"strategy": "ddp"}),
        _fsdp("fsdp", "shards, gathered for the forward and again for the backward", "FULL_SHARD"),
        _fsdp("fsdp_shard_grad_op", "shards, gathered once for the forward and backward", "SHARD_GRAD_OP"),
        _fsdp("fsdp_no_shard", "replicas by FSDP", "NO_SHARD"),
        _fsdp("fsdp_hybrid", "two replicas, shards within each", "HYBRID_SHARD", dp_replicate=2, dp_shard=-1),
        _zero(1, "replicas by DeepSpeed, the optimizer in parts"),
        _zero(2, "replicas by DeepSpeed, optimizer and gradients in parts"),
        _zero(3, "DeepSpeed, everything in parts"),
        _mesh("tp", "parts of every layer", tp=-1),
        _mesh("tp_sp", "parts of every layer, and of the tokens in between", sequence=True, tp=-1),
        _mesh("tp_fsdp", "two parts of every layer, shards of each", tp=2, dp_shard=-1),
        _mesh("tp_ddp", "two parts of every layer, replicas of each", tp=2, dp_replicate=-1),
        _mesh("pp", "stages, one forward and one backward in turn", pp=-1),
        _mesh("pp_gpipe", "stages, all forwards before all backwards", schedule="gpipe", pp=-1),
        _mesh("pp_interleaved", "two stages on each process", schedule="interleaved", pp=-1),
        _mesh("pp_zbv", "two stages on each process, backwards in two halves", schedule="zbv", pp=-1),
        _mesh("pp_fsdp", "two stages, shards of each", pp=2, dp_shard=-1),
        _mesh("pp_ddp", "two stages, replicas of each", pp=2, dp_replicate=-1),
        _mesh("pp_tp", "two stages, parts of every layer", pp=2, tp=-1),
        _mesh("pp_tp_fsdp", "two stages, two parts of every layer, shards of each", pp=2, tp=2, dp_shard=-1),
        _mesh("cp", "parts of every sequence", cp=-1),
        _mesh("cp_fsdp", "two parts of every sequence, each by shards", cp=2, dp_shard=-1),
    )
}


def layout_on(run: Run, procs: int) -> Layout:
    """The layout of a run on so many processes of one machine; on one process if it is `single`."""
    size = 1 if run.config.distributed.strategy == "single" else procs
    return layout_of(run.config.training, run.config.distributed, size, size)


def own_candidate(run: Run, procs: int) -> Candidate:
    """The config's layout on so many processes, in words as its `about`; UserError if they cannot be it."""
    strategy = run.config.distributed.strategy
    if strategy == "auto":
        strategy = "ddp" if run.config.launch.processes > 1 else "single"
    layout = layout_on(changed(run, {"strategy": strategy}), procs)
    about, zero = wanted = _essence(layout)
    for row in LAYOUTS.values():
        with suppress(UserError):  # so many processes cannot be that one
            if _essence(layout_on(changed(run, row.changes), procs)) == wanted:
                return replace(row, about=about)
    if zero is not None:
        return Candidate(OWN, about, {"zero_stage": None, "offload": None, "deepspeed": zero.model_dump()})
    return Candidate(OWN, about, {"mesh": {**layout.mesh}})  # all other keys are the config's


def _essence(layout: Layout) -> tuple[str, DeepSpeedConfig | None]:
    """What makes a layout another one: what can be said of it, and the options of ZeRO."""
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
    """Why a layout cannot run this config on so many processes, if it cannot."""
    try:
        its_run = changed(run, candidate.changes)
        strategy, mesh = its_run.config.distributed.strategy, candidate.changes.get("mesh") or {}
        if strategy in ("single", "ddp") and (half := _half_weights(run)):
            return f"{strategy} does not support {half}; use fsdp or bf16"
        if strategy == "deepspeed" and not is_installed():
            return "it needs the package deepspeed: pip install 'shoal[deepspeed]'"
        needed = 2 * prod(size for size in mesh.values() if size != -1)
        if -1 in mesh.values() and procs < needed:
            return f"{procs} processes are too few for its mesh; use --procs {needed} or more"
        layout = layout_on(its_run, procs)
        return _why_not_cut(its_run, layout) if strategy == "mesh" else None
    except UserError as error:
        return str(error)


def _why_not_cut(run: Run, layout: Layout) -> str | None:
    """The same of a mesh, for which the model is built without memory."""
    recipe = run.recipe_type(run.recipe_config)
    recipe.check_mesh(layout.mesh)
    with parameters_on_meta():
        model = recipe.build_model()
    plan = recipe.parallel_plan(model)
    by_token = layout.mesh["tp"] == 1 or "sequence" in resolve(model, plan).values()
    if layout.sequence_parallel and not by_token:
        return "the plan names no modules that treat every token by itself"
    if layout.mesh["pp"] > 1:
        cut(model, plan, count_stages(layout.mesh["pp"], layout.schedule))
    if layout.mesh["cp"] > 1:
        attentions(model)
    return None


def _half_weights(run: Run) -> str | None:
    """The key that has parameters gathered in half precision, if one does."""
    precision, dtype = run.config.training.mixed_precision, run.config.distributed.fsdp.param_dtype
    if precision == "pure_bf16":
        return "mixed_precision: pure_bf16"
    return None if dtype in (None, "fp32") else f"fsdp.param_dtype: {dtype}"


def reference_run(run: Run, procs: int) -> Run:
    """The same training on one device, the whole batch at once, nothing recomputed, chunked or compiled."""
    batch = derive_batches(run.config.training, procs)[0].global_batch_size
    changes = {"strategy": "fsdp" if _half_weights(run) else "single", "mesh": None}
    plain = {"activation_checkpointing": {"mode": "none"}, "loss_chunks": 1, "compile": False}
    return changed(run, changes, {**_batches(batch, batch), **plain})


def candidate_run(run: Run, candidate: Candidate, procs: int) -> Run:
    """The training in a layout: the same global batch, split as the config says, or else into two micro-batches."""
    training, phase = run.config.training, derive_batches(run.config.training, procs)[0]
    batch_size = phase.batch_size
    if training.batch_size is None:
        layout = layout_on(changed(run, candidate.changes), procs)
        wanted = 2 if training.gradient_accumulation is None else accumulation(phase, procs)
        least = micro_batches_needed(layout.schedule, layout.mesh["pp"])
        batch_size = ceil(phase.global_batch_size / (max(wanted, least) * data_size(layout.mesh)))
    return changed(run, candidate.changes, _batches(phase.global_batch_size, batch_size))


def _batches(global_batch_size: int, batch_size: int) -> Tree:
    return {"global_batch_size": global_batch_size, "batch_size": batch_size, "gradient_accumulation": None}


def changed(run: Run, distributed: Mapping[str, object], training: Mapping[str, object] = MappingProxyType({})) -> Run:
    """The run on one machine with other keys; other options of a section stay as they are, but those of a mesh."""
    tree: Tree = run.tree()
    for key, value in distributed.items():
        others = {} if key == "mesh" else tree["distributed"][key]
        tree["distributed"][key] = {**others, **value} if isinstance(value, dict) else value
    tree["training"] |= training
    tree["launch"] |= {"nodes": 1, "procs_per_node": 1}
    return check_run(tree)
