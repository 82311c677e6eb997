"""The neutral store and its manager: alone in writing and reading checkpoints."""

from shoal.checkpoint.boxes import WrongLayout
from shoal.checkpoint.manager import CheckpointManager, find_latest_checkpoint
from shoal.checkpoint.store import Checkpoint, DamagedCheckpoint, open_checkpoint, write_checkpoint
from shoal.checkpoint.stored import Stored

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "DamagedCheckpoint",
    "Stored",
    "WrongLayout",
    "find_latest_checkpoint",
    "open_checkpoint",
    "write_checkpoint",
]
