"""Finds frozen parameters that a model changes while fully_shard has gathered them, such as an average in the model.

A gathered parameter is a copy that is freed after use, so the change is lost: the parameter never moves, and nothing
else would say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from shoal.errors import UserError
from shoal.tensors import local_part
from shoal.torch_private import version_of


class FrozenWatch:
    """Notes the frozen parameters of each unit when they are gathered for the first time.

    Torch keeps one tensor for all gathered copies of a parameter, and gathering does not count as a change of it.
    Tensor subclasses, such as quantized weights, gather as they like and are left out.
    """

    def __init__(self, units: Mapping[str, nn.Module]):
        self._noted: dict[str, tuple[Tensor, int]] = {}
        """The gathered parameters by name, each with the number of changes in place that it had."""
        self._plain = {
            name
            for unit_name, unit in units.items()
            for name, parameter in unit.named_parameters(unit_name)
            if type(local_part(parameter)) is Tensor
        }
        for name, unit in units.items():
            if not all(parameter.requires_grad for parameter in unit.parameters()):
                handles: list[Any] = []  # fully_shard's own hook, which gathers, runs before this one
                handles.append(unit.register_forward_pre_hook(partial(self._note, name, handles)))

    def _note(self, unit_name: str, handles: list[Any], unit: nn.Module, inputs: Any) -> None:
        handles.pop().remove()
        for name, parameter in unit.named_parameters(unit_name):
            is_gathered = type(parameter) is nn.Parameter and type(parameter.data) is Tensor
            if is_gathered and not parameter.requires_grad and name in self._plain:
                self._noted[name] = parameter, version_of(parameter)

    def check(self) -> None:
        """Refuses a model that has changed one of them."""
        for name, (parameter, version) in self._noted.items():
            if version_of(parameter) != version:
                raise UserError(
                    f"the model changes its frozen parameter {name} in place in a step, and FSDP forgets the change; "
                    "keep an average by the callback ema, change the parameter in the hook after_step, make it a "
                    "buffer, or use strategy ddp"
                )
