"""What happens to samples that are longer than `dataset.max_seq_length`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from shoal.data.instructions.config import TooLong
from shoal.data.instructions.spans import Sample
from shoal.errors import UserError


@dataclass
class Counts:
    """What was done to the records of a set."""

    records: int = 0
    rendered: int = 0
    """Records that the chat template has rendered."""
    divided: int = 0
    """Conversations that became several samples, because the template rewrites earlier turns."""
    truncated: int = 0
    dropped: int = 0
    """Samples that were left out because they were too long, or because no counted token was left."""
    split: int = 0
    """Samples that were split into several."""
    longest: int = 0
    """The number of tokens in the longest sample before it was fitted."""

    def add(self, other: Counts) -> None:
        """Adds the counts of other records."""
        for one in fields(self):
            if one.name != "longest":
                setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))
        self.longest = max(self.longest, other.longest)


def fit(samples: Sequence[Sample], limit: int, policy: TooLong, place: str, counts: Counts) -> list[Sample]:
    """Returns the samples of one record with at most `limit` tokens each, and adds to the counts what was done."""
    fitted = [piece for sample in samples for piece in _fit_one(sample, limit, policy, counts)]
    kept = [sample for sample in fitted if any(sample.counted)]
    if fitted and not kept:
        raise UserError(
            f"dataset.max_seq_length = {limit}: {place} has no counted token left"
            + (" after truncation" if max(len(sample.tokens) for sample in samples) > limit else "")
            + "; raise it, correct the record, or use dataset.too_long: drop or split"
        )
    counts.dropped += len(fitted) - len(kept)
    return kept


def _fit_one(sample: Sample, limit: int, policy: TooLong, counts: Counts) -> list[Sample]:
    length = len(sample.tokens)
    counts.longest = max(counts.longest, length)
    if length <= limit:
        return [sample]
    if policy == "drop":
        counts.dropped += 1
        return []
    if policy == "truncate":
        counts.truncated += 1
        return [Sample(sample.tokens[:limit], sample.counted[:limit])]
    counts.split += 1
    pieces = [_piece(sample, start, limit) for start in range(0, length, limit)]
    return [piece for piece in pieces if any(piece.counted)] or pieces[:1]


def _piece(sample: Sample, start: int, limit: int) -> Sample:
    """Returns a piece of a sample. Its first token is not predicted, so it does not count."""
    tokens, counted = sample.tokens[start : start + limit], sample.counted[start : start + limit]
    return Sample(tokens, [False, *counted[1:]])
