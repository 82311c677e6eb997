"""The size of a BDH."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BDHConfig:
    n_layer: int = 6
    n_embd: int = 256
    dropout: float = 0.1
    n_head: int = 4
    mlp_internal_dim_multiplier: int = 128
    vocab_size: int = 256

    def __post_init__(self) -> None:
        for name in ("n_layer", "n_embd", "n_head", "mlp_internal_dim_multiplier", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it must be at least 0 and below 1")
        neurons = self.mlp_internal_dim_multiplier * self.n_embd
        if neurons % (2 * self.n_head):
            raise ValueError(
                f"mlp_internal_dim_multiplier * n_embd is {neurons}; it must be a multiple of 2 * n_head = "
                f"{2 * self.n_head}, because each head turns its equal share of the neurons in pairs"
            )

    @property
    def neurons_per_head(self) -> int:
        return self.mlp_internal_dim_multiplier * self.n_embd // self.n_head
