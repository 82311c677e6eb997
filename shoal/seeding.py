"""Stateless randomness: every draw follows from a seed and where it belongs, so nothing is saved.

Draws that belong to a place in the run (dropout) are seeded from (seed, step, micro-batch, data rank);
draws that belong to a sample (noise, augmentation) from (seed, epoch, sample id), so they are the same
on every layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def mix(*parts: int | str) -> int:
    """One well-mixed 63-bit seed out of several numbers or names (splitmix64 over the parts)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        if isinstance(part, str):
            part = int.from_bytes(hashlib.blake2b(part.encode(), digest_size=8).digest(), "little")
        state = (state ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


class SampleRng:
    """Per-sample randomness for `Recipe.prepare_batch`: row i of every draw depends only on sample i.

    Drawn on the CPU, so that a sample gets the same numbers whatever device trains on it.
    """

    def __init__(self, seed: int, epochs: Sequence[int], ids: Sequence[int], device: torch.device | str = "cpu"):
        self._generators: list[torch.Generator] | None = None
        self._seed, self._epochs, self._ids, self._device = seed, epochs, ids, device

    def _draw(self, one: Callable[[torch.Generator], Tensor]) -> Tensor:
        if self._generators is None:
            self._generators = [
                torch.Generator().manual_seed(mix(self._seed, "sample", int(epoch), int(sample)))
                for epoch, sample in zip(self._epochs, self._ids, strict=True)
            ]
        return torch.stack([one(generator) for generator in self._generators]).to(self._device)

    def normal(self, *shape: int) -> Tensor:
        """(samples, *shape) from the standard normal distribution."""
        return self._draw(lambda g: torch.randn(shape, generator=g))

    def uniform(self, *shape: int) -> Tensor:
        """(samples, *shape) uniform in [0, 1)."""
        return self._draw(lambda g: torch.rand(shape, generator=g))

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """(samples, *shape) whole numbers in [low, high)."""
        return self._draw(lambda g: torch.randint(low, high, shape, generator=g))
