"""The loop: step, optimizers, schedules, evaluation."""

from shoal.training.trainer import Outcome, train

__all__ = ["Outcome", "train"]
