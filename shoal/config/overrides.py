"""Merges a config file, the bases that it extends and the overrides of the command line; later values win."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from shoal.config.yaml import MAX_DEPTH, Sources, Tree, is_section, parse_value, read_yaml
from shoal.errors import UserError, one_line

COMMAND_LINE = "command line"
MAX_FILES = 100
"""How many files a config may extend, counted each time: two bases that each have two bases are four, and so on."""


def read_with_overrides(path: Path, overrides: Sequence[str]) -> tuple[Tree, Sources]:
    """Returns the merged tree, and where each of its values came from by dotted key."""
    tree: Tree = {}
    sources: Sources = {}
    for later, later_sources in (*read_with_bases(path), *map(parse_override, overrides)):
        tree, sources = merge(tree, later), {**sources, **later_sources}
    return tree, {key: sources[key] for key in find_leaves(tree) if key in sources}


def read_with_bases(path: Path) -> Iterator[tuple[Tree, Sources]]:
    """Yields the bases that a file extends and then the file, each with where its values came from."""
    return _read_with_bases(path, (), count())


def merge(tree: Tree, later: Tree) -> Tree:
    """Returns both trees in one. Sections merge key by key; of other values the later wins."""
    sections = {
        key: merge(tree[key], new) for key, new in later.items() if is_section(new) and is_section(tree.get(key))
    }
    return {**tree, **later, **sections}


def _read_with_bases(path: Path, extended_by: tuple[Path, ...], files: Iterator[int]) -> Iterator[tuple[Tree, Sources]]:
    """Yields the bases of a file in their order, each after its own bases, and then the file. `files` counts them."""
    if next(files) > MAX_FILES:
        raise UserError(f"{path}: `extends` leads to more than {MAX_FILES} files; write their keys into one")
    real = path.resolve() if "\0" not in str(path) else path
    if real in extended_by:
        raise UserError(f"{path}: `extends` goes in a circle: {' → '.join(map(str, (*extended_by, real)))}")
    tree, sources = read_yaml(path)
    bases = tree.pop("extends", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise UserError(f"{path}: extends = {bases!r:.200} should be a file name or a list of them")
    for base in bases:
        yield from _read_with_bases(path.parent / base, (*extended_by, real), files)
    yield tree, sources


def parse_override(override: str) -> tuple[Tree, Sources]:
    """Returns `training.max_steps=5` as a tree."""
    key, equals, text = override.partition("=")
    key = key.strip()  # "training.max_steps = 5"
    if not equals or not key:
        raise UserError(f"override {override!r:.200} should have the form section.key=value")
    if key.count(".") >= MAX_DEPTH:
        raise UserError(f"override {override!r:.200} names a key that is nested more than {MAX_DEPTH} deep")
    try:
        tree = parse_value(text)
    except yaml.YAMLError as error:
        problem = one_line(getattr(error, "problem", None) or error)
        raise UserError(
            f"override {override!r:.200}: the value does not parse as YAML ({problem}); quote it if it is text"
        ) from None
    for part in reversed(key.split(".")):
        tree = {part: tree}
    return tree, dict.fromkeys(find_leaves(tree), COMMAND_LINE)


def find_leaves(value: Any, dotted: str = "") -> Iterator[str]:
    """Yields the dotted keys of all values that are not sections."""
    if not is_section(value):
        yield dotted
        return
    for key, inner in value.items():
        yield from find_leaves(inner, f"{dotted}.{key}" if dotted else key)
