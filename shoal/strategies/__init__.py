"""Where a run is computed."""

from typing import Any

from shoal.config.schema import Config
from shoal.errors import UserError
from shoal.processes.world import World
from shoal.strategies.base import DistributedStrategy, Objective
from shoal.strategies.ddp import DDPStrategy
from shoal.strategies.deepspeed import DeepSpeedStrategy
from shoal.strategies.fsdp import FSDPStrategy
from shoal.strategies.mesh import MeshStrategy, ThreeDParallelism
from shoal.strategies.single import SingleStrategy

__all__ = [
    "DDPStrategy",
    "DeepSpeedStrategy",
    "DistributedStrategy",
    "FSDPStrategy",
    "MeshStrategy",
    "Objective",
    "SingleStrategy",
    "ThreeDParallelism",
    "from_config",
]


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
    if name in ("fsdp", "mesh"):
        mesh = distributed.mesh.model_dump() if distributed.mesh else None
        always_so = {"backward_prefetch", "limit_all_gathers"}
        options = distributed.fsdp.model_dump(exclude=always_so)
        if name == "fsdp":
            return FSDPStrategy(**common, mesh=mesh, **options)
        if mesh is None:
            raise UserError("distributed.strategy = mesh needs distributed.mesh, such as {pp: 2, dp_shard: -1, tp: 2}")
        tensor, schedule = distributed.tensor.model_dump(), distributed.pipeline.schedule
        return MeshStrategy(**common, mesh=mesh, schedule=schedule, **tensor, **options)
    if name == "deepspeed":
        options = distributed.zero.model_dump()
        stage, file = options.pop("zero_stage"), options.pop("config_file")
        return DeepSpeedStrategy(**common, stage=stage, config=file, training=training, **options)
    return DDPStrategy(**common, **distributed.ddp.model_dump())
