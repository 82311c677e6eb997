"""Where a run is computed."""

from typing import Any

from shoal.config.schema import Config
from shoal.parallel.world import World
from shoal.strategies.base import DistributedStrategy, Objective
from shoal.strategies.ddp import DDPStrategy
from shoal.strategies.fsdp import FSDPStrategy
from shoal.strategies.single import SingleStrategy

__all__ = ["DDPStrategy", "DistributedStrategy", "FSDPStrategy", "Objective", "SingleStrategy", "from_config"]


def from_config(config: Config) -> DistributedStrategy:
    """The strategy a config names. `auto` is `single` for one process and `ddp` for several."""
    training, distributed = config.training, config.distributed
    common: dict[str, Any] = {
        "device": training.device,
        "mixed_precision": training.mixed_precision,
        "tf32": training.tf32,
        "compile": training.compile,
        "activation_checkpointing": training.activation_checkpointing,
        "loss_chunks": training.loss_chunks,
        "seed": config.experiment.seed,
        "deterministic": config.experiment.deterministic,
        "backend": distributed.backend,
        "timeout": distributed.timeout,
    }
    name = distributed.strategy
    if name == "auto":
        name = "ddp" if World.from_environment().size > 1 else "single"
    if name == "single":
        return SingleStrategy(**common)
    if name == "fsdp":
        mesh = distributed.mesh.model_dump() if distributed.mesh else None
        always_so = {"backward_prefetch", "limit_all_gathers"}
        return FSDPStrategy(**common, mesh=mesh, **distributed.fsdp.model_dump(exclude=always_so))
    return DDPStrategy(**common, **distributed.ddp.model_dump())
