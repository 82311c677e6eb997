"""Adapters on parameters that no linear layer holds, such as the experts of a mixture: `target_parameters`.

A module's forward sees `weight + scaling · B A` in the place of a parameter. For experts, which are one parameter of
three dimensions, A and B have the matrices of all experts side by side, in PEFT's order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.forward import call_with_views, declare_views, remove_views
from shoal.lora.config import LoraConfig
from shoal.lora.layers import ADAPTER, AdaptedLayer, Factor, LowRankLayer, attach, detach, draws
from shoal.lora.targets import Target

_INNER = "base_layer"
"""PEFT wraps a module once for each parameter, and this is its name for the module inside a wrapper."""


class _WholeFactor(Factor):
    """A matrix of an adapter that is added to a weight. Called, it returns a copy, through which gradients flow."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.weight.clone()


class ParameterAdapter:
    """The adapter of one parameter. Its matrices are modules of `holder`, by PEFT's names."""

    def __init__(self, holder: nn.Module, shape: torch.Size, is_transposed: bool, target: Target, lora: LoraConfig):
        """`is_transposed` says that experts are kept as (expert, inputs, outputs)."""
        self.holder, self.rank, self.scaling = holder, target.rank, lora.scaling(target.rank, target.alpha)
        self.experts = shape[0] if len(shape) == 3 else 0
        self.is_transposed = is_transposed and bool(self.experts)
        outputs, inputs = shape[-2:][::-1] if self.is_transposed else shape[-2:]
        width = target.rank * max(1, self.experts)
        first, second = draws(lora.init_lora_weights, target.rank)
        holder.lora_A = nn.ModuleDict({ADAPTER: _WholeFactor(inputs, width, False, first)})
        holder.lora_B = nn.ModuleDict({ADAPTER: _WholeFactor(width, outputs, False, second)})

    def __call__(self, parameter: Tensor) -> Tensor:
        """Returns the adapted parameter."""
        holder: Any = self.holder
        first, second = holder.lora_A[ADAPTER](), holder.lora_B[ADAPTER]()
        with torch.autocast(first.device.type if first.device.type != "meta" else "cpu", enabled=False):
            if not self.experts:
                change = second @ first
            else:
                by_expert = first.view(self.experts, self.rank, -1)  # (expert, rank, inputs)
                columns = second.view(-1, self.rank, self.experts)  # (outputs, rank, expert)
                form = "ore,eri->eio" if self.is_transposed else "ore,eri->eoi"
                change = torch.einsum(form, columns, by_expert)
        return parameter + change.to(parameter.dtype) * self.scaling  # no torch.add with alpha; see lora/layers.py


class AdaptedParameters(AdaptedLayer):
    """A module with adapters on some of its own parameters."""

    parameter_adapters: dict[str, ParameterAdapter]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return call_with_views(self, super().forward, *args, **kwargs)


def add_to_parameters(model: nn.Module, targets: Mapping[str, Target], lora: LoraConfig) -> None:
    """Gives parameters their adapters."""
    by_module: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        if name in targets:
            owner, _, key = name.rpartition(".")
            by_module.setdefault(owner, []).append(key)
    for owner, keys in by_module.items():
        module = model.get_submodule(owner)
        if isinstance(module, LowRankLayer) or any(p.requires_grad for p in module.parameters(recurse=False)):
            key = "target_modules" if isinstance(module, LowRankLayer) else "modules_to_save"
            raise UserError(f"lora.target_parameters: {owner} is in lora.{key}, too; take it out of one of them")
        adapters: dict[str, ParameterAdapter] = {}
        holder, is_transposed = module, bool(getattr(module, "is_transposed", False))
        for key in reversed(keys):  # PEFT's outermost wrapper has the last parameter
            if adapters:
                inner = nn.Module()
                holder.add_module(_INNER, inner)
                holder = inner
            shape = module.get_parameter(key).shape
            adapters[key] = ParameterAdapter(holder, shape, is_transposed, targets[f"{owner}.{key}"], lora)
        attach(module, AdaptedParameters, parameter_adapters=adapters)
        declare_views(module, adapters)


def parameter_adapters(model: nn.Module) -> dict[str, ParameterAdapter]:
    """Returns the adapters of parameters, by the names of the parameters."""
    return {
        f"{name}.{key}": adapter
        for name, module in model.named_modules()
        if isinstance(module, AdaptedParameters)
        for key, adapter in module.parameter_adapters.items()
    }


@torch.no_grad()
def merge_parameters(model: nn.Module) -> None:
    """Adds every adapter of a parameter to it."""
    for name, adapter in parameter_adapters(model).items():
        parameter = model.get_parameter(name)
        parameter.copy_(adapter(parameter))


def remove_from_parameters(model: nn.Module) -> None:
    """Takes the adapters of parameters off a model."""
    for module in [module for module in model.modules() if isinstance(module, AdaptedParameters)]:
        remove_views(module)
        detach(module)
        for name in [name for name in ("lora_A", "lora_B", _INNER) if name in module._modules]:
            delattr(module, name)
