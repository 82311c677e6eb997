"""The loop: step, optimizers, schedules, evaluation."""

from shoal.training.shell import Outcome
from shoal.training.trainer import train

__all__ = ["Outcome", "train"]
