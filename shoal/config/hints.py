"""Finds the key that was probably meant by one that shoal does not know."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from shoal.config.foreign.guide import FSDP, HARDWARE, MODEL, QUANTISATION_SECTIONS
from shoal.config.foreign.rules import Rules
from shoal.config.foreign.words import WORDS

OTHER_WORDS: Rules = {**FSDP, **HARDWARE, **MODEL, **WORDS}
"""What other programs call our keys."""

_MAX_DEPTH = 3

Fields = Mapping[str, Any]
"""The keys of a section."""


def hint_for(key: str, prefix: str, fields: Fields, root: Fields | None, fields_of: Callable[[Any], Any]) -> str:
    """Returns what to write instead of an unknown key, or why there is nothing, or an empty text.

    `fields` are the keys of the section that has it, whose dotted name is `prefix`, and `root` those of a whole config.
    `fields_of` returns the keys of a section, or None for what is none.
    """
    deeper = [f"{prefix}{name}.{key}" for name, one in fields.items() if key in (fields_of(one) or {})]
    if deeper:
        return _did_you_mean(deeper)
    if key in QUANTISATION_SECTIONS and not prefix and "model" in fields:
        return "write its keys into the section model:, such as model.load_in_4bit"
    known = [*_all_keys(root or {}, fields_of)]
    if (rule := OTHER_WORDS.get(key)) is not None and root is not None:
        keys = [one for one in rule.keys if one in known and one != "distributed.strategy"]  # which the others imply
        if keys or not rule.keys:
            return _did_you_mean(keys) or rule.why
    elsewhere = [dotted for dotted in known if dotted.rpartition(".")[2] == key]
    if elsewhere and fields:
        return _did_you_mean(elsewhere[:2])
    near = _short_for(key, fields) or get_close_matches(key, fields, n=1, cutoff=0.5)
    return _did_you_mean([f"{prefix}{name}" for name in near])


def _did_you_mean(keys: Sequence[str]) -> str:
    return f"did you mean {' or '.join(keys)}?" if keys else ""


def _short_for(key: str, fields: Fields) -> list[str]:
    """Returns the keys that this one is short for, by their first words (`dp`) or initials (`lr`)."""
    initials = {name: "".join(word[0] for word in name.split("_") if word) for name in fields}
    return [name for name in fields if len(key) > 1 and (name.startswith(f"{key}_") or initials[name] == key)]


def _all_keys(fields: Fields, fields_of: Callable[[Any], Any], prefix: str = "") -> Iterator[str]:
    """Yields the dotted keys of a section and of those inside of it, as deep as our own go: a user's may be inside of
    themselves."""
    for name, annotation in fields.items():
        yield f"{prefix}{name}"
        if prefix.count(".") < _MAX_DEPTH:
            yield from _all_keys(fields_of(annotation) or {}, fields_of, f"{prefix}{name}.")
