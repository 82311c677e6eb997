"""A recipe's model in its place, with its optimizer: what the trainer, the prover, benchmarks and tests start from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.config.layout import check_objectives
from shoal.config.schema import TrainingConfig
from shoal.data import BatchSchedule, Loader
from shoal.errors import UserError
from shoal.observe.flops import copy_on_meta
from shoal.strategies import DistributedStrategy
from shoal.training.modes import start_training_mode
from shoal.training.objectives import (
    NamedObjective,
    Turn,
    builder_of,
    find_parameters,
    let_model_compute,
    max_norm_of,
    select_groups,
)
from shoal.training.optimizers import build_optimizer, freeze_ungrouped
from shoal.types import ParallelPlan, TrainState, Weights
from shoal.weights.materialise import build


@dataclass
class Session:
    """A model that is ready for its first step, or for a checkpoint to be loaded into it."""

    recipe: Any
    strategy: DistributedStrategy
    seed: int
    model: nn.Module
    turns: list[Turn]
    """What each step computes one after another: the recipe's loss, or the losses of its objectives."""
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

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, or that of the first objective; those of the others are of the same kind."""
        return self.turns[0].optimizer

    def state(self) -> TrainState:
        first, *others = [self.strategy.state(self.model, turn.optimizer) for turn in self.turns]
        moments = {name: slots for one in (first, *others) for name, slots in one.optimizer.items()}
        return replace(first, optimizer=moments)

    def load_state(self, state: TrainState) -> None:
        for turn in self.turns:
            self.strategy.load_state(self.model, turn.optimizer, state)


def assemble(
    recipe: Any,
    strategy: DistributedStrategy,
    training: TrainingConfig,
    seed: int,
    *,
    weights: Weights | None = None,
    edit: Callable[[nn.Module], None] | None = None,
) -> Session:
    """Builds the recipe's model, places it as the strategy says, and builds its optimizer.

    `weights` replace the recipe's own; `edit` may change the model before it is split.
    """
    model, found = build(recipe.build_model, weights or recipe.weights(), seed)
    if edit is not None:
        edit(model)
    mode, parts = start_training_mode(model), find_parameters(recipe, model, training)
    groups = recipe.param_groups(model)
    in_parts = [name for parameters in parts.values() for name in parameters]
    ungrouped = freeze_ungrouped(model, select_groups(groups, model, in_parts) if parts else groups)
    meta_model, plan = None if parts else copy_on_meta(model), recipe.parallel_plan(model)
    trained, frozen = (sum(p.numel() for p in model.parameters() if p.requires_grad is on) for on in (True, False))
    if parts:
        turns = _place_objectives(recipe, strategy, training, model, parts, plan, found)
    else:
        model, optimizer = strategy.prepare(
            model, lambda model: build_optimizer(training, recipe.param_groups(model)), plan, found
        )
        turns = [Turn("", recipe, optimizer, None, training.max_grad_norm)]
    return Session(recipe, strategy, seed, model, turns, found, (trained, frozen), meta_model, mode, ungrouped)


def _place_objectives(
    recipe: Any,
    strategy: DistributedStrategy,
    training: TrainingConfig,
    model: nn.Module,
    parts: dict[str, frozenset[str]],
    plan: ParallelPlan,
    weights: Weights,
) -> list[Turn]:
    """Places the model with an optimizer for each objective; `parts` are the parameters of each."""
    check_objectives(strategy.layout, recipe)
    if training.compile and not plan.blocks:
        raise UserError(
            "training.compile = true: with several objectives the plan's blocks are compiled, and it has none; name "
            "them in the recipe's parallel_plan, or leave it out"
        )
    let_model_compute(recipe, model)
    builders = [builder_of(recipe, training, name, parameters) for name, parameters in parts.items()]
    optimizers = strategy.prepare_several(model, builders, plan, weights)
    return [
        Turn(name, NamedObjective(recipe, name), optimizer, parameters, max_norm_of(training, name))
        for (name, parameters), optimizer in zip(parts.items(), optimizers, strict=True)
    ]
