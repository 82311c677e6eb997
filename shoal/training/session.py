"""A recipe's model in its place, with its optimizer: what the trainer, the prover, benchmarks and tests start from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.config.layout import check_objectives
from shoal.config.schema import TrainingConfig
from shoal.data import BatchSchedule, Loader
from shoal.errors import UserError
from shoal.observe.flops import copy_on_meta
from shoal.strategies import DistributedStrategy, Loop
from shoal.tensors import logical_numel
from shoal.training.metric_objects import MetricObjects
from shoal.training.modes import start_training_mode
from shoal.training.objectives import (
    NamedObjective,
    Turn,
    find_parameters,
    let_model_compute,
    select_groups,
    training_of,
)
from shoal.training.optimizers import (
    build_by_recipe,
    build_optimizer,
    check_matrices,
    check_usable,
    freeze_ungrouped,
    groups_of,
    name_of,
    small_groups,
)
from shoal.training.rounded_adamw import RoundedAdamW
from shoal.types import ParallelPlan, TrainState, Weights
from shoal.weights.materialise import build
from shoal.weights.parameter_extras import check_trainable


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
    optimizer_name: str
    """The optimizer's name in the config, or the class that the recipe has built, as `module:Class`."""
    optimizer_groups: list[dict[str, Any]]
    """The parameter groups of the whole model, each with a small tensor in place of parameters that are alike."""
    metric_objects: MetricObjects
    """The torchmetrics objects of the recipe."""
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

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, or that of the first objective; those of the others are of the same kind."""
        return self.turns[0].optimizer

    def state(self) -> TrainState:
        first, *others = [self.strategy.state(self.model, turn.optimizer) for turn in self.turns]
        moments = {name: slots for one in (first, *others) for name, slots in one.optimizer.items()}
        return replace(first, optimizer=moments, strategy={**first.strategy, **self.metric_objects.state()})

    def load_state(self, state: TrainState) -> None:
        for turn in self.turns:
            self.strategy.load_state(self.model, turn.optimizer, state)
        self.metric_objects.load(state.strategy)


def assemble(
    recipe: Any,
    strategy: DistributedStrategy,
    training: TrainingConfig,
    seed: int,
    *,
    weights: Weights | None = None,
    edit: Callable[[nn.Module], None] | None = None,
    by_recipe: bool = True,
    loop: Loop | None = None,
) -> Session:
    """Builds the recipe's model, places it as the strategy says, and builds its optimizer.

    `weights` replace the recipe's own; `edit` may change the model before it is split. If `by_recipe` is false, the
    optimizer is always the one that `training` names, also if the recipe has a `build_optimizer`. With `loop`, steps
    are computed by its verbs: gradients are means over ranks.
    """
    model, found = build(recipe.build_model, weights or recipe.weights(), seed)
    check_trainable(model)
    if edit is not None:
        edit(model)
    mode, parts = start_training_mode(model), find_parameters(recipe, model, training)
    grouped = recipe.param_groups(model)
    if parts:
        check_objectives(strategy.layout, recipe)
        grouped = select_groups(grouped, model, {name for names in parts.values() for name in names})
    ungrouped = freeze_ungrouped(model, grouped)
    meta_model, plan = None if parts else copy_on_meta(model), recipe.parallel_plan(model)
    _check_logits(recipe, strategy, plan)
    trained, frozen = (
        sum(logical_numel(p) for p in model.parameters() if p.requires_grad is on) for on in (True, False)
    )
    if not trained and loop is None:
        raise UserError(
            f"recipe {type(recipe).__name__}: all {frozen:,} parameters of the model are frozen, and nothing is "
            "trained; add a section lora: to a quantised model, or train some of them"
        )
    groups = groups_of(recipe, training, plan.blocks, model)
    if training.optimizer.name == "muon":
        check_matrices(groups)
    small = small_groups(groups, strategy.device)

    def build_one(training: TrainingConfig, parameters: frozenset[str] | None, model: nn.Module) -> Optimizer:
        groups = groups_of(recipe, training, plan.blocks, model)
        if parameters is not None:
            groups = select_groups(groups, model, parameters)
        optimizer = build_by_recipe(recipe, training, groups) if by_recipe else None
        optimizer = optimizer or build_optimizer(training, groups)
        if isinstance(optimizer, RoundedAdamW):
            optimizer.name_parameters(model.named_parameters(), seed)
        check_usable(optimizer)
        return optimizer

    if parts:
        turns = _place_objectives(recipe, strategy, training, model, parts, plan, found, build_one)
    else:
        builder = partial(build_one, training, None)
        if loop is None:
            model, optimizer = strategy.prepare(model, builder, plan, found)
        else:
            _, optimizer = loop.wrap(model, builder, plan=plan, weights=found)
        turns = [Turn("", recipe, optimizer, None, training.max_grad_norm)]
    return Session(
        recipe,
        strategy,
        seed,
        model,
        turns,
        found,
        (trained, frozen),
        meta_model,
        mode,
        ungrouped,
        name_of(turns[0].optimizer, training),
        small,
        MetricObjects(recipe, strategy),
        loop,
    )


def _place_objectives(
    recipe: Any,
    strategy: DistributedStrategy,
    training: TrainingConfig,
    model: nn.Module,
    parts: dict[str, frozenset[str]],
    plan: ParallelPlan,
    weights: Weights,
    build_one: Callable[[TrainingConfig, frozenset[str], nn.Module], Optimizer],
) -> list[Turn]:
    """Places the model with an optimizer for each objective; `parts` are the parameters of each."""
    if training.compile and not plan.blocks:
        raise UserError(
            "training.compile = true: with several objectives the plan's blocks are compiled, and it has none; name "
            "them in the recipe's parallel_plan, or leave it out"
        )
    let_model_compute(recipe, model)
    trainings = {name: training_of(training, name) for name in parts}
    builders = [partial(build_one, trainings[name], parameters) for name, parameters in parts.items()]
    optimizers = strategy.prepare_several(model, builders, plan, weights)
    return [
        Turn(name, NamedObjective(recipe, name), optimizer, parameters, trainings[name].max_grad_norm)
        for (name, parameters), optimizer in zip(parts.items(), optimizers, strict=True)
    ]


def _check_logits(recipe: Any, strategy: DistributedStrategy, plan: ParallelPlan) -> None:
    """Refuses metrics of logits that no rank has. `training.loss_chunks` is refused before there are processes."""
    tp = strategy.layout.mesh["tp"]
    if recipe.has_metrics and tp > 1 and plan.head is not None and plan.tensor.get(plan.head) == "vocabulary":
        raise UserError(
            f"distributed.mesh.tp = {tp}: ranks share the vocabulary, so the head {plan.head!r} gives the loss and no "
            f"logits for {type(recipe).__name__}.metrics; use a mesh without tp, or take the style vocabulary of the "
            "head and the embedding out of the recipe's parallel_plan"
        )
