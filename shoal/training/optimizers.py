"""The optimizer of a run: one by name, a class of the user's own, or what the recipe builds.

Adam, AdamW and SGD are fused: one kernel updates all parameters, and can skip the update on the device. Lion, Muon and
the AdamW of weights in bf16 skip on the device, too. torch has no fused kernels for complex parameters; a model that
has some gets an optimizer that is not fused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from difflib import get_close_matches
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.config.imports import import_object, optimizer_arguments
from shoal.config.schema import TrainingConfig
from shoal.config.schema_optimizers import ImportedOptimizer
from shoal.errors import UserError, one_line
from shoal.parallel.sharding.slots import slots_as_tensors
from shoal.parallel.sharding.trial import Build, Groups, try_out
from shoal.tensors import local_part
from shoal.torch_private import is_fake
from shoal.training import bitsandbytes_optimizers
from shoal.training.lion import Lion
from shoal.training.muon import Muon, mark_matrices, matrices_in_blocks
from shoal.training.rounded_adamw import RoundedAdamW

CLASSES: dict[str, type[Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "lion": Lion,
    "muon": Muon,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor,
}
FUSED = ("adamw", "adam", "sgd")
_GROUPS = "the recipe's param_groups"
_OPTIONS = ("params", "lr", "weight_decay", "use_muon", "initial_lr", "param_names", "name")
"""What a parameter group may have with every optimizer of shoal and torch."""


def build_optimizer(training: TrainingConfig, groups: Groups) -> Optimizer:
    """Returns the optimizer of a config. Muon's groups say `use_muon`."""
    chosen = training.optimizer
    where = f"training.optimizer = {chosen.name}"
    has_complex = any(parameter.is_complex() for group in groups for parameter in group["params"])
    if isinstance(chosen, ImportedOptimizer):
        kind, options = import_object(chosen.name, where), chosen.options
    else:
        kind = CLASSES.get(chosen.name) or bitsandbytes_optimizers.optimizer_class(chosen.name)
        options = {
            key: tuple(v) if isinstance(v, list) else v for key, v in chosen.model_dump(exclude={"name"}).items()
        }
        if training.weights_dtype == "bf16":
            kind = RoundedAdamW  # the config refuses other names than adamw
        elif chosen.name in FUSED:
            # Fused SGD with dampening would start from memory that nobody fills if its first update is skipped.
            options["fused"] = not has_complex and not options.get("dampening")
        elif has_complex and (chosen.name in ("lion", "muon") or chosen.name not in CLASSES):
            raise UserError(f"{where}: the model has complex parameters, which it does not take; use adamw or sgd")
    keys = dict.fromkeys(key for group in groups for key in group)  # torch adds its own to the same dicts
    try:
        optimizer: Optimizer = kind(groups, **optimizer_arguments(kind, training, options))
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{where}: its constructor refuses these options: {one_line(error)}") from None
    if not isinstance(chosen, ImportedOptimizer):
        _check_options(keys, optimizer.defaults.keys() | options.keys(), where)
    return _ready(optimizer, partial(build_optimizer, training), where)


def build_by_recipe(recipe: Any, training: TrainingConfig, groups: Groups) -> Optimizer | None:
    """Returns the optimizer that the recipe builds, or None if it leaves that to the config.

    The groups have the config's learning rate and weight decay, unless the recipe's `param_groups` sets them.
    """
    common = {"lr": training.learning_rate, "weight_decay": training.weight_decay}
    built = recipe.build_optimizer([{**common, **group} for group in groups])
    if built is None:
        return None
    where = f"recipe {type(recipe).__name__}: build_optimizer"
    if not isinstance(built, Optimizer):
        raise UserError(f"{where} returned {type(built).__name__}; return a torch.optim.Optimizer, or None")
    taken = {id(parameter) for group in built.param_groups for parameter in group["params"]}
    if left_out := sum(id(parameter) not in taken for group in groups for parameter in group["params"]):
        raise UserError(
            f"{where}: the {type(built).__name__} has not taken {left_out} of the parameters in its groups, which "
            "would never be updated; give it all, or leave them out of param_groups, which freezes them"
        )
    templates = [{**common, **{key: value for key, value in group.items() if key != "params"}} for group in groups]

    def build_again(given: Groups) -> Optimizer:
        """The recipe may count on having all of its groups, so those that are missing get a small tensor each."""
        missing = [{"params": [nn.Parameter(torch.zeros(2, 2))]} for _ in templates[len(given) :]]
        filled = [{**template, **group} for template, group in zip(templates, given + missing, strict=True)]
        return recipe.build_optimizer(filled)

    return _ready(built, build_again, where)


def _ready(optimizer: Optimizer, build: Build, where: str) -> Optimizer:
    """Notes the peak learning rate of each group, which the schedule scales, and how the optimizer was built."""
    for group in optimizer.param_groups:
        if "lr" not in group:
            raise UserError(f"{where}: its parameter groups have no `lr`, which schedules scale; let it take one")
        group["initial_lr"] = group["lr"]
    optimizer.build_again = build  # type: ignore[attr-defined]
    return optimizer


def groups_of(recipe: Any, training: TrainingConfig, blocks: Collection[str], model: nn.Module) -> Groups:
    """Returns the recipe's parameter groups, split by matrices for Muon. A group's `lr_ratio` multiplies the config's
    learning rate."""
    groups = [_as_group(group) for group in recipe.param_groups(model)]
    for group in groups:
        if (ratio := group.pop("lr_ratio", None)) is not None:
            group["lr"] = training.learning_rate * ratio
    return mark_matrices(groups, matrices_in_blocks(model, blocks)) if training.optimizer.name == "muon" else groups


