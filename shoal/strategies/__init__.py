"""Where a run is computed."""

from shoal.strategies.contract import DistributedStrategy
from shoal.strategies.hand_loop import Loop
from shoal.strategies.presets import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    MeshStrategy,
    SingleGPUStrategy,
    SingleStrategy,
    from_config,
)

__all__ = [
    "DDPStrategy",
    "DeepSpeedStrategy",
    "DistributedStrategy",
    "FSDPStrategy",
    "Loop",
    "MeshStrategy",
    "SingleGPUStrategy",
    "SingleStrategy",
    "from_config",
]
