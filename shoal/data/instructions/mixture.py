"""Mixtures of several sets of samples.

An epoch of a mixture has as many samples as it needs for every set to be seen whole at least once, with the shares that
the weights say. Smaller sets repeat in it. The loader shuffles the epoch, so that which sample comes when depends on
(seed, position) alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def epoch_counts(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Returns how many samples of each set an epoch has: in proportion to the weights, and at least all of each."""
    total = max(size / weight for size, weight in zip(sizes, weights, strict=True))
    return [max(size, round(total * weight)) for size, weight in zip(sizes, weights, strict=True)]


def epoch_samples(sizes: Sequence[int], counts: Sequence[int]) -> NDArray[np.int64]:
    """Returns the samples of an epoch, numbered over all sets one after another. A set repeats until it has its
    count."""
    first = np.cumsum([0, *sizes[:-1]])
    return np.concatenate(
        [start + np.arange(count) % size for start, size, count in zip(first, sizes, counts, strict=True)]
    )
