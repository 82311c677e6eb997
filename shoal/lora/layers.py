"""Layers with an adapter: a subclass of whatever class the layer has, with PEFT's names for the adapter's parameters.

The layer keeps its class's forward, its parameters and their names, so that everything else (plans, files, sharding)
treats it as before; `lora_A.default.weight` and `lora_B.default.weight` come beside `weight`. A quantised layer has its
own forward and its own parameters, and gets an adapter in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.lora.dropout import AdapterDropout, draw_seed, dropped_product
from shoal.tensors import autocast_dtype

ADAPTER = "default"
"""The name that PEFT gives an adapter which has no other."""


class Factor(nn.Linear):
    """One of the two matrices of an adapter. Called without an input it returns a copy of its weight.

    Layouts gather a module's parameters, or replace them by views, only while the module computes; so nobody else may
    read them, and a copy is what lasts.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, draw: Callable[[Tensor], Any]) -> None:
        self.draw = draw
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        self.draw(self.weight)
        if self.bias is not None:
            _draw_bias(self.bias, self.in_features) if self.draw is draw_uniform else nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Tensor | None = None,
        dropout: float | None = None,
        scaling: float = 1.0,
        base: Callable[[tuple[Tensor, Tensor]], Tensor] | None = None,
    ) -> Tensor:
        """Multiplies x with the matrix. With a `dropout`, be it 0, one operator drops, multiplies and scales.

        With a `base`, the product is left to that function, which gets the two factors and adds them to its output.
        """
        if x is None:
            return self.weight.detach().clone()
        dtype = autocast_dtype(x.device) or self.weight.dtype
        if base is not None:
            return base((x.to(dtype), self.weight.to(dtype)))
        if dropout is None:
            return super().forward(x)
        factor, seed = self.weight.detach().to(dtype), draw_seed(x.device, dropout)
        return dropped_product(x.to(dtype), self.weight, factor, seed, dropout, scaling)


class EmbeddingFactor(nn.ParameterDict):
    """One of the two matrices of an embedding's adapter."""

    def __init__(self, rows: int, columns: int, draw: Callable[[Tensor], Any]) -> None:
        super().__init__({ADAPTER: nn.Parameter(torch.empty(rows, columns))})
        self.draw = draw
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.draw(self[ADAPTER])


class Magnitude(nn.Module):
    """The trained length of each row of a weight, for DoRA."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows))

    def forward(self) -> Tensor:
        return self.weight.clone()


class AdaptedLayer(nn.Module):
    """The common part of layers with an adapter: of low rank, or trained rows of some tokens (trained_tokens.py)."""

    adapter_parts: tuple[str, ...]
    """The names of the modules and attributes that make up the adapter."""
    has_small_matrices = True
    """Says that a GPU may wait for the host to launch the kernels of so small matrices; see transform/compile.py."""


class LowRankLayer(AdaptedLayer):
    """The common part of layers with an adapter of low rank."""

    scaling: float
    lora_dropout: Any
    lora_A: Any
    lora_B: Any
    lora_magnitude_vector: Any
    lora_embedding_A: Any
    lora_embedding_B: Any


class AdaptedLinear(LowRankLayer):
    """A linear layer with an adapter: base(x) + scaling · B(A(dropout(x))), or DoRA's form of it."""

    sum_over_inputs: Callable[[Tensor], Tensor] | None = None
    """Sums a tensor over the ranks that share the inputs of this layer, if tensor parallelism splits them."""

    def forward(self, x: Tensor) -> Tensor:
        first, second, dropout = self.lora_A[ADAPTER], self.lora_B[ADAPTER], self.lora_dropout[ADAPTER]
        if isinstance(dropout, AdapterDropout) and dropout.drops_fused and not self.lora_magnitude_vector:
            # The operator scales the outputs of A, which are fewer than those of B, unless B has a bias to be scaled.
            early, late = (self.scaling, 1.0) if second.bias is None else (1.0, self.scaling)
            reduced = first(x, dropout.p, early)
            if second.bias is None and getattr(self, "adds_products", False):  # as 4-bit layers do
                updated: Tensor = second(reduced, base=partial(super().forward, x))
                return updated
            update = second(reduced)
        else:
            late = self.scaling
            dropped = dropout(x)
            # Autocast casts by itself; to widen the input first would only cost time.
            inputs = dropped if autocast_dtype(x.device) else dropped.to(first.weight.dtype)
            update = second(first(inputs))
        if late != 1:
            # Not torch.add with alpha: inductor (torch 2.11 to 2.13) makes an addmm of it, without the alpha, where
            # inputs have two dimensions.
            update = update * late
        # The base comes last: a recomputation ends where the last tensor is kept for the backward, which is one of the
        # adapter's, so it does not repeat the base's product in the last layer of a block.
        result: Tensor = super().forward(x)
        if not self.lora_magnitude_vector:
            return (result + update).to(result.dtype)
        # DoRA: m / ‖W + scaling · BA‖ · (W + scaling · BA) x, and the bias. In what it adds to the base's output, PEFT
        # also drops inputs of the base.
        bias = getattr(self, "bias", None)
        base = result if dropped is x else super().forward(dropped)
        if bias is not None:
            base = base - bias
        factor = self.lora_magnitude_vector[ADAPTER]() / self._row_lengths(first(), second())
        return (result + (factor - 1) * base + factor * update).to(result.dtype)

    @torch.no_grad()
    def _row_lengths(self, first: Tensor, second: Tensor) -> Tensor:
        """Returns the length of each row of the adapted weight. No gradient goes through it."""
        with torch.autocast(first.device.type, enabled=False):
            weight = plain_weight(self).to(first.dtype)
            squares = torch.addmm(weight, second, first, alpha=self.scaling).square().sum(1)
            if self.sum_over_inputs is not None:
                squares = self.sum_over_inputs(squares)
            return squares.sqrt()


