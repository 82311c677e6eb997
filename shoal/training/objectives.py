"""Several objectives of one model, taken in turn within a step: each with its parameters, its loss and its optimizer.

A recipe without objectives is one turn, with its own loss and all parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from shoal.config.schema import TrainingConfig
from shoal.errors import UserError
from shoal.forward import add_layer
from shoal.seeding import SampleRng
from shoal.strategies import DistributedStrategy
from shoal.strategies.recipe_results import place_of
from shoal.torch_private import call_without_hooks
from shoal.types import MicroBatch, Objective, StepInfo, StepOutput

_CALL = "shoal_objective"
"""The keyword by which a model is called for the loss of an objective: (name, batch)."""


@dataclass(frozen=True)
class Turn:
    """A part of every step: one loss, and the optimizer that steps with its gradient."""

    name: str
    """The name of the objective, or an empty string for a recipe without objectives."""
    objective: Objective
    optimizer: Optimizer
    parameters: frozenset[str] | None
    """The names of the parameters that are trained in this turn; None for all."""
    max_norm: float | None
    """What the gradient is clipped to."""


class NamedObjective:
    """One objective of a recipe, in the form in which a strategy computes a recipe.

    Its loss is also a metric, which is added up over micro-batches, ranks and steps as all metrics are.
    """

    has_metrics = False

    def __init__(self, recipe: Any, name: str):
        self._recipe, self._name = recipe, name
        self.metrics, self.prepares_batches = recipe.metrics, recipe.prepares_batches
        self.sizes_vary = recipe.sizes_vary

    def inputs(self, batch: Any) -> dict[str, Any]:
        return {_CALL: (self._name, batch)}

    def loss(self, output: Any, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        """Returns the output, for which the model was called, and the metric."""
        if not isinstance(output, Tensor) or output.ndim:
            shape = f"tensor of shape {[*output.shape]}" if isinstance(output, Tensor) else type(output).__name__
            raise UserError(
                f"{place_of(self._recipe.objective_loss)}: objective_loss returned a {shape} for {self._name}; return "
                "a tensor with one number, the sum of the losses"
            )
        return output, {f"{self._name}_loss": (output.detach(), self._recipe.count(batch))}

    def prepare_batch(self, batch: Any, rng: SampleRng) -> Any:
        return self._recipe.prepare_batch(batch, rng)

    def count(self, batch: Any) -> Tensor | int:
        return self._recipe.count(batch)

    def labels(self, batch: Any) -> Tensor:
        return self._recipe.labels(batch)

    def sequence_length(self, batch: Any) -> int:
        return self._recipe.sequence_length(batch)

    def split_sequence(self, batch: Any, index: int, parts: int) -> Any:
        return self._recipe.split_sequence(batch, index, parts)


def find_parameters(recipe: Any, model: nn.Module, training: TrainingConfig) -> dict[str, frozenset[str]]:
    """Returns the names of the trained parameters of each objective; refuses objectives that do not fit the model."""
    objectives: Mapping[str, Sequence[str]] = recipe.objectives()
    if unknown := training.objectives.keys() - objectives.keys():
        known = ", ".join(objectives) or "no objectives"
        raise UserError(f"training.objectives.{min(unknown)}: the recipe has {known}; correct the name or leave it out")
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    found = {name: _within(trained, prefixes, name) for name, prefixes in objectives.items()}
    owners: dict[str, str] = {}
    for name, parameters in found.items():
        for parameter in sorted(parameters):
            if (other := owners.setdefault(parameter, name)) != name:
                raise UserError(
                    f"the recipe's objectives {other} and {name} both train {parameter}; give each parameter to one"
                )
    return found


def _within(trained: Sequence[str], prefixes: Sequence[str], objective: str) -> frozenset[str]:
    """Returns the parameters that are named or that are inside of a module that is named."""
    if isinstance(prefixes, str):
        raise UserError(f"the recipe's objective {objective} is the text {prefixes!r}; give a list, [{prefixes!r}]")
    found: set[str] = set()
    for prefix in prefixes:
        inside = [name for name in trained if name == prefix or name.startswith(f"{prefix}.")]
        if not inside:
            raise UserError(
                f"the recipe's objective {objective} names {prefix!r}, but the model has no trained parameter of that "
                f"name or below it; it has {', '.join(trained[:3])} …"
            )
        found.update(inside)
    if not found:
        raise UserError(f"the recipe's objective {objective} has no parameters; name some, or leave it out")
    return frozenset(found)


def select_groups(groups: Iterable[Any], model: nn.Module, parameters: Iterable[str]) -> list[Any]:
    """Returns the parameter groups with these parameters alone; a group may become empty."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    wanted = {*parameters}

    def is_wanted(member: Any) -> bool:
        return names.get(id(member[1] if isinstance(member, tuple) else member)) in wanted

    selected: list[Any] = []
    for group in groups:
        if isinstance(group, dict):
            members = group["params"]
            members = [members] if isinstance(members, Tensor) else members
            selected.append({**group, "params": [member for member in members if is_wanted(member)]})
        elif is_wanted(group):
            selected.append(group)
    return selected


def training_of(training: TrainingConfig, name: str) -> TrainingConfig:
    """Returns the section `training` as it is for an objective, with the keys that the config sets for it."""
    changes = training.objectives[name].model_dump(exclude_none=True) if name in training.objectives else {}
    return training.model_copy(update=changes)


def let_model_compute(recipe: Any, model: nn.Module) -> None:
    """Lets a call of the model compute the loss of an objective, so that it goes through the engine as a forward does.

    Inside of it the recipe may call the model and its modules as it likes. Calls of the model itself skip the hooks of
    fully_shard, which would free parameters that the loss still uses.
    """

    def compute(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if _CALL not in kwargs:
            return forward(*args, **kwargs)
        name, batch = kwargs[_CALL]
        with call_without_hooks(model) if isinstance(model, FSDPModule) else nullcontext():
            return recipe.objective_loss(name, model, batch)

    add_layer(model, compute)


def evaluate_turns(
    strategy: DistributedStrategy, model: nn.Module, micro_batches: Sequence[MicroBatch], turns: Sequence[Turn]
) -> StepOutput:
    """Returns the sum of the losses of all turns without gradients, and the metrics of all."""
    return _sum_outputs([strategy.evaluate(model, micro_batches, turn.objective) for turn in turns])


def combine(outputs: Sequence[StepOutput], infos: Sequence[StepInfo]) -> tuple[StepOutput, StepInfo]:
    """Returns the sum of the losses of all turns, the norm of all their gradients, and whether any was skipped."""
    if len(outputs) == 1:
        return outputs[0], infos[0]
    norm = torch.stack([info.grad_norm for info in infos]).norm()
    skipped = torch.stack([info.skipped for info in infos]).amax(0)
    return _sum_outputs(outputs), StepInfo(norm, skipped)


def _sum_outputs(outputs: Sequence[StepOutput]) -> StepOutput:
    total = torch.stack([output.total for output in outputs]).sum(0)
    metrics = {name: value for output in outputs for name, value in output.metrics.items()}
    return StepOutput(total, outputs[0].count, metrics)
