"""Puts adapters into a model, and says where their first values come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.lora.adapted_parameters import (
    add_to_parameters,
    merge_parameters,
    parameter_adapters,
    remove_from_parameters,
)
from shoal.lora.config import LoraConfig
from shoal.lora.layers import (
    ADAPTER,
    AdaptedEmbedding,
    AdaptedLinear,
    EmbeddingFactor,
    Factor,
    LowRankLayer,
    Magnitude,
    add_to_embedding,
    add_to_linear,
    detach,
    linear_sizes,
    plain_weight,
)
from shoal.lora.targets import find_parameters, find_targets, modules_to_save
from shoal.lora.trained_tokens import merge_rows, token_indices, token_layers, train_tokens
from shoal.tensors import is_packed, replace_parameters
from shoal.types import TensorStyle
from shoal.weights.conversion import Compute, Source

Reset = Callable[[nn.Module, nn.Module], None]


def add_adapters(
    model: nn.Module,
    lora: LoraConfig,
    frozen_dtype: torch.dtype = torch.float32,
    added_tokens: Sequence[int] = (),
) -> None:
    """Freezes a model and gives it the adapters that the section `lora:` asks for; they are what is trained.

    Frozen parameters that are floating-point get the dtype `frozen_dtype`. `added_tokens` are the numbers of the tokens
    that `model.added_tokens` names. The model may be on the meta device.
    """
    targets, parameters = find_targets(model, lora), find_parameters(model, lora)
    model.requires_grad_(False)
    for name, target in targets.items():
        if lora.ensure_weight_tying and (tied := _tied_names(model, name)):
            raise UserError(
                f"lora.ensure_weight_tying = true: {name} has an adapter and is tied to {tied[0]}; PEFT would put the "
                "adapter on both, which shoal does not; leave the key out, or take the module out of target_modules"
            )
        module, scaling = model.get_submodule(name), lora.scaling(target.rank, target.alpha)
        if isinstance(module, nn.Embedding):
            add_to_embedding(module, target.rank, scaling, lora.init_lora_weights)
        else:
            dropout, init = lora.lora_dropout, lora.init_lora_weights
            add_to_linear(module, target.rank, scaling, dropout, lora.lora_bias, lora.use_dora, init)
    for name in modules_to_save(model, lora):
        if name in targets:
            key = next(key for key in lora.modules_to_save or () if name.endswith(key))
            raise UserError(
                f"lora.modules_to_save = {key!r}: it is also the end of {name}, which has an adapter; write more of "
                "the name, or take the module out of lora.target_modules"
            )
        _train_whole(model, name, lora)
    add_to_parameters(model, parameters, lora)
    if lora.trainable_token_indices is not None:
        train_tokens(model, lora, added_tokens)
    for module in model.modules():
        bias = module._parameters.get("bias")
        if bias is not None and not isinstance(module, Factor):
            trained = lora.bias == "all" or (lora.bias == "lora_only" and isinstance(module, LowRankLayer))
            bias.requires_grad_(bias.requires_grad or trained)
    if lora.bias != "none" and not any(p.requires_grad for n, p in model.named_parameters() if _is_base_bias(n)):
        raise UserError(f"lora.bias = {lora.bias}: the model has no such biases; use none")
    if frozen_dtype != torch.float32:
        replace_parameters(
            model,
            lambda p: (
                p
                if p.requires_grad or not p.is_floating_point() or is_packed(p)  # packed weights
                else nn.Parameter(p.detach().to(frozen_dtype), requires_grad=False)
            ),
        )


def _is_base_bias(name: str) -> bool:
    return name.rpartition(".")[2] == "bias" and f".{ADAPTER}." not in name


def _train_whole(model: nn.Module, name: str, lora: LoraConfig) -> None:
    """Makes all parameters of a module trained; refuses one that is tied to a module outside."""
    module = model.get_submodule(name)
    parameters = [*module.parameters()]
    if not parameters:
        raise UserError(f"lora.modules_to_save: {name} has no parameters to train; leave it out")
    if any(map(is_packed, parameters)):
        raise UserError(f"lora.modules_to_save: {name} is quantised, and quantised weights are frozen; leave it out")
    if (tied := _tied_names(model, name)) and not lora.ensure_weight_tying:
        raise UserError(
            f"lora.modules_to_save: {name} is tied to {tied[0]}, and PEFT would untie them; set "
            "lora.ensure_weight_tying: true to train both as one, or leave it out"
        )
    module.requires_grad_(True)


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the layers that have an adapter of low rank, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, LowRankLayer):
            yield name, module


def scalings(model: nn.Module) -> dict[str, float]:
    """Returns what the output of each adapter is multiplied by, by the name of its layer or parameter."""
    layers = {name: float(layer.scaling) for name, layer in adapted_layers(model)}
    return layers | {name: adapter.scaling for name, adapter in parameter_adapters(model).items()}


def multiplies_weights(model: nn.Module) -> bool:
    """Returns whether adapters multiply matrices with each other, for DoRA or for an adapted parameter."""
    dora = any(getattr(layer, "lora_magnitude_vector", None) for _, layer in adapted_layers(model))
    return dora or bool(parameter_adapters(model))


def has_adapters(model: nn.Module) -> bool:
    """Returns whether a model has any adapter."""
    return bool(next(adapted_layers(model), None) or parameter_adapters(model) or token_layers(model))


def remove_adapters(model: nn.Module) -> None:
    """Takes all adapters off a model, which then is the base."""
    for _, module in [*adapted_layers(model), *token_layers(model).items()]:
        detach(module)
    remove_from_parameters(model)


def reset_with(reset_other: Reset) -> Reset:
    """Returns a function that draws the parameters of an adapter's part, and has `reset_other` draw all others."""

    def reset(model: nn.Module, module: nn.Module) -> None:
        if isinstance(module, Factor | EmbeddingFactor):
            module.reset_parameters()
        elif isinstance(module, Magnitude):
            nn.init.ones_(module.weight)  # until the base's weights are read
        else:
            reset_other(model, module)

    return reset


