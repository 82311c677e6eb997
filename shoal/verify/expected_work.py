"""What a layout should cost each rank: the parameters it holds, the FLOPs it computes, the bytes it sends.

`shoal verify` compares these numbers with what it counts. All of them follow from the layout, the batch sizes and the
shapes of the parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, inf, prod

from shoal.config.batch import accumulation, leaves_one
from shoal.config.layout import Layout
from shoal.config.mesh import data_size
from shoal.lora.adapters import is_adapter_tensor
from shoal.types import BatchPhase

# The names that torch's dispatcher has for the collectives.
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL = (
    "_allgather_base",
    "_reduce_scatter_base",
    "allreduce",
    "alltoall_base",
)
PLAIN_NAMES = {
    ALL_GATHER: "all-gather",
    REDUCE_SCATTER: "reduce-scatter",
    ALL_REDUCE: "all-reduce",
    ALL_TO_ALL: "all-to-all",
    "allgather": "all-gather of lists",
}


@dataclass(frozen=True)
class Range:
    """How many bytes a collective may send in a step, as a multiple of the bytes of all trained parameters."""

    low: float
    high: float

    @classmethod
    def exactly(cls, value: float) -> Range:
        """Returns the range that contains only this value."""
        return cls(value, value)

    def __str__(self) -> str:
        return f"{self.high:.2f}" if self.low in (0, self.high) else f"{self.low:.2f} to {self.high:.2f}"


ALLOWED = Range(0, inf)
"""For a collective that a layout may use; the number of bytes depends on the batch."""
REQUIRED = Range(1e-9, inf)
"""For a collective that a layout must use; the number of bytes depends on the batch."""


@dataclass(frozen=True)
class ExpectedWork:
    """The cost of a layout for each rank, as fractions of the cost on one device."""

    parameter_bytes: float
    flops: float | None
    """None if the FLOPs cannot be counted."""
    collectives: Mapping[str, Range]
    """The bytes that a step sends, by kind of collective."""
    state_bytes: float | None = None
    """The memory of the optimizer, if it is sharded differently from the parameters."""


@dataclass(frozen=True)
class Case:
    """One layout with one model: everything that the expected work depends on."""

    layout: Layout
    batches: BatchPhase
    shapes: Mapping[str, tuple[int, ...]]
    """The shapes of all parameters, by name."""
    trained: Collection[str]
    """The names of the parameters that have gradients."""
    itemsizes: Mapping[str, int] = field(default_factory=dict)
    """The bytes of an element of each parameter, by name, if it is not 4."""
    multiplies_weights: bool = False
    """True if adapters multiply matrices with each other, as DoRA does, and not only with activations."""
    has_objectives: bool = False
    """True if a step has several losses, each of some parameters, which use parameters as often as they like."""

    @property
    def recomputes(self) -> bool:
        """True if the backward computes activations again."""
        return self.layout.activation_checkpointing.mode != "none"

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches that each rank runs in a step."""
        return accumulation(self.batches, data_size(self.layout.mesh))

    @property
    def flops(self) -> float | None:
        """The fraction of a step's samples, including fillers, on the rank that runs the most."""
        if self.multiplies_weights:
            return None  # in every micro-batch, whatever its size
        batch_size, samples = self.batches.batch_size, self.batches.global_batch_size
        joined = batch_size == 2 and leaves_one(samples, batch_size)  # a micro-batch of three; see `num_runs`
        fraction = min(1.0, (self.micro_batches * batch_size + joined) / samples)
        if not self.recomputes:
            return fraction
        # A matrix product costs the forward, the gradient of its input, and that of its weight if that is trained.
        matrices = [name for name, shape in self.shapes.items() if len(shape) > 1]
        trained = self.numel([name for name in matrices if name in self.trained]) / max(self.numel(matrices), 1)
        return fraction * (3 + trained) / (2 + trained)

    def numel(self, names: Collection[str]) -> int:
        """Returns the number of elements of these parameters."""
        return sum(prod(self.shapes[name]) for name in names)

    def nbytes(self, names: Collection[str]) -> int:
        """Returns the bytes of these parameters."""
        return sum(prod(self.shapes[name]) * self.itemsizes.get(name, 4) for name in names)

    def held(self, shards: int, tensor_ranks: int = 1) -> float:
        """Returns the fraction of all parameters on the rank that holds the most.

        Tensor parallelism splits all parameters over `tensor_ranks`, except vectors and half of the adapters' matrices;
        what is left is sharded along its first dimension.
        """
        total = self.nbytes(self.shapes)
        vectors = self.nbytes([name for name, shape in self.shapes.items() if len(shape) < 2])
        whole = vectors + self.nbytes(self.adapters) if tensor_ranks > 1 else vectors
        padded = (_padded(s, tensor_ranks * shards) * self.itemsizes.get(n, 4) for n, s in self.shapes.items())
        padding = sum(padded) / total
        return padding * ((total - whole) / tensor_ranks + whole) / shards / total

    @property
    def adapters(self) -> list[str]:
        """The matrices of adapters, of which tensor parallelism may split none."""
        return [name for name, shape in self.shapes.items() if len(shape) > 1 and is_adapter_tensor(name)]

    def tensor_flops(self, tensor_ranks: int) -> float:
        """Returns the fraction of the matrix products that tensor parallelism leaves each rank."""
        # The weights of adapters are trained, which is a third product beside two of a frozen weight.
        adapters = 3 * self.numel(self.adapters)
        split = 2 * (self.numel(self.shapes) - self.numel(self.adapters))
        return (split / tensor_ranks + adapters) / (split + adapters)

    def sent(self, names: Collection[str], dtype: str, shards: int) -> float:
        """Returns the bytes that one all-gather of these parameters, or one reduction of their gradients, sends, as a
        multiple of the bytes of all trained parameters. Parameters that are not fp32 are sent as they are."""
        fp32 = 4 if dtype == "fp32" else 2
        sizes = {name: fp32 if size == 4 else size for name in names for size in [self.itemsizes.get(name, 4)]}
        padded = sum(_padded(self.shapes[name], shards) * sizes[name] for name in names)
        return padded / self.nbytes(self.trained)


