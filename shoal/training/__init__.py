"""The loop: step, optimizers, schedules, evaluation."""

from shoal.training.loop import Outcome
from shoal.training.trainer import train

__all__ = ["Outcome", "train"]
