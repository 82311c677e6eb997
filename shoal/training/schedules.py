"""Learning-rate schedules: functions of the step, so that there is nothing to save or to step twice.

One of them, `plateau`, follows evaluations. What it has noted is saved with a checkpoint.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from math import cos, inf, isclose, isfinite, pi, sqrt
from typing import Any

from shoal.config.imports import import_object
from shoal.config.schema import TrainingConfig
from shoal.config.schema_optimizers import (
    Decay,
    Exponential,
    Imported,
    InverseSqrt,
    MultiStep,
    OneCycle,
    Plateau,
    Polynomial,
    StepDecay,
    WarmupStableDecay,
)
from shoal.config.yaml import format_value
from shoal.errors import UserError

Schedule = Callable[[int], float]
"""Returns the factor on the learning rate at a step, counted from 0."""

SCHEDULING = ("max_steps", "num_epochs", "learning_rate", "lr_scheduler", "warmup_steps", "warmup_ratio")
"""The keys of `training` that decide the learning rate at a step."""


def build_schedule(training: TrainingConfig, total_steps: int, recipe: Any = None) -> Schedule:
    """Returns the recipe's schedule if it has one, or else the config's.

    The config's rises to 1 over the warmup, then follows the named curve. A curve that falls has reached its end after
    the last step, as in torch and transformers: an update with a learning rate of 0 would do nothing.
    """
    if recipe is not None and schedule_is_by_recipe(recipe, total_steps):
        return _checked(recipe.schedule, total_steps, f"recipe {type(recipe).__name__}: schedule")
    chosen, warmup = training.lr_scheduler, warmup_steps(training, total_steps)
    if isinstance(chosen, Imported):
        where = f"training.lr_scheduler = {chosen.name}"
        return _checked(import_object(chosen.name, where), total_steps, where)
    if isinstance(chosen, Plateau):
        return PlateauSchedule(chosen, warmup)
    curve = _curve(training, total_steps, warmup)
    return lambda step: _rise(step, warmup) if step < warmup else curve(step)


def schedule_is_by_recipe(recipe: Any, total_steps: int) -> bool:
    """Returns whether the recipe has a schedule, so that the config's is not used."""
    return recipe.schedule(0, total_steps) is not None


def warmup_steps(training: TrainingConfig, total_steps: int) -> int:
    """Returns the number of steps in which the learning rate rises."""
    if training.warmup_steps is not None:
        return training.warmup_steps
    return round((training.warmup_ratio or 0.0) * total_steps)


def _rise(step: int, warmup: int) -> float:
    return (step + 1) / (warmup + 1)


