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
from shoal.torch_private import call_without_hooks
from shoal.training.optimizers import build_optimizer
from shoal.types import Objective, StepInfo, StepOutput

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
    """One objective of a recipe, in the form in which a strategy computes a recipe."""

    def __init__(self, recipe: Any, name: str):
        self._recipe, self._name = recipe, name

    def inputs(self, batch: Any) -> dict[str, Any]:
        return {_CALL: (self._name, batch)}

    def loss(self, output: Any, batch: Any) -> Tensor:
        """Returns the output: the model was called for the loss."""
        return output

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


def builder_of(
    recipe: Any, training: TrainingConfig, name: str, parameters: Iterable[str]
) -> Callable[[nn.Module], Optimizer]:
    """Returns a function that builds an objective's optimizer from the model as this rank holds it."""
    changes = {key: value for key, value in _options(training, name).items() if key != "max_grad_norm"}
    its_training = training.model_copy(update=changes)
    return lambda model: build_optimizer(its_training, select_groups(recipe.param_groups(model), model, parameters))


def max_norm_of(training: TrainingConfig, name: str) -> float | None:
    """Returns what the gradient of an objective is clipped to."""
    return _options(training, name).get("max_grad_norm", training.max_grad_norm)


def _options(training: TrainingConfig, name: str) -> dict[str, Any]:
    """Returns the keys that the config sets for an objective."""
    return training.objectives[name].model_dump(exclude_none=True) if name in training.objectives else {}


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


def combine(outputs: Sequence[StepOutput], infos: Sequence[StepInfo]) -> tuple[StepOutput, StepInfo]:
    """Returns the sum of the losses of all turns, the norm of all their gradients, and whether any was skipped."""
    if len(outputs) == 1:
        return outputs[0], infos[0]
    norm = torch.stack([info.grad_norm for info in infos]).norm()
    skipped = torch.stack([info.skipped for info in infos]).amax(0)
    total = torch.stack([output.total for output in outputs]).sum(0)
    return StepOutput(total, outputs[0].count), StepInfo(norm, skipped)