def _padded(shape: tuple[int, ...], shards: int) -> int:
    """Returns the elements of a parameter whose first dimension is padded so that all shards have the same size."""
    return prod((ceil(shape[0] / shards) * shards, *shape[1:]))


def _replicated(case: Case) -> ExpectedWork:
    """For one device, or for DDP."""
    one_device = case.layout.world_size == 1
    return ExpectedWork(1, case.flops, {} if one_device else {ALL_REDUCE: Range.exactly(1)})


def _sharded(case: Case) -> ExpectedWork:
    """For FSDP, which gathers the parameters once for each micro-batch, or once more for its backward."""
    fsdp, shards = case.layout.fsdp, case.layout.mesh["dp_shard"]
    gathered = case.micro_batches * case.sent(case.shapes, case.layout.param_dtype, shards)
    reduced = case.sent(case.trained, fsdp.reduce_dtype or "fp32", shards)
    collectives = {}
    if shards > 1:
        most = gathered if fsdp.sharding_strategy == "SHARD_GRAD_OP" else 2 * gathered
        reductions = case.micro_batches if fsdp.reduce_every_micro_batch else 1
        collectives = {ALL_GATHER: Range(gathered, most), REDUCE_SCATTER: Range.exactly(reductions * reduced)}
    if shards < case.layout.world_size:
        collectives[ALL_REDUCE] = Range.exactly(reduced / shards)
    return ExpectedWork(case.held(shards), case.flops, collectives)


