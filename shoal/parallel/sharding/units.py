"""The units of fully_shard: modules whose parameters are gathered together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial

import torch
from torch import nn

from shoal.errors import UserError
from shoal.tensors import is_packed
from shoal.types import ParallelPlan

WrapPolicy = Callable[..., bool]
"""A policy as torch's first FSDP takes it, with the keywords module, recurse and nonwrapped_numel."""
DEFAULT_MIN_NUM_PARAMS = 100_000_000
SENT_DTYPES = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8}
)
"""The dtypes that both gloo and NCCL gather as they are. A unit of several dtypes is gathered as bytes."""


def choose_units(
    model: nn.Module,
    plan: ParallelPlan,
    policy: str | None = None,
    min_num_params: int | None = None,
    classes: Sequence[str] | None = None,
    torch_policy: WrapPolicy | None = None,
) -> list[str]:
    """Returns the names of the units in the order of the model. Parameters outside of them form the root's unit.

    Without a policy these are the plan's embedding, blocks and head. A module that shares a parameter with another part
    of the model cannot be a unit, since each parameter belongs to one unit; nor can a module without parameters.
    """
    if torch_policy is not None:
        found = _of_torch_policy(model, torch_policy)
    elif classes is not None:
        found = _of_classes(model, classes)
    elif policy == "size_based":
        found = _of_size(model, min_num_params or DEFAULT_MIN_NUM_PARAMS)
    else:
        if policy == "transformer_based" and not plan.blocks:
            raise UserError(
                "distributed.fsdp.auto_wrap_policy = transformer_based, but the model has no repeated blocks; "
                "use size_based, wrap_classes, or leave it out to gather the whole model at once"
            )
        found = [name for name in (plan.embed, *plan.blocks, plan.head) if name]
    units = [name for name in found if _can_stand_alone(model, name)]
    if found and not units and (classes is not None or policy or torch_policy):
        raise UserError(
            "distributed.fsdp: none of the modules that wrap_classes or auto_wrap_policy chose has parameters of its "
            "own, so none can be a unit; leave it out to gather the whole model at once"
        )
    return units


def check_shardable(model: nn.Module) -> None:
    """Refuses parameters without dimensions, which neither fully_shard nor DeepSpeed can split."""
    for name, parameter in model.named_parameters():
        if not parameter.ndim:
            raise UserError(
                f"parameter {name} is a single number, which sharding cannot split; give it the shape [1], or use "
                "strategy ddp"
            )


def check_units(model: nn.Module, units: Sequence[str], strategy: str) -> None:
    """Refuses what fully_shard cannot gather, or would reduce to something else, before it fails in a step.

    It puts the parameters of a unit into one flat tensor, and the gradients of those that are trained into another.
    """
    members: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            raise UserError(
                f"parameter {name} of shape {[*parameter.shape]} has no elements, which strategy {strategy} cannot "
                "shard; remove it, or use strategy ddp"
            )
        if parameter.is_complex():
            raise UserError(
                f"parameter {name} is {_say(parameter.dtype)}, and strategy {strategy} sums gradients as real numbers; "
                "store its real and imaginary parts (torch.view_as_real), or use strategy ddp"
            )
        if torch.__version__ < "2.13" and not parameter.is_floating_point():  # fully_shard makes it require a gradient
            packed = "set model.bnb_4bit_quant_storage: bfloat16" if is_packed(parameter) else ""
            raise UserError(
                f"parameter {name} is {_say(parameter.dtype)}, which strategy {strategy} cannot shard with torch "
                f"{torch.__version__}; {packed or 'make it a buffer'}, or use torch 2.13 or strategy ddp"
            )
        unit = max((unit for unit in units if name.startswith(f"{unit}.")), key=len, default="")
        members.setdefault(unit, []).append((name, parameter))
    for inside in members.values():
        dtypes, (name, first) = {parameter.dtype for _, parameter in inside}, inside[0]
        if dtypes == {first.dtype} and first.dtype not in SENT_DTYPES:
            raise UserError(
                f"parameter {name} is {_say(first.dtype)}, which strategy {strategy} cannot gather; make it a buffer, "
                "or use strategy ddp"
            )
        trained = [(name, parameter) for name, parameter in inside if parameter.requires_grad]
        for name, parameter in trained:
            if parameter.dtype != trained[0][1].dtype:
                raise UserError(
                    f"parameter {name} is {_say(parameter.dtype)} and {trained[0][0]} is {_say(trained[0][1].dtype)}, "
                    f"and strategy {strategy} gathers both in one unit, whose trained parameters need one dtype; "
                    "convert one of them, or use strategy ddp"
                )


def _say(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _of_classes(model: nn.Module, classes: Sequence[str]) -> list[str]:
    there = {type(module).__name__ for module in model.modules()}
    for name in classes:
        if name not in there:
            nearest = get_close_matches(name, there, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"it has {', '.join(sorted(there))}"
            raise UserError(f"distributed.fsdp.wrap_classes names {name!r}, which is no class in the model; {hint}")
    return [name for name, module in model.named_modules() if name and type(module).__name__ in classes]


def _of_torch_policy(model: nn.Module, policy: WrapPolicy) -> list[str]:
    """Returns the modules that a policy of torch's first FSDP chooses, asked in the order in which that asks.

    A policy is asked whether to look into a module, then, with the number of parameters that no unit inside has taken,
    whether the module is a unit. The model itself is not asked: it is the root in any case.
    """
    found: list[str] = []

    def visit(name: str, module: nn.Module) -> int:
        """Returns how many parameters are in units."""
        numel = sum(parameter.numel() for parameter in module.parameters())
        if not policy(module=module, recurse=True, nonwrapped_numel=numel):
            return 0
        taken = sum(visit(f"{name}.{key}" if name else key, child) for key, child in module.named_children())
        if not name or not policy(module=module, recurse=False, nonwrapped_numel=numel - taken):
            return taken
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):  # which nobody calls, so nothing would gather them
            found.append(name)
        return numel

    visit("", model)
    if not found:
        raise UserError(
            f"auto_wrap_policy = {_say_policy(policy)}: it chooses no module of the model as a unit; change it, or "
            "leave it out to take the model's blocks"
        )
    return [name for name, _ in model.named_modules() if name in found]


def _say_policy(policy: WrapPolicy) -> str:
    function = policy.func if isinstance(policy, partial) else policy
    return getattr(function, "__name__", type(function).__name__)


def _of_size(model: nn.Module, least: int) -> list[str]:
    """Returns the smallest modules that have at least `least` parameters outside of smaller units."""
    found: list[str] = []

    def visit(name: str, module: nn.Module) -> int:
        """Returns how many parameters are left for the parent."""
        left = sum(p.numel() for p in module.parameters(recurse=False))
        left += sum(visit(f"{name}.{key}" if name else key, child) for key, child in module.named_children())
        if name and left >= least and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            found.append(name)
            return 0
        return left

    total = visit("", model)
    if not found:
        raise UserError(
            f"distributed.fsdp.auto_wrap_policy = size_based, but no module inside the model has {least:,} parameters "
            f"(it has {total:,} in all); lower distributed.fsdp.min_num_params"
        )
    return [name for name, _ in model.named_modules() if name in found]


def _can_stand_alone(model: nn.Module, name: str) -> bool:
    own = {id(p) for p in model.get_submodule(name).parameters()}
    everywhere = model.named_parameters(remove_duplicate=False)
    return bool(own) and own.isdisjoint(id(p) for key, p in everywhere if not key.startswith(f"{name}."))
