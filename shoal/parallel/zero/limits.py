"""Checks that refuse what DeepSpeed would compute differently from every other layout, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from shoal.errors import UserError
from shoal.parallel.sharding.shards import ELEMENTWISE, is_elementwise
from shoal.parallel.sharding.trial import try_out
from shoal.parallel.sharding.units import SENT_DTYPES
from shoal.parallel.zero.partition import is_here
from shoal.types import Objective, TrainState


def check_dtypes(model: nn.Module, stage: int) -> None:
    """Refuses parameters that DeepSpeed would train in another dtype than their own, or cannot gather."""
    for name, parameter in model.named_parameters():
        dtype = str(parameter.dtype).removeprefix("torch.")
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise UserError(
                f"parameter {name} is {dtype}, and strategy deepspeed trains everything as float32; convert it "
                f"(model.float(), with mixed_precision to compute in less), or use strategy ddp"
            )
        if stage == 3 and not parameter.numel():
            raise UserError(
                f"parameter {name} of shape {[*parameter.shape]} has no elements, which strategy deepspeed with "
                "zero_stage 3 cannot partition; remove it, or use zero_stage 2"
            )
        if stage == 3 and parameter.dtype not in SENT_DTYPES | {torch.bool}:
            raise UserError(
                f"parameter {name} is {dtype}, which strategy deepspeed with zero_stage 3 cannot gather; make it a "
                "buffer, or use zero_stage 2"
            )


def check_elementwise(optimizer: Optimizer) -> None:
    """Refuses an optimizer that would compute something else on slices of all parameters laid end to end."""
    kind, name = type(optimizer), type(optimizer).__name__
    supported = ", ".join(sorted(ELEMENTWISE - {"Adagrad"}))  # which has state before its first step
    if not is_elementwise(optimizer) or name == "Adagrad":
        raise UserError(
            f"distributed.strategy = deepspeed steps flat parts of parameters, which {name} is not known to take one "
            f"element at a time; use one of torch.optim's {supported}, or strategy ddp"
        )
    if optimizer.state:
        raise UserError("distributed.strategy = deepspeed takes an optimizer that has not stepped yet")
    if not kind.__module__.startswith("torch.optim") and not try_out(optimizer).all_tensors:
        raise UserError(
            f"distributed.strategy = deepspeed keeps tensors for a parameter, but the state of {name} also has numbers "
            "of Python; keep them as tensors, or use strategy fsdp or ddp"
        )


def check_counts(members: Mapping[str, nn.Parameter], state: TrainState) -> None:
    """Refuses a state in which some parameters of a group have no step count: DeepSpeed keeps one for all of them."""
    counted = {name for name in members if any(not value.shape for value in state.optimizer.get(name, {}).values())}
    if counted and (new := sorted(members.keys() - counted)):
        raise UserError(
            f"{new[0]} has no optimizer state in the checkpoint and {min(counted)} has, but DeepSpeed counts their "
            "steps together; resume with another distributed.strategy"
        )


class CheckedLoss:
    """A recipe whose loss must not read weights: under ZeRO-3 they are empty while their module does not compute."""

    def __init__(self, recipe: Objective, model: nn.Module):
        self._recipe, self._model = recipe, model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recipe, name)

    def loss(self, output: Any, batch: Any) -> Any:
        with _NoEmptyWeights({p: name for name, p in self._model.named_parameters()}):
            return self._recipe.loss(output, batch)


class _NoEmptyWeights(TorchFunctionMode):
    def __init__(self, names: Mapping[nn.Parameter, str]):
        super().__init__()
        self.names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = [*args, *(kwargs or {}).values()] if func.__name__ not in ("__get__", "__set__") else []
        values += [inner for value in values if isinstance(value, list | tuple) for inner in value]
        for value in values:
            if isinstance(value, nn.Parameter) and value in self.names and not is_here(value):
                raise UserError(
                    f"the recipe's loss reads {self.names[value]}, which is on other ranks under ZeRO stage 3, except "
                    "while its module computes; compute it in a module, or use stage 2"
                )
        return func(*args, **(kwargs or {}))
