"""Reads a DeepSpeed JSON, compares it with the run, and returns the options of ZeRO that it sets.

`deepspeed_keys.py` has the table of what happens with each key. The values "auto" and null have no effect, because the
run decides; keys that are not in the table are refused.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shoal.config.deepspeed_keys import (
    AUTO,
    SCHEDULE_DEFAULTS,
    TOP,
    ZERO,
    Accept,
    Table,
    idle_keys,
    keys_of_loop,
    keys_of_offload,
    keys_of_run,
)
from shoal.config.schema import TrainingConfig
from shoal.config.schema_distributed import DeepSpeedConfig
from shoal.config.validation import validate
from shoal.config.yaml import MAX_BYTES
from shoal.errors import UserError, as_user_error, printable


@dataclass
class Fitted:
    """The result of reading a DeepSpeed JSON."""

    options: dict[str, Any] = field(default_factory=dict)
    """The keys of `distributed.deepspeed` that the JSON sets."""
    idle: dict[str, str] = field(default_factory=dict)
    """The keys of the JSON that have no effect, and why."""


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the object in a JSON file."""
    where = f"distributed.deepspeed.config_file = {os.fspath(path)!r}"
    invalid = as_user_error(f"{where} is not valid JSON", ValueError, RecursionError)
    with as_user_error(f"{where} cannot be read", OSError), invalid:
        with Path(path).expanduser().open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise UserError(f"{where} has more than {MAX_BYTES:,} bytes; a DeepSpeed JSON is smaller")
        document = _parse(data.decode())
    if not isinstance(document, dict):
        raise UserError(f"{where} holds a {type(document).__name__}; it should hold an object")
    return document


def _parse(text: str) -> Any:
    """Returns the value of a JSON text.

    Comments and trailing commas are allowed if hjson is installed, which DeepSpeed brings and reads its files with.
    """
    try:
        return json.loads(text, object_pairs_hook=_refuse_duplicates)
    except ValueError:
        with suppress(ImportError, ValueError):
            import hjson

            if isinstance(document := hjson.loads(text, object_pairs_hook=_refuse_duplicates), dict):
                return document
        raise


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for key, times in Counter(key for key, _ in pairs).items():
        if times > 1:
            values = " and as ".join(json.dumps(value) for name, value in pairs if name == key)
            raise ValueError(f"{key} is given {times} times, as {values}")
    return dict(pairs)


def fit_json(
    document: Mapping[str, Any],
    training: TrainingConfig | None,
    processes: int,
    where: str,
    mixed_precision: str = "fp32",
) -> Fitted:
    """Returns the options that a JSON sets; raises a UserError if it contradicts the run.

    `where` names the JSON in messages. `training` is None in a hand-written loop, which decides about batches and
    optimizer itself; the JSON is then compared with `mixed_precision` only.
    """
    zero = document.get("zero_optimization")
    if not isinstance(zero, dict):
        raise _refused(
            f"{where}: zero_optimization",
            zero,
            "should be an object with a stage; without ZeRO use distributed.strategy: ddp",
        )
    stage: Any = zero.get("stage")
    if not _is_among(stage, (1, 2, 3)):
        raise _refused(
            f"{where}: zero_optimization.stage",
            stage,
            "is not a stage that splits anything; use 1, 2 or 3, or distributed.strategy: ddp",
        )
    table = {
        **TOP,
        **(keys_of_run(training, processes) if training else keys_of_loop(mixed_precision)),
        "zero_optimization": {
            **ZERO,
            **idle_keys(int(stage)),
            "offload_optimizer": keys_of_offload(zero.get("offload_optimizer"), "offload_optimizer"),
            "offload_param": keys_of_offload(zero.get("offload_param"), "offload_parameters"),
        },
    }
    fitted, names = Fitted(), dict[str, str]()
    for name, value, entry in _entries(document, table, f"{where}: "):
        if isinstance(entry, str):
            fitted.idle[name.removeprefix(f"{where}: ")] = entry
        elif entry.values is not None and not _is_among(value, entry.values):
            raise _refused(name, value, entry.why)
        elif entry.option and (option := entry.convert(value)) is not None:
            section, _, key = entry.option.rpartition(".")
            (fitted.options.setdefault(section, {}) if section else fitted.options)[key] = option
            names[entry.option] = name
    fitted.idle.update(_left_out(document.get("scheduler"), table["scheduler"]))
    for wrong, message in validate(DeepSpeedConfig, fitted.options, names).offload_contradictions():
        if wrong:
            message = message.replace("offload_parameters", "offload_param").replace("zero_stage", "stage")
            raise UserError(f"{where}: zero_optimization.{message}")
    return fitted


def _entries(section: Mapping[str, Any], table: Table, prefix: str) -> Iterator[tuple[str, Any, str | Accept]]:
    """Yields (name, value, entry in the table) for all keys that have a value, also inside objects."""
    for key, value in section.items():
        name, entry = f"{prefix}{printable(key)[:200]}", table.get(key, table.get("*"))
        if entry is None:
            nearest = get_close_matches(str(key), table, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else "leave it out"
            raise UserError(f"{name} is not a DeepSpeed key that shoal knows; {hint}")
        if value is None or value == AUTO:
            continue
        if isinstance(entry, Accept) and isinstance(value, dict) and value.keys() & {*entry.switches}:
            switch = next(key for key in entry.switches if key in value)
            entry, value = {switch: replace(entry, switches=())}, {switch: value[switch]}
        if not isinstance(entry, Mapping):
            yield name, value, entry
        elif isinstance(value, dict):
            yield from _entries(value, entry, f"{name}.")
        else:
            raise _refused(name, value, "should be an object")


def _left_out(scheduler: Any, table: Any) -> Iterator[tuple[str, str]]:
    """Yields the keys that a schedule leaves out and for which DeepSpeed's default contradicts the run."""
    if not isinstance(scheduler, dict) or AUTO in (scheduler.get("type") or AUTO, scheduler.get("params")):
        return
    for key, default in SCHEDULE_DEFAULTS.items():
        entry = table["params"].get(key)
        if entry and key not in (scheduler.get("params") or {}) and not _is_among(default, entry.values):
            yield f"scheduler.params.{key}", f"DeepSpeed's default, {default}, {entry.why}"


def _refused(name: str, value: Any, why: str) -> UserError:
    return UserError(f"{name} = {json.dumps(value, default=str)[:200]} {why}")


def _is_among(value: Any, accepted: tuple[Any, ...]) -> bool:
    """True if one of the accepted values equals the value. Texts match in upper and lower case; true does not match
    1."""
    value = value.lower() if isinstance(value, str) else value
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in accepted)
