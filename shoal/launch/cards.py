"""What has to be equal on all machines of a run, and the line that says what is not."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import socket
from dataclasses import dataclass
from typing import Any

import shoal
from shoal.config import Run
from shoal.config.yaml import flatten
from shoal.errors import UserError

_MAY_DIFFER = ("launch.node_rank", "launch.master_addr", "launch.env", "launch.target")
"""The keys, or sections, that say something about one machine alone."""


@dataclass(frozen=True)
class Card:
    """The versions and the config that a machine runs with."""

    host: str
    versions: dict[str, str]
    keys: dict[str, Any]

    def to_json(self) -> str:
        return json.dumps([self.host, self.versions, self.keys], default=str)


def card_of(run: Run) -> Card:
    """Returns the card of this machine."""
    versions = {
        "shoal": shoal.__version__,
        "torch": importlib.metadata.version("torch"),
        "python": ".".join(platform.python_version_tuple()[:2]),
    }
    keys = {key: value for key, value in flatten(run.tree()).items() if not key.startswith(_MAY_DIFFER)}
    return Card(socket.gethostname(), versions, json.loads(json.dumps(keys, default=str)))


def check_equal(card: Card, first_json: str) -> None:
    """Raises UserError about the first version or key that differs from those of the first machine's card."""
    first = Card(*json.loads(first_json))
    for ours, theirs, advice in (
        (card.versions, first.versions, "install the same versions on every machine"),
        (card.keys, first.keys, "use the same config on every machine"),
    ):
        for name in dict.fromkeys([*ours, *theirs]):
            if ours.get(name) != theirs.get(name):
                raise UserError(
                    f"{name} = {ours.get(name)!r:.200} on this machine ({card.host}): the first one ({first.host}) has "
                    f"{theirs.get(name)!r:.200}; {advice}, or another port if they are two runs"
                )
