"""Checks what the methods of a recipe return, so that a mistake is named where it was made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.errors import UserError
from shoal.types import Objective


def model_inputs(recipe: Objective, batch: Any) -> Mapping[str, Any]:
    """Returns the keyword arguments of the model for a batch."""
    inputs = recipe.inputs(batch)
    if type(inputs) is not dict and not isinstance(inputs, Mapping):  # the usual case first: asking for Mapping is slow
        raise UserError(
            f"{place_of(recipe.inputs)}: inputs returned a {type(inputs).__name__}, but the model is called with "
            'keyword arguments; return a dict such as {"x": batch["x"]}'
        )
    return inputs


def checked_loss(recipe: Objective, loss: Any) -> Tensor:
    """Returns a loss of the recipe if it is a tensor with one number, and with a gradient if one is computed."""
    if not isinstance(loss, Tensor):
        raise UserError(
            f"{place_of(recipe.loss)}: loss returned a {type(loss).__name__}, which has no gradient; return the "
            "tensor, without .item()"
        )
    if loss.ndim:
        raise UserError(
            f"{place_of(recipe.loss)}: the recipe's loss has shape {[*loss.shape]}; it should be one number, a sum"
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise UserError(
            f"{place_of(recipe.loss)}: the loss has no gradient; compute it from the model's output, without "
            ".detach(), .item() and torch.no_grad(), and train at least one parameter that it depends on"
        )
    return loss


def place_of(function: Callable[..., Any]) -> str:
    """Returns the file and line of a function, such as `recipe.py:12`, or its name."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return f"recipe method {getattr(function, '__name__', function)}"
    path = Path(code.co_filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{code.co_firstlineno}"
