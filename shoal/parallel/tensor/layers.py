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

import torch.nn.functional as F
from torch import Tensor, nn


class ColumnParallelLinear(nn.Linear):
    """A Linear of which every rank computes some outputs; layers up to a RowParallelLinear work on those alone."""

    tensor_style = "column"


class RowParallelLinear(nn.Linear):
    """A Linear of which every rank has some inputs; its output is the sum over ranks, on all ranks."""

    tensor_style = "row"


class TensorParallelAttention(nn.Module):
    """Self-attention of which each rank computes some heads; its output is the sum over ranks.

    With fewer key and value heads than query heads, each serves a group of query heads.
    """

    tensor_style = "region"

    def __init__(self, width: int, num_heads: int, num_kv_heads: int | None = None, bias: bool = False) -> None:
        super().__init__()
        num_kv_heads = num_kv_heads or num_heads
        if width % num_heads or num_heads % num_kv_heads:
            raise ValueError(
                f"TensorParallelAttention: {num_heads} heads have to divide the width {width} and be a multiple of "
                f"the {num_kv_heads} key/value heads"
            )
        self.head_dim = width // num_heads
        self.group_size = num_heads // num_kv_heads
        self.q_proj = ColumnParallelLinear(width, width, bias=bias)
        self.k_proj = ColumnParallelLinear(width, num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = ColumnParallelLinear(width, num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = RowParallelLinear(width, width, bias=bias)

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
