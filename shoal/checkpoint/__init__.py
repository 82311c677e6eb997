"""The neutral store and its manager: alone in writing and reading checkpoints."""

from shoal.checkpoint.frozen_base import BaseProblem, Referenced
from shoal.checkpoint.regions import WrongLayout
from shoal.checkpoint.rotation import CheckpointManager, find_best_checkpoint, find_latest_checkpoint
from shoal.checkpoint.store import Checkpoint, DamagedCheckpoint, open_checkpoint, write_checkpoint
from shoal.checkpoint.stored_tensor import Stored

__all__ = [
    "BaseProblem",
    "Checkpoint",
    "CheckpointManager",
    "DamagedCheckpoint",
    "Referenced",
    "Stored",
    "WrongLayout",
    "find_best_checkpoint",
    "find_latest_checkpoint",
    "open_checkpoint",
    "write_checkpoint",
]