class AdaptedEmbedding(LowRankLayer):
    """An embedding with an adapter: each token also looks up a row of A, which B widens."""

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = super().forward(tokens)
        first, second = self.lora_embedding_A[ADAPTER], self.lora_embedding_B[ADAPTER]
        update = F.embedding(tokens, first.mT, getattr(self, "padding_idx", None)) @ second.mT
        scale = getattr(self, "embed_scale", 1.0)  # Gemma's embedding multiplies what it finds
        return (result + update * (scale * self.scaling)).to(result.dtype)


def add_to_linear(
    module: nn.Module, rank: int, scaling: float, dropout: float, bias: bool, dora: bool, init: bool | str
) -> None:
    """Gives a linear layer an adapter."""
    in_features, out_features = linear_sizes(module)
    first, second = draws(init, rank)
    attach(
        module,
        AdaptedLinear,
        scaling=scaling,
        lora_dropout=nn.ModuleDict({ADAPTER: AdapterDropout(dropout, rank) if dropout else nn.Identity()}),
        lora_A=nn.ModuleDict({ADAPTER: Factor(in_features, rank, False, first)}),
        lora_B=nn.ModuleDict({ADAPTER: Factor(rank, out_features, bias, second)}),
        lora_magnitude_vector=nn.ModuleDict({ADAPTER: Magnitude(out_features)} if dora else {}),
    )


def add_to_embedding(module: nn.Embedding, rank: int, scaling: float, init: bool | str = True) -> None:
    """Gives an embedding an adapter; with `init` = False its first matrix is not zero."""
    attach(
        module,
        AdaptedEmbedding,
        scaling=scaling,
        lora_embedding_A=EmbeddingFactor(rank, module.num_embeddings, nn.init.zeros_ if init else nn.init.normal_),
        lora_embedding_B=EmbeddingFactor(module.embedding_dim, rank, nn.init.normal_),
    )


def attach(module: Any, kind: type[AdaptedLayer], **parts: Any) -> None:
    """Makes a layer one of an adapted class, and gives it the parts of the adapter: modules and plain attributes."""
    module.__class__ = _adapted_class(type(module), kind)  # type: ignore[arg-type]  # mypy on hashing a type
    module.adapter_parts = tuple(parts)
    for name, part in parts.items():
        setattr(module, name, part.train(module.training) if isinstance(part, nn.Module) else part)


def detach(module: Any) -> None:
    """Takes the adapter off a layer, which then is what it was before."""
    for name in (*module.adapter_parts, "adapter_parts"):
        delattr(module, name)
    module.__class__ = type(module).__bases__[1]


@cache
def _adapted_class(kind: Any, adapted: Any) -> Any:
    """Returns the class of a layer with an adapter; one for each class, so that torch.compile shares graphs."""
    return type(f"Lora{kind.__name__}", (adapted, kind), {})


def is_linear(module: nn.Module) -> bool:
    """Returns whether a module multiplies by one matrix: a Linear, transformers' Conv1D, or a quantised layer."""
    return type(module).__name__ == "Conv1D" or (hasattr(module, "in_features") and hasattr(module, "out_features"))


def linear_sizes(module: Any) -> tuple[int, int]:
    """Returns the numbers of inputs and outputs of a linear layer."""
    if hasattr(module, "in_features"):
        return module.in_features, module.out_features
    in_features, out_features = module.weight.shape  # a Conv1D stores its weight transposed
    return in_features, out_features


def plain_weight(module: Any) -> Tensor:
    """Returns the weight of a linear layer as (outputs, inputs). A quantised layer has a method `dequantise`."""
    if hasattr(module, "dequantise"):
        weight: Tensor = module.dequantise()
        return weight
    weight = module.weight
    return weight if hasattr(module, "in_features") else weight.mT


def draws(init: bool | str, rank: int) -> tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]:
    """Returns the functions that draw the two matrices of an adapter, as PEFT does."""
    if init == "gaussian":
        return lambda weight: nn.init.normal_(weight, std=1 / rank), nn.init.zeros_
    return draw_uniform, nn.init.zeros_ if init else draw_uniform


def draw_uniform(weight: Tensor) -> Tensor:
    """Draws a weight as torch's Linear does."""
    return nn.init.kaiming_uniform_(weight, a=sqrt(5))


def _draw_bias(bias: Tensor, in_features: int) -> None:
    nn.init.uniform_(bias, -1 / sqrt(in_features), 1 / sqrt(in_features))
