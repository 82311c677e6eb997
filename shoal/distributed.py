"""Everything that scripts on plain PyTorch import: functions, trainers and layers by the names that people know.

docs/plain_pytorch.md says which call each function replaces, and docs/familiar.md lists the calls as they are written.
"""

from shoal.checkpoint import CheckpointManager, find_latest_checkpoint
from shoal.checkpoint import step_folder as checkpoint_path
from shoal.familiar.functions import (
    Ranks,
    auto_resume,
    cleanup_distributed,
    get_loop,
    get_rank,
    get_world_size,
    is_main_process,
    load_checkpoint_distributed,
    resume,
    save_checkpoint_distributed,
    seed_everything,
    setup_distributed,
    wrap_model_ddp,
    wrap_model_fsdp,
)
from shoal.familiar.launching import launch_distributed
from shoal.familiar.pipeline import PipelineParallelModel, apply_pipeline_parallelism
from shoal.familiar.sampler import DistributedSampler
from shoal.familiar.three_d import ThreeDParallelism, apply_tensor_parallelism
from shoal.familiar.trainers import DistributedTrainer, FSDPTrainer, train_ddp
from shoal.parallel.compression.gradient_compressor import GradientCompressor
from shoal.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear, TensorParallelAttention

__all__ = [
    "CheckpointManager",
    "ColumnParallelLinear",
    "DistributedSampler",
    "DistributedTrainer",
    "FSDPTrainer",
    "GradientCompressor",
    "PipelineParallelModel",
    "Ranks",
    "RowParallelLinear",
    "TensorParallelAttention",
    "ThreeDParallelism",
    "apply_pipeline_parallelism",
    "apply_tensor_parallelism",
    "auto_resume",
    "checkpoint_path",
    "cleanup_distributed",
    "find_latest_checkpoint",
    "get_loop",
    "get_rank",
    "get_world_size",
    "is_main_process",
    "launch_distributed",
    "load_checkpoint_distributed",
    "resume",
    "save_checkpoint_distributed",
    "seed_everything",
    "setup_distributed",
    "train_ddp",
    "wrap_model_ddp",
    "wrap_model_fsdp",
]
