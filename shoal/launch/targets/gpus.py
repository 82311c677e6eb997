"""How many GPUs a run asks a cluster for."""

from __future__ import annotations

from shoal.config import Run
from shoal.errors import UserError


def gpus_per_node(run: Run, key: str, asked: int | None) -> int:
    """Returns the GPUs of each machine: what the key asks for, else one for each process; 0 on the CPU.

    Raises UserError if processes would be without a GPU, or GPUs without a use.
    """
    config = run.config
    processes, device = config.launch.procs_per_node, config.training.device
    if device == "cpu":
        if asked:
            raise UserError(
                f"{key} = {asked}: training.device = cpu uses no GPU; leave one of the two keys out"
            )
        return 0
    if asked == 0:
        raise UserError(
            f"{key} = 0: training.device = {device} would find no GPU; ask for {processes}, or set training.device "
            "to cpu"
        )
    if asked is not None and asked < processes and config.distributed.backend != "gloo":
        raise UserError(
            f"{key} = {asked}: launch.procs_per_node = {processes} processes need one GPU each; ask for {processes}, "
            "or start fewer processes"
        )
    return processes if asked is None else asked
