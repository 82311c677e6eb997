"""Tables with more rows than the files have: an embedding or a head for a vocabulary with new tokens.

The row of a new token starts as the mean of the rows of all tokens before it. The sum is taken in float64, row after
row in the order of the file, so that every layout starts from the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.weights.conversion import OpenFiles, Source

_STRETCH = 1 << 22  # numbers that are read at a time


@dataclass(frozen=True)
class AddedRows:
    """Which rows of a table are new; a manifest can hold it.

    A vocabulary is often padded, so that the files may have rows for the new tokens already. Nobody has trained these,
    and they get the mean, too.
    """

    first: int
    """The first new row. The rows before it are those that the mean is taken of."""
    stop: int
    """The row after the last new one."""
    rows: int
    """The number of rows in all; those from `stop` on are padding, as in the files."""

    def __call__(self, table: Tensor) -> Tensor:
        """Returns the table with its new rows, in float32."""
        result = table.float().new_empty((self.rows, *table.shape[1:]))
        kept = min(len(table), self.rows)
        result[:kept] = table[:kept].float()
        result[self.first : self.stop] = mean_row(lambda start, stop: table[start:stop], self.first, table.shape[1:])
        return result

    def as_json(self) -> dict[str, Any]:
        """Returns the entry of a manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, about: Mapping[str, Any], stored_rows: int) -> AddedRows:
        """Returns what an entry says; the inverse of `as_json`. Raises ValueError for impossible claims.

        `stored_rows` is the number of rows in the file.
        """
        sizes = [about[key] for key in ("first", "stop", "rows")]
        if not all(type(size) is int for size in sizes):
            raise ValueError(f"the added rows {sizes!r:.100} are not numbers")
        first, stop, rows = sizes
        if not 0 < first <= stored_rows or not first < stop <= 2 * first or rows != max(stored_rows, stop):
            raise ValueError(f"the added rows {sizes!r:.100} do not fit a table of {stored_rows} rows")
        return cls(first, stop, rows)


@dataclass(frozen=True)
class AddedRowsSource(Source):
    """A table in the files, with new rows."""

    parts: tuple[Source]
    added: AddedRows

    def meta(self, files: OpenFiles) -> Tensor:
        stored = self.parts[0].meta(files)
        if not self.added.first <= len(stored) <= self.added.rows:
            raise RuntimeError(f"it has {len(stored)} rows, for a tokenizer of {self.added.first} tokens")
        return torch.empty((self.added.rows, *stored.shape[1:]), device="meta")

    def fill(self, out: Tensor, box: Sequence[slice], files: OpenFiles) -> None:
        rows, (source,) = box[0], self.parts
        shape = source.meta(files).shape
        for start, stop in ((0, self.added.first), (self.added.stop, shape[0])):
            begin, end = max(rows.start, start), min(rows.stop, stop)
            if begin < end:
                source.fill(out[begin - rows.start : end - rows.start], [slice(begin, end), *box[1:]], files)
        begin, end = max(rows.start, self.added.first), min(rows.stop, self.added.stop)
        if begin < end:

            def read(start: int, stop: int) -> Tensor:
                part = torch.empty(stop - start, *shape[1:])
                source.fill(part, [slice(start, stop), *(slice(0, size) for size in shape[1:])], files)
                return part

            mean = mean_row(read, self.added.first, shape[1:])
            out[begin - rows.start : end - rows.start] = mean[tuple(box[1:])].to(out.dtype)


@dataclass(frozen=True)
class Rows(Source):
    """Some rows of one tensor, in any order."""

    parts: tuple[Source]
    indices: tuple[int, ...]

    def combine(self, *parts: Tensor) -> Tensor:
        return parts[0][list(self.indices)]

    def meta(self, files: OpenFiles) -> Tensor:
        return torch.empty((len(self.indices), *self.parts[0].meta(files).shape[1:]), device="meta")

    def fill(self, out: Tensor, box: Sequence[slice], files: OpenFiles) -> None:
        for place, index in enumerate(self.indices[box[0]]):
            self.parts[0].fill(out[place : place + 1], [slice(index, index + 1), *box[1:]], files)


def mean_row(read: Callable[[int, int], Tensor], rows: int, shape: Sequence[int]) -> Tensor:
    """Returns the mean of a table's first rows in float32. `read(start, stop)` returns some of them."""
    total = torch.zeros(*shape, dtype=torch.float64)
    for start, stop in _stretches(rows, max(1, _STRETCH // max(1, total.numel()))):
        # cumsum adds rows one after another; sum would add them in an order that depends on their number
        total += read(start, stop).to("cpu", torch.float64).cumsum(0)[-1]
    return (total / rows).float()


def _stretches(rows: int, step: int) -> Iterator[tuple[int, int]]:
    for start in range(0, rows, step):
        yield start, min(start + step, rows)
