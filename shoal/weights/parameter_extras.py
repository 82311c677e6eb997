"""What user code attaches to parameters besides their values: attributes, hooks, and references outside of modules.

Layouts replace parameters: those on meta by ones with memory, those that are sharded by DTensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal.errors import UserError
from shoal.torch_private import gradient_hooks, post_accumulate_hooks

META_TWIN = "_meta_twin"
"""The attribute of a parameter that has the parameter on meta in its place."""
_TENSOR_ATTRIBUTES = {"_local_tensor", "_spec", META_TWIN}


def carry_over(old: Tensor, new: Tensor) -> None:
    """Gives `new`, which replaces the parameter `old`, the attributes and the gradient hooks of `old`."""
    for key, value in _attributes(old).items():
        setattr(new, key, value)
    if not new.requires_grad:
        return
    for hook in gradient_hooks(old):
        new.register_hook(hook)
    for hook in post_accumulate_hooks(old):
        new.register_post_accumulate_grad_hook(hook)


class ParameterAttributes:
    """The attributes of a model's parameters, such as `_no_weight_decay`, to give them to sharded parameters."""

    def __init__(self, model: nn.Module):
        named = model.named_parameters(remove_duplicate=False)
        self._by_name = {name: attributes for name, p in named if (attributes := _attributes(p))}

    def restore(self, model: nn.Module) -> None:
        """Sets the attributes that parameters have lost."""
        for name, parameter in model.named_parameters(remove_duplicate=False) if self._by_name else ():
            for key, value in self._by_name.get(name, {}).items():
                if not hasattr(parameter, key):
                    setattr(parameter, key, value)


def check_replaceable(model: nn.Module, strategy: str) -> None:
    """Refuses what sharded parameters, which replace the model's own, would silently lose."""
    for name, parameter in model.named_parameters():
        if gradient_hooks(parameter) or post_accumulate_hooks(parameter):
            raise UserError(
                f"parameter {name} has a hook on its gradient, which would be lost when strategy {strategy} shards it; "
                "remove the hook, or use strategy ddp"
            )
    if place := find_reference(model):
        raise UserError(
            f"{place}, where it is not replaced when strategy {strategy} shards it; read it from its module in the "
            "forward, or use strategy ddp"
        )


def make_contiguous(model: nn.Module) -> None:
    """Gives parameters the usual order in memory, which sharding needs; those of channels_last have another."""
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def check_trainable(model: nn.Module) -> None:
    """Refuses parameters without a shape, and gradients that are sparse."""
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise UserError(
                f"parameter {name} has no shape yet, because its module is lazy; call the model once in build_model, "
                "or use the class that is not lazy"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise UserError(f"{name or 'the model'}: an embedding with sparse=True is not supported; set sparse=False")


def check_alike_on_ranks(model: nn.Module) -> None:
    """Refuses embeddings that change their weights in the forward: each rank would change those of its own tokens."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise UserError(
                f"{name or 'the model'}: an embedding with max_norm changes its weights in the forward, differently on "
                "each rank; use one process, or normalise the output instead"
            )


def find_reference(model: nn.Module) -> str | None:
    """Returns which parameter is also referred to from an attribute that is not a parameter, such as a list; None if
    there is none. torch's recurrent modules look up their lists anew."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module_name, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            continue
        for key, value in vars(module).items():
            for tensor in () if key in ("_parameters", "_modules", "_buffers") else _tensors_in(value):
                if name := names.get(id(tensor)):
                    owner = f"{module_name}.{key}" if module_name else key
                    return f"parameter {name} is also kept in the attribute {owner}"
    return None


def _tensors_in(value: Any, depth: int = 2) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, list | tuple | Mapping):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(inner, depth - 1)


def _attributes(parameter: Tensor) -> dict[str, Any]:
    return {key: value for key, value in vars(parameter).items() if key not in _TENSOR_ATTRIBUTES}
