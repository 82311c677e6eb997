"""Checkpoints: the only code that writes and reads them. They are neutral: every layout opens what any other wrote."""

from shoal.checkpoint.folders import step_folder, step_folders
from shoal.checkpoint.frozen_base import BaseTensor, FrozenBaseError
from shoal.checkpoint.latest import find_latest_checkpoint
from shoal.checkpoint.pieces import DamagedCheckpoint, StoredTensor
from shoal.checkpoint.regions import WrongLayout
from shoal.checkpoint.rotation import CheckpointManager, find_best_checkpoint
from shoal.checkpoint.store import Checkpoint, open_checkpoint, write_checkpoint

__all__ = [
    "BaseTensor",
    "Checkpoint",
    "CheckpointManager",
    "DamagedCheckpoint",
    "FrozenBaseError",
    "StoredTensor",
    "WrongLayout",
    "find_best_checkpoint",
    "find_latest_checkpoint",
    "open_checkpoint",
    "step_folder",
    "step_folders",
    "write_checkpoint",
]
