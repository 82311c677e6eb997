"""shoal: distributed training on PyTorch. One setting says how a run is spread; the result stays the same.

The names below are imported when they are first used, so that `import shoal` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_MODULES = {
    "DDPStrategy": "shoal.strategies",
    "DamagedCheckpoint": "shoal.checkpoint",
    "DeepSpeedStrategy": "shoal.strategies",
    "DistributedStrategy": "shoal.strategies",
    "FSDPStrategy": "shoal.strategies",
    "GradientCompressor": "shoal.parallel.compression.gradient_compressor",
    "IGNORED_LABEL": "shoal.types",
    "Loop": "shoal.strategies",
    "MeshStrategy": "shoal.strategies",
    "Outcome": "shoal.training",
    "ParallelPlan": "shoal.types",
    "Recipe": "shoal.recipes",
    "Run": "shoal.api",
    "SingleStrategy": "shoal.strategies",
    "ThreeDParallelism": "shoal.strategies",
    "UserError": "shoal.errors",
    "Weights": "shoal.types",
    "launch_distributed": "shoal.distributed",
    "load": "shoal.training.load",
    "token_loss": "shoal.recipes",
    "train": "shoal.api",
}
"""Where each public name is defined."""

__all__ = ["__version__", *_MODULES]

if TYPE_CHECKING:
    from shoal.api import Run as Run
    from shoal.api import train as train
    from shoal.checkpoint import DamagedCheckpoint as DamagedCheckpoint
    from shoal.distributed import launch_distributed as launch_distributed
    from shoal.errors import UserError as UserError
    from shoal.parallel.compression.gradient_compressor import GradientCompressor as GradientCompressor
    from shoal.recipes import Recipe as Recipe
    from shoal.recipes import token_loss as token_loss
    from shoal.strategies import DDPStrategy as DDPStrategy
    from shoal.strategies import DeepSpeedStrategy as DeepSpeedStrategy
    from shoal.strategies import DistributedStrategy as DistributedStrategy
    from shoal.strategies import FSDPStrategy as FSDPStrategy
    from shoal.strategies import Loop as Loop
    from shoal.strategies import MeshStrategy as MeshStrategy
    from shoal.strategies import SingleStrategy as SingleStrategy
    from shoal.strategies import ThreeDParallelism as ThreeDParallelism
    from shoal.training import Outcome as Outcome
    from shoal.training.load import load as load
    from shoal.types import IGNORED_LABEL as IGNORED_LABEL
    from shoal.types import ParallelPlan as ParallelPlan
    from shoal.types import Weights as Weights


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
