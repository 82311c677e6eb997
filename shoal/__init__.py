"""shoal: distributed training on PyTorch. One setting says how a run is spread; the result stays the same.

The names below are imported when they are first used, so that `import shoal` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_MODULES = {
    "CheckpointManager": "shoal.distributed",
    "ColumnParallelLinear": "shoal.distributed",
    "DDPStrategy": "shoal.strategies",
    "DamagedCheckpoint": "shoal.checkpoint",
    "DeepSpeedStrategy": "shoal.strategies",
    "DistributedSampler": "shoal.distributed",
    "DistributedStrategy": "shoal.strategies",
    "DistributedTrainer": "shoal.distributed",
    "FSDPStrategy": "shoal.strategies",
    "FSDPTrainer": "shoal.distributed",
    "GradientCompressor": "shoal.parallel.compression.gradient_compressor",
    "IGNORED_LABEL": "shoal.types",
    "Loop": "shoal.strategies",
    "MeshStrategy": "shoal.strategies",
    "Outcome": "shoal.training",
    "ParallelPlan": "shoal.types",
    "PipelineParallelModel": "shoal.distributed",
    "Recipe": "shoal.recipes",
    "RowParallelLinear": "shoal.distributed",
    "Run": "shoal.api",
    "SingleGPUStrategy": "shoal.strategies",
    "SingleStrategy": "shoal.strategies",
    "TensorParallelAttention": "shoal.distributed",
    "ThreeDParallelism": "shoal.distributed",
    "UserError": "shoal.errors",
    "Weights": "shoal.types",
    "auto_resume": "shoal.distributed",
    "cleanup_distributed": "shoal.distributed",
    "find_latest_checkpoint": "shoal.distributed",
    "launch_distributed": "shoal.distributed",
    "load": "shoal.training.load",
    "load_checkpoint_distributed": "shoal.distributed",
    "save_checkpoint_distributed": "shoal.distributed",
    "seed_everything": "shoal.distributed",
    "setup_distributed": "shoal.distributed",
    "token_loss": "shoal.recipes",
    "train": "shoal.api",
    "train_ddp": "shoal.distributed",
    "wrap_model_ddp": "shoal.distributed",
    "wrap_model_fsdp": "shoal.distributed",
}
"""Where each public name is defined."""

__all__ = ["__version__", *_MODULES]

if TYPE_CHECKING:
    from shoal.api import Run as Run
    from shoal.api import train as train
    from shoal.checkpoint import DamagedCheckpoint as DamagedCheckpoint
    from shoal.distributed import CheckpointManager as CheckpointManager
    from shoal.distributed import ColumnParallelLinear as ColumnParallelLinear
    from shoal.distributed import DistributedSampler as DistributedSampler
    from shoal.distributed import DistributedTrainer as DistributedTrainer
    from shoal.distributed import FSDPTrainer as FSDPTrainer
    from shoal.distributed import PipelineParallelModel as PipelineParallelModel
    from shoal.distributed import RowParallelLinear as RowParallelLinear
    from shoal.distributed import TensorParallelAttention as TensorParallelAttention
    from shoal.distributed import ThreeDParallelism as ThreeDParallelism
    from shoal.distributed import auto_resume as auto_resume
    from shoal.distributed import cleanup_distributed as cleanup_distributed
    from shoal.distributed import find_latest_checkpoint as find_latest_checkpoint
    from shoal.distributed import launch_distributed as launch_distributed
    from shoal.distributed import load_checkpoint_distributed as load_checkpoint_distributed
    from shoal.distributed import save_checkpoint_distributed as save_checkpoint_distributed
    from shoal.distributed import seed_everything as seed_everything
    from shoal.distributed import setup_distributed as setup_distributed
    from shoal.distributed import train_ddp as train_ddp
    from shoal.distributed import wrap_model_ddp as wrap_model_ddp
    from shoal.distributed import wrap_model_fsdp as wrap_model_fsdp
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
    from shoal.strategies import SingleGPUStrategy as SingleGPUStrategy
    from shoal.strategies import SingleStrategy as SingleStrategy
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
