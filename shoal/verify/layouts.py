"""The layouts that can be proved, and what each promises. A new layout joins by a row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import ceil, prod

from torch import nn

from shoal.config import Run, check_run, derive_batches
from shoal.config.batch import accumulation
from shoal.config.mesh import data_size, fill_mesh, micro_batches_needed
from shoal.config.schema import TrainingConfig
from shoal.config.schema_distributed import DeepSpeedConfig, DistributedConfig, FSDPConfig
from shoal.config.yaml import Tree
from shoal.errors import UserError
from shoal.parallel.context.ulysses import attentions
from shoal.parallel.pipeline.stages import count_stages, cut
from shoal.parallel.tensor.tensor_parallel import resolve
from shoal.parallel.zero.partition import is_installed
from shoal.types import ParallelPlan
from shoal.verify.compare import Promise, Range
from shoal.weights import parameters_on_meta

GATHER, SCATTER, REDUCE, SWAP = "_allgather_base", "_reduce_scatter_base", "allreduce", "alltoall_base"


@dataclass(frozen=True)
class Case:
    """One layout on one config: what a promise depends on."""

    procs: int
    training: TrainingConfig
    micro_batches: int
    shapes: Mapping[str, tuple[int, ...]]
    """Of the parameters."""
    trained: Collection[str]
    """Those of them that have gradients."""
    fsdp: FSDPConfig
    data: int
    """How many ranks have different samples."""
    zero: DeepSpeedConfig

    @property
    def share(self) -> float:
        """Of a step's samples, fillers included, on the rank that runs the most."""
        (phase, *_) = derive_batches(self.training, self.data)
        return min(1.0, self.micro_batches * phase.batch_size / phase.global_batch_size)

    @property
    def flops(self) -> Range | None:
        if self.training.compile:
            return None  # compiled products are not counted
        recomputed = 1 if self.training.activation_checkpointing.mode == "none" else 4 / 3
        return Range(0, self.share * recomputed)

    def held(self, shards: int) -> float:
        """The share of all parameters on the rank with most, each cut along its first dimension."""
        return self._padded(self.shapes, shards) / shards / self._numel(self.shapes)

    def cut(self, parts: int, shards: int) -> float:
        """The same where tensor parallelism has cut all but vectors before."""
        vectors = [name for name, shape in self.shapes.items() if len(shape) < 2]
        cut = self._numel(self.shapes) - self._numel(vectors)
        padded = self._padded(self.shapes, parts * shards) / self._numel(self.shapes)
        return padded * (cut / parts + self._numel(vectors)) / shards / self._numel(self.shapes)

    def gathered(self, shards: int) -> float:
        """What gathering all parameters sends, as a share of the bytes that are trained."""
        return self._bytes(self.fsdp.param_dtype) * self._padded(self.shapes, shards) / self._numel(self.trained)

    def scattered(self, shards: int) -> float:
        """What summing all gradients sends, once or for every micro-batch."""
        times = self.micro_batches if self.fsdp.reduce_every_micro_batch else 1
        return times * self.reduced(shards)

    def reduced(self, shards: int) -> float:
        half = self._bytes(self.fsdp.reduce_dtype or "fp32")
        return half * self._padded(self.trained, shards) / self._numel(self.trained)

    def _bytes(self, dtype: str | None) -> float:
        """Of fp32's."""
        dtype = dtype or ("bf16" if self.training.mixed_precision == "pure_bf16" else "fp32")
        return 1.0 if dtype == "fp32" else 0.5

    def _numel(self, names: Collection[str]) -> int:
        return sum(prod(self.shapes[name]) for name in names)

    def _padded(self, names: Collection[str], shards: int) -> int:
        """Elements, with each parameter's first dimension filled up so that every shard is as large."""
        return sum(prod((ceil(self.shapes[name][0] / shards) * shards, *self.shapes[name][1:])) for name in names)


@dataclass(frozen=True)
class Layout:
    name: str
    about: str
    changes: Callable[[int], dict[str, object]]
    """Number of processes → the keys of `distributed` that make this layout."""
    promise: Callable[[Case], Promise]
    """What it costs a rank."""
    several: bool = True
    """Whether it needs more than one process."""
    data: Callable[[int], int] = field(default=lambda procs: procs)
    """How many of so many processes have different samples."""
    micro_batches: Callable[[int], int] = field(default=lambda procs: 1)
    """How many a step has to have at least."""
    unfit: Callable[[Run, int], str | None] = field(default=lambda run, procs: None)
    """Why it cannot run this config on so many processes, if it cannot."""


