"""Layers for your own models that know how tensor parallelism splits them.

On one process, or without `distributed.mesh.tp`, they are ordinary layers. `MeshStrategy(mesh={"tp": 2, ...})` and
`distributed.strategy: mesh` split them by their `tensor_style`, as a recipe's plan would; nothing else has to be said.

    class MLP(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.up = ColumnParallelLinear(width, 4 * width)    # each rank computes some of the outputs
            self.down = RowParallelLinear(4 * width, width)     # and sums what the others made of theirs

        def forward(self, x):
            return self.down(self.up(x).relu())
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import UserError


class ColumnParallelLinear(nn.Linear):
    """A Linear of which every rank computes some outputs; layers up to a RowParallelLinear work on those alone."""

    tensor_style = "column"

    def __init__(self, in_features: int, out_features: int, world_size: int | None = None, **options: Any):
        """`world_size` is the number of ranks that share the layer, which the mesh has to have. It may be left out:
        the mesh decides. `options` are those of nn.Linear: bias, device, dtype."""
        super().__init__(in_features, out_features, **options)
        self.world_size = _checked_size(self, world_size, out_features, "out_features")


class RowParallelLinear(nn.Linear):
    """A Linear of which every rank has some inputs; its output is the sum over ranks, on all ranks."""

    tensor_style = "row"

    def __init__(self, in_features: int, out_features: int, world_size: int | None = None, **options: Any):
        """The arguments are those of ColumnParallelLinear."""
        super().__init__(in_features, out_features, **options)
        self.world_size = _checked_size(self, world_size, in_features, "in_features")


class TensorParallelAttention(nn.Module):
    """Self-attention of which each rank computes some heads; its output is the sum over ranks.

    With fewer key and value heads than query heads, each serves a group of query heads.
    """

    tensor_style = "region"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        world_size: int | None = None,
        *,
        num_kv_heads: int | None = None,
        bias: bool = False,
    ):
        """`world_size` is the number of ranks that share the heads, which the mesh has to have; it may be left out."""
        super().__init__()
        num_kv_heads = num_kv_heads or num_heads
        if hidden_size % num_heads or num_heads % num_kv_heads:
            raise ValueError(
                f"TensorParallelAttention: {num_heads} heads have to divide the width {hidden_size} and be a multiple "
                f"of the {num_kv_heads} key/value heads"
            )
        self.world_size = _checked_size(self, world_size, num_kv_heads, "key/value heads")
        self.head_dim = hidden_size // num_heads
        self.group_size = num_heads // num_kv_heads
        kv_size = num_kv_heads * self.head_dim
        self.q_proj = ColumnParallelLinear(hidden_size, hidden_size, world_size, bias=bias)
        self.k_proj = ColumnParallelLinear(hidden_size, kv_size, world_size, bias=bias)
        self.v_proj = ColumnParallelLinear(hidden_size, kv_size, world_size, bias=bias)
        self.o_proj = RowParallelLinear(hidden_size, hidden_size, world_size, bias=bias)

    def forward(self, x: Tensor, is_causal: bool = True) -> Tensor:
        """Takes and returns (batch, time, width)."""
        query = self._heads(self.q_proj(x))
        key, value = (
            self._heads(layer(x)).repeat_interleave(self.group_size, dim=1) for layer in (self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output

    def _heads(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def _checked_size(layer: nn.Module, world_size: Any, number: int, what: str) -> int | None:
    """Returns the world size of a layer; refuses one that does not divide what is split, and other arguments."""
    name = type(layer).__name__
    if isinstance(world_size, bool) or not isinstance(world_size, int | None):
        raise TypeError(f"{name}: the third argument, {world_size!r}, is the world size; write bias={world_size!r}")
    if world_size is not None and (world_size < 1 or number % world_size):
        raise UserError(f"{name}(world_size={world_size}): it does not divide the {number} {what}; change one of them")
    return world_size


def check_world_sizes(model: nn.Module, ranks: int) -> None:
    """Refuses layers that were built for another number of tensor-parallel ranks than the mesh has."""
    for name, module in model.named_modules():
        size = module.world_size if isinstance(module, _LAYERS) else None
        if size not in (None, ranks):
            raise UserError(
                f"{name or 'the model'}: {type(module).__name__}(world_size={size}), but the mesh has tp = {ranks}; "
                f"use MeshStrategy(mesh={{'tp': {size}, ...}}), or leave the world size out"
            )


_LAYERS = (ColumnParallelLinear, RowParallelLinear, TensorParallelAttention)
