"""What a layout costs each rank: parameters held, FLOPs computed, bytes sent.

All of it follows from the config, the mesh and the shapes of the parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import ceil, inf, prod

from shoal.config.batch import accumulation
from shoal.config.layout import Layout
from shoal.config.mesh import data_size
from shoal.types import BatchPhase

GATHER, SCATTER, REDUCE, SWAP = "_allgather_base", "_reduce_scatter_base", "allreduce", "alltoall_base"


@dataclass(frozen=True)
class Range:
    low: float
    high: float

    @classmethod
    def exactly(cls, value: float) -> Range:
        return cls(value, value)

    def __str__(self) -> str:
        return f"{self.high:.2f}" if self.low in (0, self.high) else f"{self.low:.2f} to {self.high:.2f}"


ALLOWED = Range(0, inf)
"""Of a collective that a layout may use, as much as the batch takes."""
NEEDED = Range(1e-9, inf)
"""Of one that it has to use."""


@dataclass(frozen=True)
class Promise:
    """What a layout says it costs a rank, as shares of what one device has."""

    parameter_bytes: float
    flops: float | None
    """None if they cannot be counted."""
    collectives: Mapping[str, Range]
    """By kind: what a step sends, as a share of the bytes of all parameters that are trained."""
    state_bytes: float | None = None
    """What the optimizer keeps, where that is split otherwise than the parameters."""


@dataclass(frozen=True)
class Case:
    """One layout on one config: what a promise depends on."""

    layout: Layout
    batches: BatchPhase
    shapes: Mapping[str, tuple[int, ...]]
    """Of the parameters."""
    trained: Collection[str]
    """Those of them that have gradients."""

    @property
    def recomputes(self) -> bool:
        return self.layout.activation_checkpointing.mode != "none"

    @property
    def micro_batches(self) -> int:
        return accumulation(self.batches, data_size(self.layout.mesh))

    @property
    def flops(self) -> float | None:
        """The share of a step's samples, fillers included, on the rank that runs the most."""
        if self.layout.compile:
            return None  # compiled products are not counted
        share = min(1.0, self.micro_batches * self.batches.batch_size / self.batches.global_batch_size)
        return share * 4 / 3 if self.recomputes else share

    def numel(self, names: Collection[str]) -> int:
        return sum(prod(self.shapes[name]) for name in names)

    def held(self, shards: int, parts: int = 1) -> float:
        """The share of all parameters on the rank with most, where tensor parallelism has cut all but vectors into
        parts and each is then sharded along its first dimension."""
        total, vectors = self.numel(self.shapes), self.numel([n for n, shape in self.shapes.items() if len(shape) < 2])
        padded = sum(_padded(shape, parts * shards) for shape in self.shapes.values()) / total
        return padded * ((total - vectors) / parts + vectors) / shards / total

    def sent(self, names: Collection[str], dtype: str, shards: int) -> float:
        """What exchanging these parameters or their gradients once sends, as a share of the bytes that are trained."""
        padded = sum(_padded(self.shapes[name], shards) for name in names)
        return (1.0 if dtype == "fp32" else 0.5) * padded / self.numel(self.trained)


def _padded(shape: tuple[int, ...], shards: int) -> int:
    """The elements of a parameter, with its first dimension filled up so that every shard is as large."""
    return prod((ceil(shape[0] / shards) * shards, *shape[1:]))


def _replicated(case: Case) -> Promise:
    """One device, or DDP, which keeps buffers equal by broadcasting them."""
    alone = case.layout.world_size == 1
    return Promise(1, case.flops, {} if alone else {REDUCE: Range.exactly(1), "broadcast": ALLOWED})


def _sharded(case: Case) -> Promise:
    """FSDP, which gathers the parameters for each micro-batch once, or again for its backward."""
    fsdp, shards = case.layout.fsdp, case.layout.mesh["dp_shard"]
    gathered = case.micro_batches * case.sent(case.shapes, case.layout.param_dtype, shards)
    reduced = case.sent(case.trained, fsdp.reduce_dtype or "fp32", shards)
    collectives = {}
    if shards > 1:
        twice = gathered if fsdp.sharding_strategy == "SHARD_GRAD_OP" else 2 * gathered
        sums = case.micro_batches if fsdp.reduce_every_micro_batch else 1
        collectives = {GATHER: Range(gathered, twice), SCATTER: Range.exactly(sums * reduced)}
    if shards < case.layout.world_size:
        collectives[REDUCE] = Range.exactly(reduced / shards)
    return Promise(case.held(shards), case.flops, collectives)


def _zero(case: Case) -> Promise:
    """ZeRO by DeepSpeed, which lays parameters end to end and cuts anywhere."""
    zero, ranks = case.layout.zero, case.layout.world_size
    total, trained = case.numel(case.shapes), case.numel(case.trained)

    def split(names: Collection[str]) -> int:
        """Elements on the rank with most: each parameter is cut by itself under stage 3, all together below."""
        pieces = [[name] for name in names] if zero.stage == 3 else [names]
        return sum(ceil(case.numel(piece) / ranks) for piece in pieces)

    own = split(case.trained)
    sums = 1 if zero.stage == 1 else case.micro_batches
    # In the host's memory, beside those that compute, unless those are there too.
    again = own if zero.offload_optimizer != zero.offload_parameters else 0
    if zero.stage < 3:
        collectives = {REDUCE: Range.exactly(sums)}
        return Promise((total + again) / total, case.flops, collectives, state_bytes=(own + 2) / trained)
    small = {n for n, shape in case.shapes.items() if prod(shape) <= zero.stage3_param_persistence_threshold}
    gathered = case.micro_batches * ranks * split(case.shapes.keys() - small) / trained
    collectives = {
        GATHER: Range(gathered, (3 if case.recomputes else 2) * gathered),
        SCATTER: Range.exactly(sums * ranks * own / trained),
    }
    held = (split(case.shapes) + again + case.numel(small)) / total
    return Promise(held, case.flops, collectives, state_bytes=own / trained)


def _mesh(case: Case) -> Promise:
    """A product of layouts. What it exchanges depends on the batch, so that its share of parameters and FLOPs are what
    shows that it is at work."""
    mesh = case.layout.mesh
    stage = 1 / mesh["pp"] + (1 - 1 / mesh["pp"]) / 2 if mesh["pp"] > 1 else 1  # layers do not come out even
    flops = case.flops and case.flops * stage / (mesh["tp"] * mesh["cp"])
    held = case.held(mesh["dp_shard"] * mesh["cp"], mesh["tp"]) * stage
    in_tp = [GATHER, SCATTER] if case.layout.sequence_parallel else [REDUCE]
    needs = {"tp": in_tp, "cp": [SWAP], "pp": ["send", "recv"]}
    collectives = dict.fromkeys((REDUCE, GATHER, SCATTER, SWAP, "allgather", "broadcast"), ALLOWED)
    collectives |= {kind: NEEDED for side, kinds in needs.items() if mesh[side] > 1 for kind in kinds}
    return Promise(held, flops, collectives)


_PROMISES = {"single": _replicated, "ddp": _replicated, "fsdp": _sharded, "deepspeed": _zero, "mesh": _mesh}


def promise_of(case: Case) -> Promise:
    return _PROMISES[case.layout.strategy](case)
