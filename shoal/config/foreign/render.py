"""Writes a translated file as a config that a person wants to keep: every line names the foreign key it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from shoal.config.foreign.project import Translation, leaves
from shoal.config.foreign.rules import Remark
from shoal.config.yaml import Tree, format_value, is_section
from shoal.errors import printable

WIDTH = 110
"""The length from which on comments are wrapped."""
MAX_VALUE = 500
"""The number of characters of a value in a comment."""


def render(translation: Translation, file_name: str, order: Sequence[str]) -> str:
    """Returns the text of the config. `order` has all dotted keys of a run in the order of a config file."""
    title = translation.project.title
    lines = [f"# Translated from {printable(file_name)} ({title}) by shoal translate."]
    if translation.placeholders:
        keys = ", ".join(translation.placeholders)
        lines += _comment(f"Replace what is marked as PLACEHOLDER before you train: {keys}.")
    if translation.translated.refused:
        refused = [printable(remark.key) for remark in translation.translated.refused]
        more = f" and {len(refused) - 12} more" if len(refused) > 12 else ""
        lines += _comment(f"Without a counterpart, see the end: {', '.join(refused[:12])}{more}.")
    rows = [*_rows(_ordered(translation.tree, order), translation, set())]
    width = min(48, max((len(left) for left, _ in rows), default=0))
    lines += [f"{left:<{width}}  # {right}" if right else left for left, right in rows]
    translated = translation.translated
    lines += _list(f"Keys of {title} without a counterpart", translated.refused)
    lines += _list(f"Keys of {title} that need no key in shoal", translated.idle)
    if translation.unset:
        keys = ", ".join(printable(key) for key in translation.unset)
        lines += ["", *_comment(f"Keys that are null or empty in the file: {keys}.")]
    return "\n".join(lines) + "\n"


def _ordered(tree: Tree, order: Sequence[str]) -> Tree:
    """Returns a tree with its keys in the order of a config file; keys that are not in it come last."""
    places: dict[str, int] = {}
    for place, dotted in enumerate(order):
        parts = dotted.split(".")
        for end in range(1, len(parts) + 1):
            places.setdefault(".".join(parts[:end]), place)

    def sort(section: Tree, prefix: str) -> Tree:
        keys = sorted(section, key=lambda key: places.get(f"{prefix}{key}", len(order)))
        return {
            key: sort(section[key], f"{prefix}{key}.") if is_section(section[key]) else section[key] for key in keys
        }

    return sort(tree, "")


def _rows(tree: Tree, translation: Translation, notes: set[str], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the lines of the config, each with the comment at its end. `notes` are those that were written before."""
    indent = "  " * prefix.count(".")
    # A section that one foreign key sets, such as an optimizer with its options, is written on one line.
    on_one_line = {*translation.translated.origins, *translation.placeholders}
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        name = format_value(key)
        if not prefix:
            yield "", ""
        if is_section(value) and value and dotted not in on_one_line:
            yield f"{indent}{name}:", ""
            yield from _rows(value, translation, notes, f"{dotted}.")
            continue
        note = translation.translated.notes.get(dotted, "")
        if note and note not in notes:
            notes.add(note)
            yield from ((f"{indent}{line}", "") for line in _comment(note))
        yield f"{indent}{name}: {format_value(value)}", _origin(dotted, translation)


def _origin(dotted: str, translation: Translation) -> str:
    """Returns where a value of ours comes from."""
    if dotted in translation.placeholders:
        return f"PLACEHOLDER: {translation.placeholders[dotted].why}"
    inside = (
        name for key, names in translation.translated.origins.items() if key.startswith(f"{dotted}.") for name in names
    )
    names = [*translation.translated.origins.get(dotted, inside)]
    stated = [printable(name) for name in names if name not in translation.defaults]
    defaults = [f"{translation.project.title}'s default of {name}" for name in names if name in translation.defaults]
    return ", ".join([*stated, *defaults])


def _list(title: str, remarks: Sequence[Remark]) -> list[str]:
    """Returns a list of foreign keys with the reason for each, as comments. Keys with the same reason share it."""
    by_reason: dict[str, list[str]] = {}
    for remark in remarks:
        inside = leaves(remark.value) if is_section(remark.value) and remark.value else ()
        values: Mapping[str, Any] = {f"{remark.key}.{key}": value for key, value in inside} or {
            remark.key: remark.value
        }
        for key, value in values.items():
            text = format_value(value)
            shown = text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}…"
            by_reason.setdefault(remark.why, []).append(f"{printable(key)}: {printable(shown)}")
    if not by_reason:
        return []
    lines = ["", f"# {title}:"]
    for reason, entries in by_reason.items():
        if len(entries) == 1 and len(entries[0]) + len(reason) < WIDTH - 10:
            lines.append(f"#   {entries[0]}  ({printable(reason)})")
            continue
        lines += [f"#   {line}" for line in _gathered(entries)]
        lines += [f"#     {line}" for line in wrap(f"({printable(reason)})", WIDTH - 6, break_on_hyphens=False)]
    return lines


def _gathered(entries: Sequence[str]) -> Iterator[str]:
    """Yields lines with as many entries as fit."""
    line = ""
    for entry in entries:
        if line and len(line) + len(entry) > WIDTH - 6:
            yield f"{line},"
            line = ""
        line = f"{line}, {entry}" if line else entry
    yield line


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in wrap(printable(text), WIDTH - 2, break_long_words=False, break_on_hyphens=False)]
