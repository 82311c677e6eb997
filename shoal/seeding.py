"""Random numbers without state: every generator is seeded from where it is used, so checkpoints save no generators.

Dropout is seeded from (seed, step, micro-batch, data-parallel rank). Noise and augmentation of a sample are seeded from
(seed, epoch, sample id), so they are the same in every layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def mix(*parts: int | str) -> int:
    """Returns one 63-bit seed for several numbers or names, by splitmix64 over the parts."""
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
    """Random numbers for `Recipe.prepare_batch`: row i of every tensor depends only on sample i.

    They are drawn on the CPU and then moved, so that a sample gets the same numbers on every device.
    """

    def __init__(self, seed: int, epochs: Sequence[int], ids: Sequence[int], device: torch.device | str = "cpu"):
        self._generators: list[torch.Generator] | None = None
        self._seed, self._epochs, self._ids, self._device = seed, epochs, ids, device

    def _draw(self, draw_one: Callable[[torch.Generator], Tensor]) -> Tensor:
        """Stacks what each sample's generator draws."""
        if self._generators is None:
            self._generators = [
                torch.Generator().manual_seed(mix(self._seed, "sample", int(epoch), int(sample)))
                for epoch, sample in zip(self._epochs, self._ids, strict=True)
            ]
        return torch.stack([draw_one(generator) for generator in self._generators]).to(self._device)

    def normal(self, *shape: int) -> Tensor:
        """Returns a tensor (samples, *shape) from the standard normal distribution."""
        return self._draw(lambda g: torch.randn(shape, generator=g))

    def uniform(self, *shape: int) -> Tensor:
        """Returns a tensor (samples, *shape), uniform in [0, 1)."""
        return self._draw(lambda g: torch.rand(shape, generator=g))

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Returns a tensor (samples, *shape) of whole numbers in [low, high)."""
        return self._draw(lambda g: torch.randint(low, high, shape, generator=g))