def magnitude_sources(model: nn.Module, sources: Mapping[str, Source]) -> dict[str, Source]:
    """Returns how DoRA's first magnitudes are made from the files of the base: the lengths of a weight's rows."""
    found: dict[str, Source] = {}
    for name, module in adapted_layers(model):
        if isinstance(module, AdaptedLinear) and module.lora_magnitude_vector:
            dimension = 1 if hasattr(module, "in_features") else 0
            weight = sources[f"{name}.weight"]
            lengths = Compute((weight,), lambda tensor, dimension=dimension: tensor.norm(dim=dimension))
            found[f"{name}.lora_magnitude_vector.{ADAPTER}.weight"] = lengths
    return found


def is_adapter_tensor(name: str) -> bool:
    """Returns whether a tensor of a model belongs to an adapter, by its name."""
    return ".lora_" in name or ".token_adapter." in name


def split_groups(model: nn.Module, groups: list[dict[str, Any]], ratio: float) -> list[dict[str, Any]]:
    """Returns parameter groups in which the second matrix of each adapter learns `ratio` times as fast (LoRA+)."""
    if ratio == 1:
        return groups
    faster = {id(p) for name, p in model.named_parameters() if ".lora_B." in name or ".lora_embedding_B." in name}
    split = []
    for group in groups:
        split.append({**group, "params": [p for p in group["params"] if id(p) not in faster]})
        split.append({**group, "params": [p for p in group["params"] if id(p) in faster], "lr_ratio": ratio})
    return split


def tensor_styles(model: nn.Module, style_of: Callable[[str], TensorStyle | None]) -> dict[str, TensorStyle]:
    """Returns how tensor parallelism splits adapters, from the styles of their layers.

    Beside a layer split by outputs, B and the magnitudes are split by outputs, and A is whole; beside one split by
    inputs, A is split by inputs, and B and the magnitudes are whole.
    """
    styles: dict[str, TensorStyle] = {}
    for name, module in adapted_layers(model):
        style = style_of(name)
        if style == "row":
            styles[f"{name}.lora_A.{ADAPTER}.weight"] = 1
        elif style == "column":
            split = [f"lora_B.{ADAPTER}.weight", f"lora_B.{ADAPTER}.bias", f"lora_magnitude_vector.{ADAPTER}.weight"]
            parameters = dict(module.named_parameters())
            styles |= {f"{name}.{key}": 0 for key in split if key in parameters}
    return styles