def _zero(case: Case) -> ExpectedWork:
    """For DeepSpeed's ZeRO, which splits the flattened parameters at any element."""
    zero, ranks = case.layout.zero, case.layout.world_size
    total, trained = case.nbytes(case.shapes), case.numel(case.trained)

    def split(names: Collection[str]) -> int:
        """Returns the elements on the rank that has the most. Stage 3 splits each parameter, the other stages split all
        parameters as one tensor."""
        pieces = [[name] for name in names] if zero.stage == 3 else [names]
        return sum(ceil(case.numel(piece) / ranks) for piece in pieces)

    def split_bytes(names: Collection[str]) -> int:
        return sum(ceil(case.numel([name]) / ranks) * case.itemsizes.get(name, 4) for name in names)

    trained_here = split(case.trained)
    reductions = 1 if zero.stage == 1 else case.micro_batches
    # An offloaded optimizer keeps a second copy of the weights on the host, unless the weights are offloaded too.
    offloaded = trained_here if zero.offload_optimizer != zero.offload_parameters else 0
    if zero.stage < 3:
        collectives = {ALL_REDUCE: Range.exactly(reductions)}
        return ExpectedWork(
            (total + 4 * offloaded) / total, case.flops, collectives, state_bytes=(trained_here + 2) / trained
        )
    whole = {n for n, shape in case.shapes.items() if prod(shape) <= zero.stage3_param_persistence_threshold}
    gathered = case.micro_batches * ranks * split_bytes(case.shapes.keys() - whole) / case.nbytes(case.trained)
    collectives = {
        ALL_GATHER: Range(gathered, (3 if case.recomputes else 2) * gathered),
        REDUCE_SCATTER: Range.exactly(reductions * ranks * trained_here / trained),
    }
    held = (split_bytes(case.shapes) + 4 * offloaded + case.nbytes(whole)) / total
    return ExpectedWork(held, case.flops, collectives, state_bytes=trained_here / trained)


def _mesh(case: Case) -> ExpectedWork:
    """For strategy mesh. The bytes that it sends depend on the batch, so the fractions of parameters and FLOPs, and the
    kinds of collectives, show whether it does its work."""
    mesh = case.layout.mesh
    # Layers cannot always be divided evenly: a stage may have up to halfway between 1/pp and everything.
    stage = 1 / mesh["pp"] + (1 - 1 / mesh["pp"]) / 2 if mesh["pp"] > 1 else 1
    flops = case.flops and case.flops * stage * case.tensor_flops(mesh["tp"]) / mesh["cp"]
    held = case.held(mesh["dp_shard"] * mesh["cp"], mesh["tp"]) * stage
    in_tp = [ALL_GATHER, REDUCE_SCATTER] if case.layout.sequence_parallel else [ALL_REDUCE]
    required = {"tp": in_tp, "cp": [ALL_TO_ALL], "pp": ["send", "recv"]}
    collectives = dict.fromkeys((ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, "allgather"), ALLOWED)
    collectives |= {kind: REQUIRED for side, kinds in required.items() if mesh[side] > 1 for kind in kinds}
    return ExpectedWork(held, flops, collectives)


_BY_STRATEGY = {"single": _replicated, "ddp": _replicated, "fsdp": _sharded, "deepspeed": _zero, "mesh": _mesh}


def expected_work(case: Case) -> ExpectedWork:
    """Returns what a layout should cost each rank."""
    work = _BY_STRATEGY[case.layout.strategy](case)
    if case.has_objectives and case.layout.strategy == "fsdp":
        work = replace(work, collectives=dict.fromkeys(work.collectives, REQUIRED))
    if case.layout.sync_batch_norm and case.layout.world_size > 1:
        # Statistics are gathered in the forward and summed in the backward; their bytes depend on the model.
        least = {kind: work.collectives.get(kind, ALLOWED).low for kind in (ALL_GATHER, ALL_REDUCE)}
        work = replace(work, collectives={**work.collectives, **{kind: Range(low, inf) for kind, low in least.items()}})
    if case.layout.world_size > 1:
        # Persistent buffers are sent before each step.
        return replace(work, collectives={"broadcast": ALLOWED, **work.collectives})
    return work
