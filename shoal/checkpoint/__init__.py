"""The neutral store and its manager: alone in writing and reading checkpoints."""

from shoal.checkpoint.manager import CheckpointManager, find_latest_checkpoint
from shoal.checkpoint.store import Checkpoint, DamagedCheckpoint, open_checkpoint, write_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "DamagedCheckpoint",
    "find_latest_checkpoint",
    "open_checkpoint",
    "write_checkpoint",
]