def describe_adapters(model: nn.Module, trained: int, total: int) -> str:
    """Returns the row of the report about adapters, or an empty string if the model has none. `trained` and `total` are
    numbers of parameters of the whole model."""
    layers, adapted = dict(adapted_layers(model)), scalings(model)
    if not adapted:
        return ""
    kinds = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in adapted))
    number = len(adapted) - len(layers)
    counts = [f"{len(layers)} modules"] * bool(layers) + [f"{number} parameters"] * bool(number)
    ranks = dict.fromkeys([*map(_rank, layers.values()), *(a.rank for a in parameter_adapters(model).values())])
    alphas = dict.fromkeys(f"{scaling:g}" for scaling in adapted.values())
    rows = sum(map(len, token_indices(model).values()))
    tokens = f" and {rows} rows of tokens" if rows else ""
    dora = any(getattr(module, "lora_magnitude_vector", None) for module in layers.values())
    return (
        f"{'DoRA' if dora else 'LoRA'} on {' and '.join(counts)} ({kinds}){tokens}, rank {', '.join(map(str, ranks))}, "
        f"scaled by {', '.join(alphas)}; {trained:,} of {total:,} parameters are trained ({trained / total:.2%})"
    )


def _rank(module: Any) -> int:
    if isinstance(module, AdaptedEmbedding):
        return len(module.lora_embedding_A[ADAPTER])
    rank: int = module.lora_A[ADAPTER].out_features
    return rank


def untie_adapted(model: Any) -> str:
    """Gives an embedding or head with an adapter a weight of its own if it is tied, and returns its name.

    Returns an empty text if none is. Once the adapter is merged, the two modules of a tied weight differ.
    """
    for name, module in adapted_layers(model):
        if _tied_names(model, name):
            module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=False)
            model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False
            return name
    return ""


def _tied_names(model: nn.Module, name: str) -> list[str]:
    """Returns the names of the modules that have parameters of a module and are not inside of it."""
    own = {id(parameter) for parameter in model.get_submodule(name).parameters()}
    return [
        other.rpartition(".")[0]
        for other, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in own and not other.startswith(f"{name}.")
    ]


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Adds every adapter to the weight of its layer, and takes it off. The model then has its plain form.

    A quantised layer (with a method `dequantise`) becomes a plain Linear of its dequantised weight and the adapter.
    """
    for name, module in [*adapted_layers(model)]:
        if isinstance(module, AdaptedEmbedding):
            first, second = module.lora_embedding_A[ADAPTER], module.lora_embedding_B[ADAPTER]
            weight: Any = module.weight
            weight.copy_(weight.float() + (second @ first).mT * module.scaling)
            detach(module)
        elif hasattr(module, "dequantise"):
            linear = nn.Linear(*linear_sizes(module), bias=module.bias is not None)
            linear.weight.copy_(merged_weight(module))
            if (bias := merged_bias(module)) is not None:
                linear.bias.copy_(bias)
            model.set_submodule(name, linear)
        else:
            merged, bias = merged_weight(module), merged_bias(module)
            module.weight.copy_(merged if hasattr(module, "in_features") else merged.mT)
            if bias is not None:
                module.bias.copy_(bias)
            detach(module)

    for layer in token_layers(model).values():
        merge_rows(layer)
    merge_parameters(model)
    remove_adapters(model)


def merged_weight(module: Any) -> Tensor:
    """Returns the weight (outputs, inputs) of a layer with its adapter, in float32."""
    first, second = module.lora_A[ADAPTER], module.lora_B[ADAPTER]
    weight = plain_weight(module).float()
    merged = weight + second.weight @ first.weight * module.scaling
    if module.lora_magnitude_vector:
        merged *= (module.lora_magnitude_vector[ADAPTER].weight / merged.norm(dim=1))[:, None]
    return merged


def merged_bias(module: Any) -> Tensor | None:
    """Returns the bias of a layer with its adapter's, or None if it has none."""
    change, bias = module.lora_B[ADAPTER].bias, module.bias
    if change is None:
        return None if bias is None else bias.clone()
    if bias is None:
        raise UserError("lora.lora_bias = true: a layer without a bias cannot take up the adapter's; use --to peft")
    merged: Tensor = bias.float() + change * module.scaling
    return merged
