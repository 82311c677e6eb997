"""PowerSGD (arXiv:1905.13727): a matrix as the product of two thin ones, by one step of power iteration.

    P = Σ M·Q  ──► orthogonal columns ──► Q = Σ Mᵀ·P ──► ΣM ≈ P·Qᵀ

M is this rank's gradient with its residual, as a matrix with the first dimension as rows. Both sums are all-reduces.
P·(Mᵀ·P)ᵀ is what a rank contributes, so M − P·(Mᵀ·P)ᵀ is what it did not send. The last Q begins the next step (warm
start), so that the two follow the gradient's largest directions over steps. Columns are made orthogonal by Householder
reflections: the classical way divides by zero where a gradient has a lower rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.parallel.compression.method import Exchanged, Method
from shoal.parallel.compression.wire import Wire
from shoal.seeding import mix

_FACTOR = "factor/"


class PowerSGD(Method):
    """Sends (rows + columns) × rank numbers of a matrix; tensors with fewer than two dimensions are left to others."""

    def __init__(self, rank: int, warm_start: bool, min_compression: float, seed: int):
        self.rank, self.warm_start, self.min_compression, self.seed = rank, warm_start, min_compression, seed
        self._factors: dict[str, Tensor] = {}

    def compresses(self, shape: torch.Size) -> bool:
        if len(shape) < 2 or not shape.numel():
            return False
        return shape.numel() >= self.min_compression * self._numel(shape)

    def message_bytes(self, shape: torch.Size, ranks: int) -> float:
        return 2 * (ranks - 1) / ranks * 4 * self._numel(shape)

    def _numel(self, shape: torch.Size) -> int:
        rows, columns = shape[0], shape[1:].numel()
        return (rows + columns) * min(self.rank, rows, columns)

    def exchange(self, tensors: Mapping[str, Tensor], step: int, is_finite: Tensor, wire: Wire) -> dict[str, Exchanged]:
        if not tensors:
            return {}
        device = next(iter(tensors.values())).device
        with wire.coding(device):
            matrices = {name: tensor.flatten(1) for name, tensor in tensors.items()}
            before = {name: self._factor(name, matrix, step) for name, matrix in matrices.items()}
            left = {name: matrix @ before[name] for name, matrix in matrices.items()}
        _sum_together(left, wire)
        with wire.coding(device):
            bases = {name: torch.linalg.qr(factor).Q for name, factor in left.items()}
            mine = {name: matrix.T @ bases[name] for name, matrix in matrices.items()}
            right = {name: factor.clone() for name, factor in mine.items()}
        _sum_together(right, wire)
        with wire.coding(device):
            outcomes = {}
            for name, tensor in tensors.items():
                if self.warm_start:
                    self._factors[name] = torch.where(is_finite, right[name], before[name])
                total = bases[name] @ right[name].T
                unsent = torch.addmm(matrices[name], bases[name], mine[name].T, alpha=-1)
                outcomes[name] = Exchanged(total.view_as(tensor), unsent.view_as(tensor))
            return outcomes

    def _factor(self, name: str, matrix: Tensor, step: int) -> Tensor:
        """Returns the factor of the last step, or one that is drawn by the name of the parameter."""
        if name in self._factors:
            return self._factors[name].to(matrix.device)
        place = (name,) if self.warm_start else (name, step)
        generator = torch.Generator().manual_seed(mix(self.seed, "powersgd", *place))
        drawn = torch.randn(matrix.shape[1], min(self.rank, *matrix.shape), generator=generator)
        return torch.linalg.qr(drawn).Q.to(matrix.device)

    def state(self) -> dict[str, Tensor]:
        return {f"{_FACTOR}{name}": factor for name, factor in self._factors.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        factors = {key.removeprefix(_FACTOR): value for key, value in state.items() if key.startswith(_FACTOR)}
        self._factors = {name: factor.clone() for name, factor in factors.items()}


def _sum_together(factors: dict[str, Tensor], wire: Wire) -> None:
    joined = wire.all_reduce(torch.cat([factor.reshape(-1) for factor in factors.values()]))
    for factor, total in zip(factors.values(), joined.split([f.numel() for f in factors.values()]), strict=True):
        factor.copy_(total.view_as(factor))
