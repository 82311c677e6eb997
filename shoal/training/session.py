"""A recipe's model in its place, with its optimizer: what the trainer, the prover, benchmarks and tests start from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.config.schema import TrainingConfig
from shoal.data import BatchSchedule, Loader
from shoal.observe.flops import copy_on_meta
from shoal.strategies import DistributedStrategy, Loop
from shoal.training.modes import start_training_mode
from shoal.training.optimizers import build_optimizer, freeze_ungrouped
from shoal.types import TrainState, Weights
from shoal.weights.materialise import build


@dataclass
class Session:
    """A model that is ready for its first step, or for a checkpoint to be loaded into it."""

    recipe: Any
    strategy: DistributedStrategy
    seed: int
    model: nn.Module
    optimizer: Optimizer
    weights: Weights
    """Where the first weights came from."""
    parameter_counts: tuple[int, int]
    """The number of trained and of frozen parameters in the whole model."""
    meta_model: nn.Module | None
    """The model as it was before any layout changed it, without memory, to count FLOPs on."""
    mode: str
    """What is unusual about the training or evaluation mode of its modules, for the report; empty if nothing is."""
    ungrouped: list[str]
    """The parameters that were frozen because they are in no parameter group."""
    loop: Loop | None = None
    """The verbs of a step that is not the recipe's."""

    def loader(self, data: Any, batches: BatchSchedule, **options: Any) -> Loader:
        """Returns a loader that gives this rank its part of every batch; `options` are the loader's own."""
        strategy = self.strategy
        options |= {
            "seed": self.seed,
            "data_rank": strategy.data_rank,
            "data_size": strategy.data_size,
            "keep_generators": False,
        }
        return Loader(data, self.recipe.collate, batches, **options)

    def state(self) -> TrainState:
        return self.strategy.state(self.model, self.optimizer)

    def load_state(self, state: TrainState) -> None:
        self.strategy.load_state(self.model, self.optimizer, state)


def assemble(
    recipe: Any,
    strategy: DistributedStrategy,
    training: TrainingConfig,
    seed: int,
    *,
    weights: Weights | None = None,
    edit: Callable[[nn.Module], None] | None = None,
    loop: Loop | None = None,
) -> Session:
    """Builds the recipe's model, places it as the strategy says, and builds its optimizer.

    `weights` replace the recipe's own; `edit` may change the model before it is split. With `loop`, steps are computed
    by its verbs: gradients are means over ranks.
    """
    model, found = build(recipe.build_model, weights or recipe.weights(), seed)
    if edit is not None:
        edit(model)
    mode, ungrouped = start_training_mode(model), freeze_ungrouped(model, recipe.param_groups(model))
    meta_model, plan = copy_on_meta(model), recipe.parallel_plan(model)
    trained, frozen = (sum(p.numel() for p in model.parameters() if p.requires_grad is on) for on in (True, False))

    def builder(model: nn.Module) -> Optimizer:
        return build_optimizer(training, recipe.param_groups(model))

    if loop is None:
        model, optimizer = strategy.prepare(model, builder, plan, found)
    else:
        _, optimizer = loop.wrap(model, builder, plan=plan, weights=found)
    counts = trained, frozen
    return Session(recipe, strategy, seed, model, optimizer, found, counts, meta_model, mode, ungrouped, loop)
