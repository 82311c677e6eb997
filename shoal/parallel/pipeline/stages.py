"""Cutting a model into the stages of a pipeline."""

from __future__ import annotations

import copy
import types
from collections.abc import Collection, Sequence
from functools import cache
from itertools import accumulate, pairwise
from math import inf
from typing import Any

from torch import nn

from shoal.config.mesh import STAGES_PER_RANK
from shoal.errors import UserError
from shoal.types import ParallelPlan


def count_stages(pp: int, schedule: str) -> int:
    """Returns the number of stages on all `pp` ranks."""
    return pp * STAGES_PER_RANK[schedule]


def stages_of(rank: int, pp: int, schedule: str) -> tuple[int, ...]:
    """Returns the stages that a rank holds. With `zbv` they form a V: the last stage is on the first rank again."""
    return (rank, 2 * pp - 1 - rank) if schedule == "zbv" else tuple(range(rank, count_stages(pp, schedule), pp))


def cut(model: nn.Module, plan: ParallelPlan, num_stages: int) -> list[tuple[str, ...]]:
    """Returns the modules of each stage, as consecutive names of `plan.order`; the most expensive stage is minimal.

    The cost of a module is the number of elements in its matrices; an embedding, which only looks up, costs nothing. Of
    cuts that are equally good the most even one is taken, then the earliest: first stages keep more activations.
    """
    order = [*plan.order]
    _check_order(model, plan, num_stages)
    costs = [_cost(model.get_submodule(name)) for name in order]
    paid, blocks = [0, *accumulate(costs)], [0, *accumulate(name in plan.blocks for name in order)]

    @cache
    def best(start: int, stages: int, limit: float) -> tuple[float, tuple[int, ...]]:
        """Returns the best cost of the modules from `start` on, and where the stages end.

        Without a limit that is the cost of the most expensive stage, under one the sum of squares of all stages.
        """
        found: tuple[float, tuple[int, ...]] = (inf, ())
        for end in range(start + 1, len(order) + 1) if stages > 1 else (len(order),):
            cost = paid[end] - paid[start]
            if blocks[end] > blocks[start] and cost <= limit:
                others, ends = best(end, stages - 1, limit) if stages > 1 else (0, ())
                found = min(found, (max(cost, others) if limit == inf else cost**2 + others, (end, *ends)))
        return found

    dearest, _ = best(0, num_stages, inf)
    _, ends = best(0, num_stages, dearest)
    cuts = [tuple(order[start:end]) for start, end in pairwise((0, *ends))]
    _check_shared(model, cuts)
    return cuts


class PassThrough(nn.Module):
    """Takes the place of a module that another stage computes: it returns its first argument.

    The plain attributes of that module stay, for models that look at them, such as at a layer's `attention_type`.
    """

    def __init__(self, replaced: nn.Module):
        super().__init__()
        plain = {key: value for key, value in vars(replaced).items() if isinstance(value, str | int | bool | float)}
        vars(self).update(plain)

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden


def take_stages(
    model: nn.Module, plan: ParallelPlan, cuts: Sequence[Sequence[str]], mine: Sequence[int]
) -> list[nn.Module]:
    """Removes from `model` what the stages `mine` do not own, and returns a module for each of these stages.

    Each is called as the model is. A single stage is the model itself; of several, each is a copy of the containers
    around the modules of `plan.order`, and all other modules are shared.
    """
    owned = {name for index in mine for name in cuts[index]}
    for name in plan.order:
        if name not in owned:
            model.set_submodule(name, PassThrough(model.get_submodule(name)))
    if len(mine) == 1:
        return [model]
    return [_with_only(model, "", cuts[index], plan.order) for index in mine]


def follow_mode(stage: nn.Module) -> None:
    """Sets the containers that `take_stages` copied to training or evaluation mode, as their originals are."""
    for module in stage.modules():
        original = vars(module).get(_ORIGINAL)
        if original is not None:
            module.training = original.training


_ORIGINAL = "_copied_from"


def _with_only(module: nn.Module, name: str, kept: Collection[str], order: Collection[str]) -> nn.Module:
    """Returns the module, or a copy with pass-throughs for the names in `order` that are not kept."""
    if name in order:
        return module if name in kept else PassThrough(module)
    prefix = f"{name}." if name else ""
    if not any(other.startswith(prefix) for other in order):
        return module
    twin = copy.copy(module)
    state = vars(twin)
    # Hooks and children are the copy's own; parameters and buffers are the model's, so that moving them moves both.
    own = {key: value.copy() for key, value in state.items() if isinstance(value, dict)}
    state.update({key: value for key, value in own.items() if key not in ("_parameters", "_buffers")})
    state[_ORIGINAL] = module  # beside the children, or it would be one of them
    if isinstance(forward := state.get("forward"), types.MethodType):
        state["forward"] = types.MethodType(forward.__func__, twin)
    for key, child in module.named_children():
        setattr(twin, key, _with_only(child, f"{prefix}{key}", kept, order))
    return twin


def _cost(module: nn.Module) -> int:
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    return sum(p.numel() for p in module.parameters() if p.ndim >= 2 and id(p) not in tables)


def _check_order(model: nn.Module, plan: ParallelPlan, num_stages: int) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    weights = [p for name in plan.blocks if name in modules for p in modules[name].parameters()]
    if plan.blocks and not weights:
        raise UserError(
            f"a pipeline needs blocks with weights of their own, but {plan.blocks[0]} and the others all use the same "
            "ones, which no stage could own alone; use fsdp or tensor parallelism"
        )
    if not plan.order:
        raise UserError(
            "a pipeline needs the order of the model's modules, but the recipe's plan states no order; "
            "give ParallelPlan(order=(...), entry=...) in the recipe's parallel_plan"
        )
    for name in plan.order:
        if name not in modules:
            raise UserError(f"the plan's order names {name!r}, but the model has no such module; mend parallel_plan")
        if any(name.startswith(f"{other}.") for other in plan.order) or plan.order.count(name) > 1:
            raise UserError(f"the plan's order has {name!r} twice, or inside of another of its modules; name it once")
    for name, _ in model.named_parameters(remove_duplicate=False):
        if not any(name.startswith(f"{owner}.") for owner in plan.order):
            raise UserError(
                f"parameter {name} is in no module of the plan's order, so no stage would have it; add its module"
            )
    num_blocks = sum(name in plan.blocks for name in plan.order)
    if num_blocks < num_stages:
        raise UserError(
            f"a pipeline of {num_stages} stages needs {num_stages} blocks, but the plan's order has {num_blocks}; "
            "use a smaller distributed.mesh pp, or a schedule with one stage per rank"
        )


def _check_shared(model: nn.Module, cuts: Sequence[Sequence[str]]) -> None:
    """Refuses a parameter that two stages share: it would become two parameters, each with half of the gradient."""
    first: dict[int, tuple[int, str]] = {}
    for index, names in enumerate(cuts):
        for owner in names:
            for name, parameter in model.get_submodule(owner).named_parameters(prefix=owner, remove_duplicate=False):
                stage, known = first.setdefault(id(parameter), (index, name))
                if stage != index:
                    raise UserError(
                        f"{known} and {name} are one parameter, but stages {stage} and {index} of the pipeline would "
                        "each have their own; untie them, or use a layout without pp"
                    )
