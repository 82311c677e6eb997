"""The section `callbacks` of a config: which callbacks a run has, with their options."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.config.classes import import_class
from shoal.config.validation import fields_of, refuse_unknown, validate
from shoal.config.yaml import Sources, named
from shoal.errors import UserError

CALLBACKS = {
    "early_stopping": "shoal.callbacks.early_stopping:EarlyStopping",
    "ema": "shoal.callbacks.ema:EMA",
    "histograms": "shoal.callbacks.histograms:Histograms",
    "loss_spike": "shoal.callbacks.loss_spike:LossSpike",
    "swa": "shoal.callbacks.swa:SWA",
    "time_limit": "shoal.callbacks.time_limit:TimeLimit",
}
"""The callbacks that have a short name."""


@dataclass(frozen=True)
class CallbackChoice:
    """A callback that the config asks for."""

    name: str
    """Its name in messages and checkpoints: the name in the config, with a number if the config has it twice."""
    kind: type[Any]
    options: Any
    """The callback's `Config`."""

    def build(self) -> Any:
        """Returns a new callback."""
        return self.kind(self.options)


def check_callbacks(
    entries: Sequence[str | dict[str, Any]], sources: Sources, import_from: Path | None = None
) -> tuple[CallbackChoice, ...]:
    """Returns the callbacks in the order of the config. Every mistake is a UserError of one line."""
    key, seen = named("callbacks", sources), Counter[str]()
    choices = []
    for index, entry in enumerate(entries):
        options = dict(entry) if isinstance(entry, dict) else {"name": entry}
        name = options.pop("name", None)
        where = f"{key}: name = {name!r:.200}"
        if name is None:
            raise UserError(f"{key}[{index}] = {entry!r:.200} has no name; write {{name: …, and its options}}")
        kind = import_class(where, name, CALLBACKS, import_from)
        if not isinstance(kind, type) or not hasattr(kind, "Config") or not hasattr(kind, "after_step"):
            raise UserError(f"{where} is not a callback; make it a subclass of shoal.callbacks.Callback")
        prefix = f"callbacks.{name}."
        refuse_unknown(options, fields_of(kind.Config) or {}, sources, f"callback {name}", prefix)
        try:
            checked = validate(kind.Config, options, {})
        except UserError as error:
            raise UserError(f"{prefix}{error}") from None
        seen[name] += 1
        choices.append(CallbackChoice(name if seen[name] == 1 else f"{name}.{seen[name]}", kind, checked))
    return tuple(choices)
