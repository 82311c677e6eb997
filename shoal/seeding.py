"""Random numbers without state: every generator is seeded from where it is used, so checkpoints save no generators.

Dropout is seeded from (seed, step, micro-batch, data-parallel rank). Noise and augmentation of a sample are seeded from
(seed, epoch, sample id), so they are the same in every layout. This holds for the global generators of Python, NumPy
and torch, and for every sample and forward, whether or not it draws: what draws nothing today may draw tomorrow.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torch import Tensor

_MASK = (1 << 64) - 1
_START = 0x9E3779B97F4A7C15


def mix(*parts: int | str) -> int:
    """Returns one 63-bit seed for several numbers or names, by splitmix64 over the parts."""
    return _fold(_START, parts) >> 1


def mix_after(*first_parts: int | str) -> Callable[..., int]:
    """Returns a function of further parts that gives what `mix` gives for all of them."""
    start = _fold(_START, first_parts)
    return lambda *parts: _fold(start, parts) >> 1


def _fold(state: int, parts: Sequence[int | str]) -> int:
    for part in parts:
        if isinstance(part, str):
            part = int.from_bytes(hashlib.blake2b(part.encode(), digest_size=8).digest(), "little")
        state = (state ^ (part & _MASK)) + _START & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def seed_generators(seed: int) -> None:
    """Seeds the global generators of Python, of NumPy, and of torch for the CPU, by a seed of 63 bits.

    Not by `torch.manual_seed`: that also remembers the seed for every kind of device that was never used, each with a
    traceback, which takes longer than many a step.
    """
    random.seed(seed)
    np.random.seed(seed >> 31)  # torch uses the lower 32 bits for the same algorithm, and would draw the same numbers
    torch.default_generator.manual_seed(seed)


_scratch = np.random.MT19937(0)  # made once, because making one takes longer than reading most samples


@contextmanager
def generators_kept() -> Iterator[None]:
    """Gives the global generators their states back afterwards, so that reading data does not disturb its caller.

    NumPy lends another generator instead, because reading its state and writing it back takes 70 µs. Of the pairs in
    which `np.random.randn` draws, a second number that is still waiting is lost.
    """
    python_state, torch_state, numpy_generator = random.getstate(), torch.get_rng_state(), get_bit_generator()
    set_bit_generator(_scratch)
    try:
        yield
    finally:
        set_bit_generator(numpy_generator)
        random.setstate(python_state)
        torch.set_rng_state(torch_state)


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
