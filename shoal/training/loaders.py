"""The data of a run: its samples, the loaders that deal them out, and how many steps they make."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

from shoal.config.schema import Config, TrainingConfig
from shoal.data import BatchSchedule, Loader
from shoal.errors import UserError
from shoal.seeding import mix, seed_generators
from shoal.training.resume import Progress
from shoal.training.session import Session

EVAL_LOSS = "eval/loss"
"""The metric that an evaluation gives, by which a checkpoint may be the best."""


@dataclass(frozen=True)
class Data:
    """What the recipe gives to train and to evaluate on."""

    train: Any
    evaluation: Any

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
    data = Data(train, recipe.eval_data())
    if training.num_epochs and data.epoch_size is None:
        raise UserError("training.num_epochs needs data with a length, but the recipe gives a stream; use max_steps")
    if training.eval_steps and data.evaluation is None:
        raise UserError(f"training.eval_steps = {training.eval_steps}, but the recipe has no evaluation data")
    if saving.keep_best and data.evaluation is None:
        raise UserError(
            f"checkpoint.keep_best = {saving.keep_best}, but the recipe has no evaluation data to tell the best by; "
            "set it to 0 or give the recipe eval_data"
        )
    if saving.keep_best and saving.metric != EVAL_LOSS:
        raise UserError(f"checkpoint.metric = {saving.metric!r}, but an evaluation gives {EVAL_LOSS}; use that")
    return data


@dataclass(frozen=True)
class Loaders:
    """The loaders of a run, at the position where it goes on."""

    train: Loader
    evaluation: Loader | None
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
    evaluation = None
    if data.evaluation is not None:
        batch_size = progress.batches.phases[0].batch_size
        whole = batch_size * session.strategy.data_size
        limit = len(data.evaluation) if hasattr(data.evaluation, "__len__") else None
        if training.eval_batches:
            limit = min(limit or training.eval_batches * whole, training.eval_batches * whole)
        evaluation = session.loader(
            data.evaluation, BatchSchedule.constant(whole, batch_size), end=limit, shuffle=False, **options
        )
        resources.enter_context(closing(evaluation))
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
