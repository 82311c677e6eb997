"""The data of a run: its samples, the loaders that deal them out, and how many steps they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from shoal.config.schema import Config, TrainingConfig
from shoal.data import BatchSchedule, Loader
from shoal.errors import UserError
from shoal.seeding import mix, seed_generators
from shoal.strategies.measures import NAME
from shoal.training.resume import Progress
from shoal.training.session import Session

EVAL_PREFIX = "eval/"
"""What the names of an evaluation's metrics begin with."""


@dataclass(frozen=True)
class Data:
    """What the recipe gives to train and to evaluate on."""

    train: Any
    evaluation: Mapping[str, Any]
    """The sets to evaluate by what the names of their metrics begin with: `eval/` for a single one, `eval/<set>/` for
    several, and nothing if there are none."""

    @property
    def epoch_size(self) -> int | None:
        """The number of samples in an epoch; None for a stream."""
        return len(self.train) if hasattr(self.train, "__len__") else None


def open_data(recipe: Any, config: Config) -> Data:
    """Opens the recipe's data, and refuses settings that it cannot serve.

    Generators are seeded before, so that a dataset that shuffles or splits itself does so alike on all ranks and again
    when the run is resumed.
    """
    training, saving = config.training, config.checkpoint
    seed_generators(mix(config.experiment.seed, "train_data"))
    train = recipe.train_data()
    seed_generators(mix(config.experiment.seed, "eval_data"))
    data = Data(train, _evaluation_sets(recipe))
    for method, dataset in (("train_data", train), *(("eval_data", one) for one in data.evaluation.values())):
        if hasattr(dataset, "__len__") and len(dataset) == 0:
            raise UserError(f"recipe {type(recipe).__name__}: {method} has no samples; it must have at least one")
    if training.num_epochs and data.epoch_size is None:
        raise UserError("training.num_epochs needs data with a length, but the recipe gives a stream; use max_steps")
    by_epoch = {"training.eval_epochs": training.eval_epochs, "checkpoint.every_epochs": saving.every_epochs}
    for key, interval in by_epoch.items():
        if interval and data.epoch_size is None:
            raise UserError(f"{key} = {interval} needs data with a length, but the recipe gives a stream; count steps")
    for key in ("eval_steps", "eval_epochs"):
        if (interval := getattr(training, key)) and not data.evaluation:
            raise UserError(
                f"training.{key} = {interval}, but the recipe has no evaluation data; set it to null, or give some"
            )
    if saving.keep_best and not data.evaluation:
        raise UserError(
            f"checkpoint.keep_best = {saving.keep_best}, but the recipe has no evaluation data to tell the best by; "
            "set it to 0 or give the recipe eval_data"
        )
    if saving.keep_best and not any(saving.metric.startswith(prefix) for prefix in data.evaluation):
        raise unknown_metric("checkpoint.metric", saving.metric, [f"{prefix}loss" for prefix in data.evaluation])
    return data


def _evaluation_sets(recipe: Any) -> dict[str, Any]:
    data = recipe.eval_data()
    if data is None:
        return {}
    if not isinstance(data, Mapping) or not all(isinstance(name, str) for name in data):
        return {EVAL_PREFIX: data}
    who = f"recipe {type(recipe).__name__}: eval_data"
    if not data:
        raise UserError(f"{who} returned an empty dict; return datasets by name, or None")
    for name in data:
        if not NAME.fullmatch(name):
            raise UserError(f"{who} has a set with the name {name!r}; use letters, digits and _ . - /")
    return {f"{EVAL_PREFIX}{name}/": dataset for name, dataset in data.items()}


def unknown_metric(key: str, metric: str, names: Sequence[str]) -> UserError:
    """Returns the error for a metric in the config that an evaluation does not give; it gives `names`."""
    near = get_close_matches(metric, names, n=3, cutoff=0.4) or names[:3]
    more = f" and {len(names) - len(near)} more" if len(names) > len(near) else ""
    return UserError(f"{key} = {metric!r}: an evaluation does not give it; it gives {', '.join(near)}{more}")


@dataclass(frozen=True)
class Loaders:
    """The loaders of a run, at the position where it goes on."""

    train: Loader
    evaluation: Mapping[str, Loader]
    """By what the names of their metrics begin with, such as `eval/`."""
    total_steps: int
    """The steps of the whole run, from its beginning to its end."""
    epoch_size: int | None


def open_loaders(session: Session, config: Config, data: Data, progress: Progress, resources: ExitStack) -> Loaders:
    training, device = config.training, session.strategy.device
    options, drop_last = config.dataset.model_dump(exclude={"drop_last"}), config.dataset.drop_last
    if options["pin_memory"] is None:
        options["pin_memory"] = device.type == "cuda"
    elif options["pin_memory"] and device.type == "cpu":
        raise UserError("dataset.pin_memory = true needs a GPU to copy to, but the run is on the CPU; leave it out")
    end = training.num_epochs * data.epoch_size if training.num_epochs and data.epoch_size else None
    train = session.loader(
        data.train, progress.batches, position=progress.samples, end=end, drop_last=drop_last, **options
    )
    resources.enter_context(closing(train))
    evaluation: dict[str, Loader] = {}
    batch_size = training.eval_batch_size or progress.batches.phases[0].batch_size
    whole = batch_size * session.strategy.data_size
    for prefix, dataset in data.evaluation.items():
        limit = len(dataset) if hasattr(dataset, "__len__") else None
        if training.eval_batches:
            limit = min(limit or training.eval_batches * whole, training.eval_batches * whole)
        loader = session.loader(dataset, BatchSchedule.constant(whole, batch_size), end=limit, shuffle=False, **options)
        evaluation[prefix] = resources.enter_context(closing(loader))
    total_steps = count_steps(training, data.epoch_size, progress, drop_last)
    if not total_steps:
        raise UserError(
            f"dataset.drop_last = true: the {end} samples of the run do not fill a global batch of "
            f"{progress.batches.phases[0].global_batch_size}, so that none is left; leave it out"
        )
    return Loaders(train, evaluation, total_steps, data.epoch_size)


def count_steps(training: TrainingConfig, epoch_size: int | None, progress: Progress, drop_last: bool) -> int:
    """Returns the steps of the whole run, given how far it has come."""
    if training.num_epochs and epoch_size:
        end = training.num_epochs * epoch_size
        if drop_last:
            end = progress.batches.end_of_full_steps(progress.samples, end, epoch_size)
        return progress.step + progress.batches.steps_between(progress.samples, end, epoch_size)
    assert training.max_steps
    return training.max_steps
