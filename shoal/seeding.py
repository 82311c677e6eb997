"""Random numbers without state: every generator is seeded from where it is used, so checkpoints save no generators.

Dropout is seeded from (seed, step, micro-batch, data-parallel rank). Noise and augmentation of a sample are seeded from
(seed, epoch, sample id), so they are the same in every layout. This holds for the global generators of Python, NumPy
and torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torch import Tensor

_MASK = (1 << 64) - 1
_START = 0x9E3779B97F4A7C15
_PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]
"""The generator behind the functions of the module `random`."""
_seed_python = super(random.Random, _PYTHON).seed
_seed_numpy = np.random.random_sample.__self__.seed  # type: ignore[attr-defined]


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


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seeds the global generators of Python, of NumPy, and of torch for the CPU and this device, by a seed of 63 bits.

    It runs in every micro-batch, so it calls what the usual functions call in the end. `torch.manual_seed` also
    remembers the seed for every kind of device that was never used, each with a traceback, which takes longer than many
    a step; between two steps, when no cache has its code, `np.random.seed` takes twice as long as the method.
    """
    _seed_python(seed)
    _PYTHON.gauss_next = None  # the second number of a pair that `random.gauss` drew
    number = seed >> 31  # torch uses the lower 32 bits for the same algorithm, and would draw the same numbers
    try:
        _seed_numpy(number)
    except TypeError:  # the user has set a bit generator of another kind
        np.random.seed(number)
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


_NUMBER = torch.empty((), dtype=torch.float64, device="cpu")  # to draw into it takes half the time of `torch.rand`


def draw_from_all() -> tuple[float, float, float]:
    """Returns one number from each of the generators that `seed_generators` seeds."""
    return random.random(), np.random.random_sample(), _NUMBER.uniform_().item()


class HostStates:
    """The states of the global generators of Python and NumPy, as they are when it is made.

    NumPy takes 35 µs to read or write a state, so that one is shared by all that are made until NumPy draws.
    """

    _last: tuple[bytes, Any] = b"", None

    def __init__(self) -> None:
        self.python = random.getstate()
        self.numpy_memory = _memory(get_bit_generator())
        memory, state = HostStates._last
        if not memory or memory != self.numpy_memory:
            state = np.random.get_state(legacy=False)
            # The second number of a pair that `np.random.randn` drew is kept outside of the generator's memory.
            HostStates._last = b"" if state["has_gauss"] else self.numpy_memory, state
        self.numpy = state


class GeneratorsKept:
    """A context that gives the global generators their states back (torch's: the one for the CPU), so that what draws
    inside, such as a dataset, does not disturb what is outside. With `start`, Python and NumPy draw from there on.

    NumPy is lent another generator meanwhile, because that is faster than to read and write its state. Of a pair that
    `np.random.randn` drew, a second number that is still waiting is lost.
    """

    _spare: ClassVar = [np.random.MT19937(0)]  # making one takes longer than reading most samples

    def __init__(self, start: HostStates | None = None):
        self._start = start

    def __enter__(self) -> None:
        self._torch, self._python, self._numpy = (
            torch.default_generator.get_state(),
            random.getstate(),
            get_bit_generator(),
        )
        self._lent = self._spare.pop() if self._spare else np.random.MT19937()
        set_bit_generator(self._lent)
        if self._start is not None:
            random.setstate(self._start.python)
            if self._start.numpy["has_gauss"] or _memory(self._lent) != self._start.numpy_memory:
                np.random.set_state(self._start.numpy)

    def __exit__(self, *error: object) -> None:
        set_bit_generator(self._numpy)
        self._spare.append(self._lent)
        random.setstate(self._python)
        torch.default_generator.set_state(self._torch)


def _memory(generator: Any) -> bytes:
    """Returns the memory of a generator of NumPy, to see whether it has moved: 624 words and the place among them."""
    is_usual = type(generator) is np.random.MT19937
    return ctypes.string_at(generator.ctypes.state_address, 625 * 4) if is_usual else b""


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
