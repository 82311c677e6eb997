"""The layouts that can be proved, and what each promises. A new layout joins by a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from shoal.config import Run, check_run, derive_batches
from shoal.config.yaml import Tree
from shoal.verify.compare import Promise


@dataclass(frozen=True)
class Layout:
    name: str
    about: str
    changes: Callable[[int], dict[str, object]]
    """Number of processes → the keys of `distributed` that make this layout."""
    promise: Callable[[int, float], Promise]
    """(processes, the largest share of a step's samples that a rank runs) → what it costs a rank."""
    several: bool = True
    """Whether it needs more than one process."""


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(
            "single",
            "one device, the batch in micro-batches",
            changes=lambda procs: {"strategy": "single"},
            promise=lambda procs, share: Promise(parameter_bytes=1, flops=1, all_reduce_bytes=0),
            several=False,
        ),
        Layout(
            "ddp",
            "replicas, each with its share of the batch",
            changes=lambda procs: {"strategy": "ddp"},
            promise=lambda procs, share: Promise(
                parameter_bytes=1, flops=share, all_reduce_bytes=1, other_collectives=frozenset({"broadcast"})
            ),  # DDP keeps buffers equal by broadcasting them
        ),
    )
}


def reference_run(run: Run, procs: int) -> Run:
    """The same training on one device, the whole batch at once."""
    (phase, *_) = derive_batches(run.config.training, procs)
    return _changed(run, {"strategy": "single"}, phase.global_batch_size, phase.global_batch_size)


def layout_run(run: Run, layout: Layout, procs: int) -> Run:
    """The training in a layout: the same global batch, split as the config says, or else into two micro-batches."""
    (phase, *_) = derive_batches(run.config.training, procs)
    batch_size = phase.batch_size
    if run.config.training.batch_size is None and run.config.training.gradient_accumulation is None:
        batch_size = ceil(phase.global_batch_size / (2 * (procs if layout.several else 1)))
    return _changed(run, layout.changes(procs), phase.global_batch_size, batch_size)


def largest_share(run: Run, procs: int) -> float:
    """Of a step's samples, fillers included, on the rank that runs the most."""
    (phase, *_) = derive_batches(run.config.training, procs)
    micro_batches = ceil(phase.global_batch_size / (phase.batch_size * procs))
    return min(1.0, micro_batches * phase.batch_size / phase.global_batch_size)


def _changed(run: Run, distributed: dict[str, object], global_batch_size: int, batch_size: int) -> Run:
    tree: Tree = run.tree()
    tree["distributed"] = {**tree["distributed"], **distributed}
    tree["training"] |= {
        "global_batch_size": global_batch_size,
        "batch_size": batch_size,
        "gradient_accumulation": None,
    }
    tree["launch"] |= {"nodes": 1, "procs_per_node": 1}
    return check_run(tree)