def _fsdp(sharding: str, **mesh: int) -> Callable[[int], dict[str, object]]:
    return lambda procs: {"strategy": "fsdp", "fsdp": {"sharding_strategy": sharding}, "mesh": mesh or None}


def sharded(case: Case, shards: int, gathers: tuple[float, float]) -> Promise:
    """`gathers` is how often a micro-batch gathers the parameters, at least and at most."""
    low, high = (case.micro_batches * times * case.gathered(shards) for times in gathers)
    collectives = {GATHER: Range(low, high), SCATTER: Range.exactly(case.scattered(shards))}
    if shards < case.procs:
        collectives[REDUCE] = Range.exactly(case.reduced(shards) / shards)
    return Promise(case.held(shards), case.flops, collectives)


def _zero(stage: int, about: str) -> Layout:
    """ZeRO by DeepSpeed, which lays parameters end to end and cuts anywhere."""
    keys: dict[str, object] = {"zero_stage": stage, "config_file": None}
    if stage < 3:
        keys["offload_parameters"] = "none"

    def split(case: Case, names: Collection[str]) -> int:
        """Elements on the rank with most: each parameter is cut by itself under stage 3, all together below."""
        numels = [prod(case.shapes[name]) for name in names]
        return sum(ceil(numel / case.procs) for numel in numels) if stage == 3 else ceil(sum(numels) / case.procs)

    def promise(case: Case) -> Promise:
        total, trained = (sum(prod(case.shapes[n]) for n in names) for names in (case.shapes, case.trained))
        own = split(case, case.trained)
        sums = 1 if stage == 1 else case.micro_batches
        # In the host's memory, beside those that compute, unless those are there too.
        again = own if case.zero.offload_optimizer != case.zero.offload_parameters else 0
        if stage < 3:
            collectives = {REDUCE: Range.exactly(sums)}
            return Promise((total + again) / total, case.flops, collectives, state_bytes=(own + 2) / trained)
        small = [n for n, shape in case.shapes.items() if prod(shape) <= case.zero.stage3_param_persistence_threshold]
        whole = sum(prod(case.shapes[name]) for name in small)
        large = case.procs * split(case, case.shapes.keys() - {*small})
        recomputed = 0 if case.training.activation_checkpointing.mode == "none" else 1
        gathers = Range(case.micro_batches * large / trained, (2 + recomputed) * case.micro_batches * large / trained)
        collectives = {GATHER: gathers, SCATTER: Range.exactly(sums * case.procs * own / trained)}
        held = (split(case, case.shapes) + again + whole) / total
        return Promise(held, case.flops, collectives, state_bytes=own / trained)

    def unfit(run: Run, procs: int) -> str | None:
        if not is_installed():
            return "it needs the package deepspeed: pip install 'shoal[deepspeed]'"
        precision = run.config.training.mixed_precision
        return None if precision in ("fp32", "bf16", "fp16") else f"it has no {precision}"

    changes: dict[str, object] = {"strategy": "deepspeed", "zero_stage": None, "offload": None, "deepspeed": keys}
    return Layout(f"zero_{stage}", about, changes=lambda procs: changes, promise=promise, unfit=unfit)


def _gathers_in_half(run: Run) -> bool:
    return (
        run.config.training.mixed_precision == "pure_bf16"
        or (run.config.distributed.fsdp.param_dtype or "fp32") != "fp32"
    )


def _no_half_weights(run: Run, procs: int) -> str | None:
    return "it has no weights in half precision" if _gathers_in_half(run) else None


def _on_meta(run: Run) -> tuple[nn.Module, ParallelPlan]:
    """The model without memory, and its plan: enough to know how it can be cut."""
    recipe = run.recipe_type(run.recipe_config)
    with parameters_on_meta():
        model = recipe.build_model()
    return model, recipe.parallel_plan(model)


EXCHANGES = frozenset({REDUCE, GATHER, SCATTER, SWAP, "allgather", "broadcast"})


