"""Learning-rate schedules: pure functions of the step, so there is nothing to save or to step twice."""

from __future__ import annotations

from collections.abc import Callable
from math import cos, isclose, pi

from shoal.config.schema import Decay, TrainingConfig, WarmupStableDecay
from shoal.config.yaml import format_value

Schedule = Callable[[int], float]
"""Returns the factor on the learning rate at a step, counted from 0."""

SCHEDULING = ("max_steps", "num_epochs", "learning_rate", "lr_scheduler", "warmup_steps", "warmup_ratio")
"""The keys of `training` that decide the learning rate at a step."""


def warmup_steps(training: TrainingConfig, total_steps: int) -> int:
    """Returns the number of steps in which the learning rate rises to its peak."""
    if training.warmup_steps is not None:
        return training.warmup_steps
    return round((training.warmup_ratio or 0.0) * total_steps)


def build_schedule(training: TrainingConfig, total_steps: int) -> Schedule:
    """Returns a schedule that rises to 1 over the warmup, then follows the named curve until the last step."""
    warmup = warmup_steps(training, total_steps)
    chosen, last = training.lr_scheduler, total_steps - 1
    start = warmup
    if isinstance(chosen, WarmupStableDecay):
        start = max(warmup, total_steps - round(chosen.decay_ratio * total_steps))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if not isinstance(chosen, Decay | WarmupStableDecay):
            return 1.0
        progress = min(1.0, max(0, step - start) / max(1, last - start))
        fall = (1 + cos(pi * progress)) / 2 if chosen.name == "cosine" else 1 - progress
        return chosen.min_ratio + (1 - chosen.min_ratio) * fall

    return factor


def say_jump(then: TrainingConfig, now: TrainingConfig, totals: tuple[int, int], step: int) -> str | None:
    """Returns which keys changed, if a run that resumes at `step` gets another learning rate than was planned.

    `totals` are the steps of the whole run, then and now.
    """
    planned, follows = (build_schedule(*each) for each in zip((then, now), totals, strict=True))
    before, meant = (then.learning_rate * planned(at) for at in (step - 1, step))
    after = now.learning_rate * follows(step)
    if isclose(after, meant, rel_tol=1e-6):
        return None
    old, new = (training.model_dump(include={*SCHEDULING}) for training in (then, now))
    changes = ", ".join(
        f"training.{key} is {format_value(new[key])} and was {format_value(old[key])}"
        for key in SCHEDULING
        if old[key] != new[key]
    )
    return (
        f"{changes}: the learning rate was {before:.3g} at step {step} and is {after:.3g} at step {step + 1}, where it "
        f"would have been {meant:.3g}"
    )