def _as_group(group: Any) -> dict[str, Any]:
    """Returns a parameter group as a dict with a list of parameters; torch also takes other forms."""
    options = group if isinstance(group, dict) else {"params": group}
    if "params" not in options:
        raise UserError(f"{_GROUPS}: a group has {', '.join(map(str, options)) or 'nothing'} and no `params`; add them")
    members = [options["params"]] if isinstance(options["params"], Tensor) else options["params"]
    parameters = [member[1] if isinstance(member, tuple) else member for member in members]
    for parameter in parameters:
        if not isinstance(parameter, Tensor):
            raise UserError(f"{_GROUPS}: `params` has a {type(parameter).__name__}; give parameters of the model")
    rate = options.get("lr", 0.0)
    if not isinstance(rate, int | float) or not 0 <= rate < inf:
        raise UserError(f"{_GROUPS}: a group has lr = {rate!r:.100}; give a number of 0 or more, or leave it out")
    return {**options, "params": parameters}


def _check_options(keys: Iterable[str], known: Collection[str], where: str) -> None:
    """Refuses options of parameter groups that the optimizer would ignore."""
    for key in keys:
        if key not in known and key not in _OPTIONS:
            near = ["lr"] if key == "learning_rate" else get_close_matches(key, [*known, *_OPTIONS], n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(known))}"
            raise UserError(f"{_GROUPS}: a group has {key!r}, which {where} does not have; {hint}")


def check_matrices(groups: Groups) -> None:
    """Refuses Muon for a model without matrices for it: AdamW would train all of it. Looks at the whole model."""
    if not any(group.get("use_muon") and group["params"] for group in groups):
        raise UserError(
            "training.optimizer = muon: the blocks of the recipe's parallel_plan have no trained 2-D weights; use "
            "adamw, name the blocks in parallel_plan, or give groups in param_groups `use_muon: True`"
        )


def check_usable(optimizer: Optimizer) -> None:
    """Refuses an optimizer of the user's own that cannot step, or that a checkpoint cannot hold."""
    kind, parameters = type(optimizer), [p for group in optimizer.param_groups for p in group["params"]]
    if kind in (*CLASSES.values(), RoundedAdamW) or any(is_fake(local_part(p)) for p in parameters):
        return
    if problem := try_out(optimizer).problem:
        raise UserError(f"optimizer {kind.__module__}:{kind.__qualname__}: {problem}")


def freeze_ungrouped(model: nn.Module, groups: Iterable[Any]) -> list[str]:
    """Freezes the parameters that are in no parameter group, and returns their names.

    No optimizer would use or clear their gradients, which would grow in every step. It is done before the model is
    placed, so that every engine sees them as frozen. Refuses a parameter that is in the groups twice, because it would
    be updated twice.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    group_of: dict[int, int] = {}
    for number, parameter in _members(groups):
        if (other := group_of.get(id(parameter))) is not None:
            where = f"groups {other} and {number}" if other != number else f"group {number} twice"
            raise UserError(
                f"the recipe's param_groups: {names.get(id(parameter), 'a parameter')} is in {where} and would be "
                "updated twice; put it into one group, once"
            )
        group_of[id(parameter)] = number
    frozen = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in group_of]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return frozen


def _members(groups: Iterable[Any]) -> Iterator[tuple[int, Tensor]]:
    """Yields each parameter with the number of its group."""
    for number, group in enumerate(groups):
        for parameter in _as_group(group)["params"]:
            yield number, parameter


def small_groups(groups: Groups, device: torch.device) -> Groups:
    """Returns the same parameter groups of small tensors: one of each number of dimensions and dtype."""
    small: Groups = []
    for group in groups:
        kinds = dict.fromkeys((p.ndim, p.dtype) for p in group["params"] if p.requires_grad)
        parameters = [nn.Parameter(torch.zeros([2] * ndim, dtype=dtype, device=device)) for ndim, dtype in kinds]
        small.append({**group, "params": parameters})
    return small


def kept_slots(build: Build, groups: Groups) -> set[str]:
    """Returns the names of what an optimizer of small tensors keeps for them, such as exp_avg.

    torch has no list of them, so the optimizer takes a step, and its state is looked at.
    """
    copies = [{**group, "params": [nn.Parameter(p.detach().clone()) for p in group["params"]]} for group in groups]
    for parameter in (parameter for group in copies for parameter in group["params"]):
        parameter.grad = torch.zeros_like(parameter)
    optimizer = build(copies)
    optimizer.step()
    return {slot for slots in optimizer.state.values() for slot in slots_as_tensors(slots)}


def name_of(optimizer: Optimizer, training: TrainingConfig) -> str:
    """Returns the optimizer's name in the config, or the path of the class that the recipe has built."""
    kind = type(optimizer)
    return f"{kind.__module__}:{kind.__qualname__}" if is_by_recipe(optimizer) else training.optimizer.name


def is_by_recipe(optimizer: Optimizer) -> bool:
    """Returns whether the recipe has built the optimizer, and not the config."""
    return not isinstance(getattr(optimizer, "build_again", None), partial)


def set_learning_rate(optimizer: Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