def _curve(training: TrainingConfig, total_steps: int, warmup: int) -> Schedule:
    """Returns the factor after the warmup. Milestones count the steps of the run, the other curves begin after it."""
    chosen = training.lr_scheduler

    def progress(step: int, start: int = warmup) -> float:
        return min(1.0, max(0, step - start) / max(1, total_steps - start))

    if isinstance(chosen, Decay | Polynomial | WarmupStableDecay):
        decay = max(warmup, total_steps - round(chosen.decay_ratio * total_steps)) if chosen.name == "wsd" else warmup
        power = chosen.power if isinstance(chosen, Polynomial) else 1.0
        floor = chosen.min_ratio

        def fall(step: int) -> float:
            done = progress(step, decay)
            return (1 + cos(pi * done)) / 2 if chosen.name == "cosine" else (1 - done) ** power

        return lambda step: floor + (1 - floor) * fall(step)
    if isinstance(chosen, StepDecay):
        return lambda step: chosen.gamma ** (step // chosen.step_size)
    if isinstance(chosen, MultiStep):
        return lambda step: chosen.gamma ** bisect_right(chosen.milestones, step)
    if isinstance(chosen, Exponential):
        return lambda step: chosen.gamma ** (step - warmup)
    if isinstance(chosen, InverseSqrt):
        scale = chosen.timescale or max(1, warmup)
        return lambda step: sqrt(scale / (scale + step - warmup))
    if isinstance(chosen, OneCycle):
        return _one_cycle(chosen, total_steps - 1)
    return lambda step: 1.0


def _one_cycle(chosen: OneCycle, last: int) -> Schedule:
    """Returns two half cosines: from the first rate up to the peak, and from there down to the last rate."""
    first, peak = 1 / chosen.div_factor, chosen.pct_start * (last + 1) - 1  # as torch's OneCycleLR counts
    final = first / chosen.final_div_factor

    def between(start: float, end: float, done: float) -> float:
        return end + (start - end) / 2 * (1 + cos(pi * min(1.0, done)))

    def factor(step: int) -> float:
        if step < peak:
            return between(first, 1.0, step / peak)
        return between(1.0, final, (step - peak) / max(1e-9, last - peak))

    return factor


def _checked(function: Callable[[int, int], Any], total_steps: int, where: str) -> Schedule:
    """Returns a schedule of the user's own that refuses what is not a factor."""

    def factor(step: int) -> float:
        value = function(step, total_steps)
        if not isinstance(value, int | float) or not isfinite(value) or value < 0:
            raise UserError(f"{where} returned {value!r:.100} at step {step}; return a finite factor of 0 or more")
        return float(value)

    factor(0)
    return factor


class PlateauSchedule:
    """Lowers the learning rate when a metric of the evaluations has not improved for a while."""

    def __init__(self, config: Plateau, warmup: int):
        self._config, self._warmup = config, warmup
        self._factor, self._waited = 1.0, 0
        self._best: float | None = None

    def __call__(self, step: int) -> float:
        return self._factor * (_rise(step, self._warmup) if step < self._warmup else 1.0)

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Takes note of an evaluation. A metric that is not a number is no improvement."""
        config = self._config
        if config.metric not in metrics:
            raise UserError(
                f"training.lr_scheduler.metric = {config.metric}: the evaluation has {', '.join(metrics)}; use one of "
                "these"
            )
        if self._is_better(metrics[config.metric]):
            self._best, self._waited = metrics[config.metric], 0
            return
        self._waited += 1
        if self._waited > config.patience:
            self._factor, self._waited = max(config.min_ratio, self._factor * config.factor), 0

    def _is_better(self, value: float) -> bool:
        if not isfinite(value):
            return False
        sign = -1 if self._config.mode == "min" else 1
        best = -inf if self._best is None else sign * self._best + self._config.threshold * abs(self._best)
        return sign * value > best

    def state(self) -> dict[str, Any]:
        """Returns what was noted, for a checkpoint."""
        return {"factor": self._factor, "best": self._best, "waited": self._waited}

    def load_state(self, state: Any) -> None:
        """Takes what a checkpoint holds. Digests prove nothing about who wrote it, so it is checked."""
        try:
            factor, best, waited = state["factor"], state["best"], state["waited"]
            right = isfinite(factor) and factor >= 0 and (best is None or isfinite(best)) and type(waited) is int
        except (LookupError, TypeError):
            right = False
        if not right:
            raise UserError(f"the checkpoint's state of lr_scheduler plateau is not valid: {state!r:.100}")
        self._factor, self._best, self._waited = factor, best, waited


def describe_schedule(training: TrainingConfig, total_steps: int, by_recipe: bool) -> str:
    """Returns the schedule with its options, warmup and end, for the report."""
    if by_recipe:
        return f"the recipe's schedule over {total_steps:,} steps"
    chosen, warmup = training.lr_scheduler, warmup_steps(training, total_steps)
    options = ", ".join(f"{key} {format_value(value)}" for key, value in chosen.model_dump(exclude={"name"}).items())
    after = f" after {warmup:,} warmup steps" if warmup else ""
    return f"{chosen.name}{f' ({options})' if options else ''}{after} to step {total_steps:,}"


def say_jump(then: TrainingConfig, now: TrainingConfig, totals: tuple[int, int], step: int) -> str | None:
    """Returns which keys changed, if a run that resumes at `step` gets another learning rate than was planned.

    `totals` are the steps of the whole run, then and now. Nothing that only the checkpoint names is imported.
    """
    old, new = (training.model_dump(include={*SCHEDULING}) for training in (then, now))
    changes = ", ".join(
        f"training.{key} is {format_value(new[key])} and was {format_value(old[key])}"
        for key in SCHEDULING
        if old[key] != new[key]
    )
    is_unknown = isinstance(then.lr_scheduler, Imported) and then.lr_scheduler != now.lr_scheduler
    if is_unknown or Plateau in map(type, (then.lr_scheduler, now.lr_scheduler)):
        ends = ("max_steps", "num_epochs")
        differs = any(old[key] != new[key] for key in SCHEDULING if key not in ends)
        return f"{changes}: the learning rate may jump" if differs else None
    planned, follows = (build_schedule(*each) for each in zip((then, now), totals, strict=True))
    before, meant = (then.learning_rate * planned(at) for at in (step - 1, step))
    after = now.learning_rate * follows(step)
    if isclose(after, meant, rel_tol=1e-6):
        return None
    return (
        f"{changes}: the learning rate was {before:.3g} at step {step} and is {after:.3g} at step {step + 1}, where it "
        f"would have been {meant:.3g}"
    )
