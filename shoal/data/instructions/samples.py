"""Datasets of prepared samples: one by one, or packed; and how they become a batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.token_cache import open_tokens
from shoal.errors import UserError
from shoal.types import IGNORED_LABEL

_MULTIPLE = 8
"""Batches are padded to a multiple of this: matrix units of GPUs work on tiles of 8."""


class SampleSet:
    """The samples of one set, mapped from its files: tokens, whether each counts, and where samples begin."""

    def __init__(self, stem: Path):
        self.stem = stem

    def _open(self, part: str) -> NDArray[Any]:
        path = set_file(self.stem, part)
        if (array := open_tokens(path)) is None:
            raise UserError(f"dataset.cache_dir: {path} is missing or damaged; start again to prepare the data")
        return array

    @cached_property
    def tokens(self) -> NDArray[Any]:
        return self._open("tokens")

    @cached_property
    def counted(self) -> NDArray[Any]:
        return self._open("counted")

    @cached_property
    def bounds(self) -> NDArray[Any]:
        return self._open("bounds")

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without the arrays: a worker maps the files itself instead of receiving copies."""
        return {"stem": self.stem}

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.bounds).astype(np.int64)

    def sample(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns the tokens of a sample, and for each whether it counts."""
        start, end = self.bounds[index : index + 2]
        return self.tokens[start:end].astype(np.int64), self.counted[start:end].astype(bool)


def set_file(stem: Path, part: str) -> Path:
    """Returns the file with one array of a set."""
    return stem.with_name(f"{stem.name}.{part}.npy")


class Samples:
    """A dataset with one sample for each index; `order` lists the samples of an epoch, numbered over all sets."""

    def __init__(self, sets: Sequence[SampleSet], order: NDArray[np.int64] | None = None):
        self.sets, self.order = list(sets), order
        self._ends = np.cumsum([len(one) for one in sets])

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.order is None else len(self.order)

    def lengths(self) -> NDArray[np.int64]:
        """Returns the number of tokens of each sample."""
        lengths = np.concatenate([one.lengths() for one in self.sets])
        return lengths if self.order is None else lengths[self.order]

    def tokens(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns the tokens of a sample, and for each whether it counts."""
        number = int(index if self.order is None else self.order[index])
        owner = int(np.searchsorted(self._ends, number, side="right"))
        return self.sets[owner].sample(number - (int(self._ends[owner - 1]) if owner else 0))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        tokens, counted = self.tokens(index)
        return {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(_labels(tokens, counted))}


def _labels(tokens: NDArray[np.int64], counted: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Returns for each token the next one if that counts. The last token of a sample predicts nothing."""
    labels = np.full(len(tokens), IGNORED_LABEL, np.int64)
    labels[:-1] = np.where(counted[1:], tokens[1:], IGNORED_LABEL)
    return labels


class Packs:
    """A dataset of packs: each is a sequence of `capacity` tokens with several samples, one after another.

    `starts` of a pack has the positions at which its samples begin, and the padding after them. All packs have equally
    many; those that are not needed are `capacity`.
    """

    def __init__(
        self,
        samples: Samples,
        members: NDArray[np.int64],
        bounds: NDArray[np.int64],
        capacity: int,
        filler: int,
    ):
        self.samples, self.members, self.bounds = samples, members, bounds
        self.capacity, self.filler = capacity, filler
        self._most = int(np.diff(bounds).max()) + 1

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        tokens = np.full(self.capacity, self.filler, np.int64)
        labels = np.full(self.capacity, IGNORED_LABEL, np.int64)
        starts = np.full(self._most, self.capacity, np.int32)
        at = 0
        for number, member in enumerate(self.members[self.bounds[index] : self.bounds[index + 1]].tolist()):
            ids, counted = self.samples.tokens(member)
            tokens[at : at + len(ids)], labels[at : at + len(ids)] = ids, _labels(ids, counted)
            starts[number] = at
            at += len(ids)
            starts[number + 1] = at  # of the next sample, or of the padding
        return {
            name: torch.from_numpy(a) for name, a in (("input_ids", tokens), ("labels", labels), ("starts", starts))
        }

    def fill(self) -> float:
        """Returns the fraction of positions with real tokens."""
        return float(self.samples.lengths()[self.members].sum() / (len(self) * self.capacity))


def collate_samples(samples: Sequence[dict[str, Tensor]], filler: int, limit: int, to_limit: bool) -> dict[str, Tensor]:
    """Returns a batch: packs as they are, and samples padded at their ends to the longest, or to the limit.

    No mask is needed: in a causal model no token attends to padding that follows it.
    """
    if "starts" in samples[0]:
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    longest = max(len(sample["input_ids"]) for sample in samples)
    length = limit if to_limit else min(limit, -(-longest // _MULTIPLE) * _MULTIPLE)
    batch = {}
    for name, value in (("input_ids", filler), ("labels", IGNORED_LABEL)):
        batch[name] = torch.full((len(samples), length), value)
        for row, sample in enumerate(samples):
            batch[name][row, : len(sample[name])] = sample[name]
    return batch
