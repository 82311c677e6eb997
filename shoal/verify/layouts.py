"""The layouts that can be proved, and what each promises. A new layout joins by a row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import ceil, prod

from shoal.config import Run, check_run, derive_batches
from shoal.config.schema import FSDPConfig, TrainingConfig
from shoal.config.yaml import Tree
from shoal.verify.compare import Promise, Range

GATHER, SCATTER, REDUCE = "_allgather_base", "_reduce_scatter_base", "allreduce"


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

    @property
    def share(self) -> float:
        """Of a step's samples, fillers included, on the rank that runs the most."""
        (phase, *_) = derive_batches(self.training, self.procs)
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
    unfit: Callable[[Run, int], str | None] = field(default=lambda run, procs: None)
    """Why it cannot run this config on so many processes, if it cannot."""


def _fsdp(sharding: str, **mesh: int) -> Callable[[int], dict[str, object]]:
    return lambda procs: {"strategy": "fsdp", "fsdp": {"sharding_strategy": sharding}, "mesh": mesh or None}


def _sharded(case: Case, shards: int, gathers: tuple[float, float]) -> Promise:
    """`gathers` is how often a micro-batch gathers the parameters, at least and at most."""
    low, high = (case.micro_batches * times * case.gathered(shards) for times in gathers)
    collectives = {GATHER: Range(low, high), SCATTER: Range.exactly(case.scattered(shards))}
    if shards < case.procs:
        collectives[REDUCE] = Range.exactly(case.reduced(shards) / shards)
    return Promise(case.held(shards), case.flops, collectives)


def _gathers_in_half(run: Run) -> bool:
    return (
        run.config.training.mixed_precision == "pure_bf16"
        or (run.config.distributed.fsdp.param_dtype or "fp32") != "fp32"
    )


def _no_half_weights(run: Run, procs: int) -> str | None:
    return "it has no weights in half precision" if _gathers_in_half(run) else None


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
            promise=lambda case: _sharded(case, case.procs, (1, 2)),
        ),
        Layout(
            "fsdp_shard_grad_op",
            "shards, gathered once for the forward and backward",
            changes=_fsdp("SHARD_GRAD_OP"),
            promise=lambda case: _sharded(case, case.procs, (1, 1)),
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
            promise=lambda case: _sharded(case, case.procs // 2, (1, 2)),
            unfit=lambda run, procs: (
                f"{procs} processes are not two replicas of several" if procs < 4 or procs % 2 else None
            ),
        ),
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
    batch_size = phase.batch_size
    if run.config.training.batch_size is None and run.config.training.gradient_accumulation is None:
        batch_size = ceil(phase.global_batch_size / (2 * (procs if layout.several else 1)))
    return _changed(run, layout.changes(procs), phase.global_batch_size, batch_size, {})


def layout_case(run: Run, procs: int, shapes: Mapping[str, tuple[int, ...]], trained: Collection[str]) -> Case:
    """`run` is what `layout_run` made."""
    (phase, *_) = derive_batches(run.config.training, procs)
    micro_batches = ceil(phase.global_batch_size / (phase.batch_size * procs))
    return Case(procs, run.config.training, micro_batches, shapes, trained, run.config.distributed.fsdp)


def _changed(
    run: Run, distributed: Mapping[str, object], global_batch_size: int, batch_size: int, training: Tree
) -> Run:
    tree: Tree = run.tree()
    for key, value in distributed.items():  # the other options of a section stay as the config has them
        tree["distributed"][key] = {**(tree["distributed"][key] or {}), **value} if isinstance(value, dict) else value
    tree["training"] |= {
        "global_batch_size": global_batch_size,
        "batch_size": batch_size,
        "gradient_accumulation": None,
        **training,
    }
    tree["launch"] |= {"nodes": 1, "procs_per_node": 1}
    return check_run(tree)
