"""What a cluster is asked for, and what is refused before it is asked: a job may wait for days in a queue."""

from __future__ import annotations

from shoal.config import Run
from shoal.config.layout import check_layout
from shoal.errors import UserError


def count_gpus(run: Run, key: str, asked: float | None, processes: int) -> float:
    """Returns the GPUs for some processes: what the key asks for, else one for each process; 0 on the CPU.

    Raises UserError if processes would be without a GPU, or GPUs without a use.
    """
    config = run.config
    device = config.training.device
    if device == "cpu":
        if asked:
            raise UserError(f"{key} = {asked:g}: training.device = cpu uses no GPU; leave one of the two keys out")
        return 0
    if asked == 0:
        raise UserError(
            f"{key} = 0: training.device = {device} would find no GPU; ask for {processes}, or set training.device "
            "to cpu"
        )
    if asked is not None and asked < processes and config.distributed.backend != "gloo":
        raise UserError(
            f"{key} = {asked:g}: each process needs a GPU of its own; ask for {processes}, or use distributed.backend "
            "= gloo"
        )
    return processes if asked is None else asked


def number_of_nodes(run: Run) -> int:
    """Returns the number of machines. Raises UserError for MIN:MAX, because jobs of a cluster have a fixed number."""
    nodes = run.config.launch.nodes
    if not isinstance(nodes, int):
        raise UserError(
            f"launch.nodes = {nodes}: with launch.target = {run.config.launch.target} the number of machines is fixed; "
            f"use {run.config.launch.max_nodes}"
        )
    return nodes


def check_layout_of(run: Run) -> None:
    """Raises UserError if the run could not be spread over its processes."""
    launch = run.config.launch
    check_layout(run.config, run.make_recipe(), launch.processes, launch.procs_per_node)
