"""Refuses optimizers that were built before a model was sharded: they hold parameters that no longer train.

fully_shard gives a model new parameters. A script that built its optimizer before would call its `step()` without an
error and without an effect.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shoal.errors import UserError

_replaced: dict[int, weakref.ref[Tensor]] = {}
"""Parameters that a model no longer has, by their id, as long as somebody else holds them."""
_checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_hooks: list[Any] = []


@contextmanager
def remember_replaced(model: nn.Module) -> Iterator[None]:
    """Remembers the parameters that what is inside replaces by others; an optimizer that has one is then refused."""
    before = {id(parameter): weakref.ref(parameter) for parameter in model.parameters()}  # weak, to free their memory
    yield
    kept = {id(parameter) for parameter in model.parameters()}
    for key, reference in before.items():
        parameter = reference()
        if parameter is not None and key not in kept:
            _replaced[key] = weakref.ref(parameter, lambda _, key=key: _replaced.pop(key, None))  # type: ignore[misc]
    if _replaced and not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check))
    _checked.clear()


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Runs before the step of any optimizer; looks at each of them once."""
    if optimizer in _checked:
        return
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if id(parameter) in _replaced:
            raise UserError(
                f"the {type(optimizer).__name__} was built before the model was sharded, so it holds parameters that "
                "no longer train; build it from the model that wrap_model_fsdp or loop.wrap returned"
            )
    _checked.add(optimizer)
