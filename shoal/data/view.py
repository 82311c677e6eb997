"""What `shoal data` shows of a recipe's data."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class DataView:
    """Some samples as text, and figures about all of them."""

    samples: list[list[tuple[str, bool]]]
    """Each sample as pieces of text, with whether the tokens of a piece count in the loss."""
    facts: dict[str, str]
    """Figures by name, such as the number of tokens."""
    lengths: list[tuple[int, int, int]] = field(default_factory=list)
    """A histogram of the samples' lengths: (shortest, longest, samples)."""
    titles: list[str] = field(default_factory=list)
    """What stands above each sample; without them samples are numbered."""