def mesh_layout(
    name: str,
    about: str,
    sequence: bool = False,
    schedule: str = "1f1b",
    **sides: int,
) -> Layout:
    """A product of layouts; `-1` is what is left of the processes. What it exchanges depends on the batch, so that its
    share of parameters and FLOPs are what shows that it is at work."""

    def sizes(procs: int) -> dict[str, int]:
        return fill_mesh({"dp_shard": 1, **sides}, procs)

    def promise(case: Case) -> Promise:
        mesh = sizes(case.procs)
        stage = 1 / mesh["pp"] + (1 - 1 / mesh["pp"]) / 2 if mesh.get("pp", 1) > 1 else 1  # layers do not come out even
        parts = mesh.get("tp", 1) * mesh.get("cp", 1)
        flops = case.flops and Range(0, case.flops.high * stage / parts)
        held = case.cut(mesh.get("tp", 1), mesh["dp_shard"] * mesh.get("cp", 1)) * stage
        needs = {"tp": {GATHER, SCATTER} if sequence else {REDUCE}, "cp": {SWAP}, "pp": {"send", "recv"}}
        used = frozenset[str]().union(*(kinds for side, kinds in needs.items() if mesh.get(side, 1) > 1))
        return Promise(held, flops, {}, others=EXCHANGES | used, needs=used)

    def unfit(run: Run, procs: int) -> str | None:
        training = run.config.training
        if schedule == "zbv" and (training.compile or training.loss_chunks > 1):
            return "a backward that is compiled, or of a loss in chunks, has no halves"
        try:
            mesh = sizes(procs)
            if min(mesh[side] for side in sides) < 2:
                return f"{procs} processes leave one of its dimensions empty"
            run.recipe_type(run.recipe_config).check_mesh(mesh)
            model, plan = _on_meta(run)
            if mesh.get("tp", 1) > 1 and "sequence" not in resolve(model, plan).values() and sequence:
                return "the plan names no modules that treat every token by itself"
            if mesh.get("pp", 1) > 1:
                cut(model, plan, count_stages(mesh["pp"], schedule))
            if mesh.get("cp", 1) > 1:
                attentions(model)
        except UserError as error:
            return str(error)
        return None

    changes: dict[str, object] = {
        "strategy": "mesh",
        "fsdp": {"sharding_strategy": "FULL_SHARD"},
        "tensor": {"sequence_parallel": sequence},
        "pipeline": {"schedule": schedule},
    }
    return Layout(
        name,
        about,
        changes=lambda procs: {**changes, "mesh": sizes(procs)},
        promise=promise,
        data=lambda procs: data_size(sizes(procs)),
        micro_batches=lambda procs: micro_batches_needed(schedule, count_stages(sizes(procs).get("pp", 1), schedule)),
        unfit=unfit,
    )


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(
            "single",
            "one device, the batch in micro-batches",
            changes=lambda procs: {"strategy": "single"},
            promise=lambda case: Promise(1, case.flops, {}),
            several=False,
            unfit=_no_half_weights,
        ),
        Layout(
            "ddp",
            "replicas, each with its share of the batch",
            changes=lambda procs: {"strategy": "ddp"},
            promise=lambda case: Promise(  # DDP keeps buffers equal by broadcasting them
                1, case.flops, {REDUCE: Range.exactly(1)}, others=frozenset({"broadcast"})
            ),
            unfit=_no_half_weights,
        ),
        Layout(
            "fsdp",
            "shards, gathered for the forward and again for the backward",
            changes=_fsdp("FULL_SHARD"),
            promise=lambda case: sharded(case, case.procs, (1, 2)),
        ),
        Layout(
            "fsdp_shard_grad_op",
            "shards, gathered once for the forward and backward",
            changes=_fsdp("SHARD_GRAD_OP"),
            promise=lambda case: sharded(case, case.procs, (1, 1)),
        ),
        Layout(
            "fsdp_no_shard",
            "replicas by FSDP",
            changes=_fsdp("NO_SHARD"),
            promise=lambda case: Promise(1, case.flops, {REDUCE: Range.exactly(case.reduced(1))}),
        ),
        Layout(
            "fsdp_hybrid",
            "two replicas, shards within each",
            changes=_fsdp("HYBRID_SHARD", dp_replicate=2, dp_shard=-1),
            promise=lambda case: sharded(case, case.procs // 2, (1, 2)),
            unfit=lambda run, procs: (
                f"{procs} processes are not two replicas of several" if procs < 4 or procs % 2 else None
            ),
        ),
        _zero(1, "replicas by DeepSpeed, the optimizer in parts"),
        _zero(2, "replicas by DeepSpeed, optimizer and gradients in parts"),
        _zero(3, "DeepSpeed, everything in parts"),
        mesh_layout("tp", "parts of every layer", tp=-1),
        mesh_layout("tp_sp", "parts of every layer, and of the tokens in between", sequence=True, tp=-1),
        mesh_layout("tp_fsdp", "two parts of every layer, shards of each", tp=2, dp_shard=-1),
        mesh_layout("tp_ddp", "two parts of every layer, replicas of each", tp=2, dp_replicate=-1),
        mesh_layout("pp", "stages, one forward and one backward in turn", pp=-1),
        mesh_layout("pp_gpipe", "stages, all forwards before all backwards", schedule="gpipe", pp=-1),
        mesh_layout("pp_interleaved", "two stages on each process", schedule="interleaved", pp=-1),
        mesh_layout("pp_zbv", "two stages on each process, backwards in two halves", schedule="zbv", pp=-1),
        mesh_layout("pp_fsdp", "two stages, shards of each", pp=2, dp_shard=-1),
        mesh_layout("pp_ddp", "two stages, replicas of each", pp=2, dp_replicate=-1),
        mesh_layout("pp_tp", "two stages, parts of every layer", pp=2, tp=-1),
        mesh_layout("pp_tp_fsdp", "two stages, two parts of every layer, shards of each", pp=2, tp=2, dp_shard=-1),
        mesh_layout("cp", "parts of every sequence", cp=-1),
        mesh_layout("cp_fsdp", "two parts of every sequence, each by shards", cp=2, dp_shard=-1),
    )
}


