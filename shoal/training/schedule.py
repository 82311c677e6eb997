"""Learning-rate schedules: pure functions of the step, so there is nothing to save or to step twice."""

from __future__ import annotations

from collections.abc import Callable
from math import cos, pi

from shoal.config.schema import Decay, TrainingConfig, WarmupStableDecay

Schedule = Callable[[int], float]
"""Step (from 0) → the factor on the learning rate."""


def build_schedule(training: TrainingConfig, total_steps: int) -> Schedule:
    """Rises over the warmup to 1, then follows the named curve to its end at the last step."""
    warmup = training.warmup_steps
    if warmup is None:
        warmup = round((training.warmup_ratio or 0.0) * total_steps)
    curve = _curve(training, warmup, total_steps)
    return lambda step: (step + 1) / (warmup + 1) if step < warmup else curve(step)


def _curve(training: TrainingConfig, warmup: int, total_steps: int) -> Schedule:
    chosen = training.lr_scheduler
    if isinstance(chosen, Decay):
        fall = _cosine if chosen.name == "cosine" else _linear
        start = warmup
    elif isinstance(chosen, WarmupStableDecay):
        fall = _linear
        start = max(warmup, total_steps - round(chosen.decay_ratio * total_steps))
    else:
        return lambda step: 1.0
    floor, last = chosen.min_ratio, total_steps - 1

    def factor(step: int) -> float:
        progress = min(1.0, max(0, step - start) / max(1, last - start))
        return floor + (1 - floor) * fall(progress)

    return factor


def _linear(progress: float) -> float:
    return 1 - progress


def _cosine(progress: float) -> float:
    return (1 + cos(pi * progress)) / 2