def reference_run(run: Run, procs: int) -> Run:
    """The same training on one device, the whole batch at once, nothing recomputed, chunked or compiled."""
    (phase, *_) = derive_batches(run.config.training, procs)
    pure = _gathers_in_half(run)
    plain = {"activation_checkpointing": {"mode": "none"}, "loss_chunks": 1, "compile": False}
    batch = phase.global_batch_size
    return _changed(run, {"strategy": "fsdp" if pure else "single", "mesh": None}, batch, batch, plain)


def layout_run(run: Run, layout: Layout, procs: int) -> Run:
    """The training in a layout: the same global batch, split as the config says, or else into two micro-batches."""
    (phase, *_) = derive_batches(run.config.training, procs)
    training, data = run.config.training, layout.data(procs) if layout.several else 1
    batch_size, least = phase.batch_size, layout.micro_batches(procs)
    if training.batch_size is None:
        wanted = 2 if training.gradient_accumulation is None else accumulation(phase, procs)
        batch_size = ceil(phase.global_batch_size / (max(wanted, least) * data))
    return _changed(run, layout.changes(procs), phase.global_batch_size, batch_size, {})


def layout_case(
    run: Run, layout: Layout, procs: int, shapes: Mapping[str, tuple[int, ...]], trained: Collection[str]
) -> Case:
    """`run` is what `layout_run` made."""
    data = layout.data(procs)
    (phase, *_) = derive_batches(run.config.training, data)
    micro_batches = accumulation(phase, data)
    return Case(
        procs,
        run.config.training,
        micro_batches,
        shapes,
        trained,
        run.config.distributed.fsdp,
        data,
        run.config.distributed.zero,
    )


def distributed_as(run: Run, changes: Mapping[str, object]) -> DistributedConfig:
    """The config's, changed; other options of a section stay as they are, but those of a mesh."""
    tree: Tree = run.config.distributed.model_dump()
    for key, value in changes.items():
        others = {} if key == "mesh" else tree[key]
        tree[key] = {**others, **value} if isinstance(value, dict) else value
    return DistributedConfig.model_validate(tree)


def _changed(
    run: Run, distributed: Mapping[str, object], global_batch_size: int, batch_size: int, training: Tree
) -> Run:
    tree: Tree = run.tree()
    tree["distributed"] = distributed_as(run, distributed).model_dump()
    tree["training"] |= {
        "global_batch_size": global_batch_size,
        "batch_size": batch_size,
        "gradient_accumulation": None,
        **training,
    }
    tree["launch"] |= {"nodes": 1, "procs_per_node": 1}
    return check_run(tree)
