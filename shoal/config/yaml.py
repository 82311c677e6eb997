"""Reads and writes config files, with the bases that they extend and the overrides of the command line.

They are YAML 1.2, in which `1e-4` is a number and `on` is a text. The line of every value is kept for messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from shoal.errors import UserError

Tree = dict[str, Any]
"""A config as nested dicts."""
Sources = dict[str, str]
"""Where each value was set, such as `run.yaml:3`, by dotted key."""
COMMAND_LINE = "command line"
"""The source of values that were set by an override."""


class _Loader(yaml.SafeLoader):
    """Reads scalars as YAML 1.2 does. PyYAML implements YAML 1.1, where `on` is true and `1e-4` is a text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012, PyYAML reads it from the class


for tag, pattern, first_characters in (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", [*"tTfF"]),
    ("int", r"^[-+]?(?:\d[\d_]*|0x[0-9a-fA-F]+)$", [*"-+0123456789"]),
    (
        "float",
        r"^[-+]?(?:(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        [*"-+.0123456789"],
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), first_characters)


_PLAIN = re.compile(r"^[A-Za-z_./~][\w./+:-]*(?<!:)$", re.ASCII)  # a text that needs no quotes, even inside a list

_WORDS = {"None": "null", "True": "true", "False": "false", "inf": ".inf", "-inf": "-.inf", "nan": ".nan"}


def read_with_overrides(path: Path, overrides: Sequence[str]) -> tuple[Tree, Sources]:
    """Returns the merged tree, and where each of its values came from by dotted key."""
    tree: Tree = {}
    sources: Sources = {}
    for later, later_sources in (*_read_with_bases(path, ()), *map(_parse_override, overrides)):
        tree, sources = merge(tree, later), {**sources, **later_sources}
    return tree, {key: sources[key] for key in _leaves(tree) if key in sources}


def merge(tree: Tree, later: Tree) -> Tree:
    """Returns both trees in one. Sections merge key by key; of other values the later wins."""
    sections = {
        key: merge(tree[key], new) for key, new in later.items() if is_section(new) and is_section(tree.get(key))
    }
    return {**tree, **later, **sections}


def _read_with_bases(path: Path, extended_by: tuple[Path, ...]) -> Iterator[tuple[Tree, Sources]]:
    """Yields the bases of a file in their order, each after its own bases, and then the file."""
    real = path.resolve()
    if real in extended_by:
        raise UserError(f"{path}: `extends` goes in a circle: {' → '.join(map(str, (*extended_by, real)))}")
    tree, sources = read_yaml(path)
    bases = tree.pop("extends", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise UserError(f"{path}: extends = {bases!r} should be a file name or a list of them")
    for base in bases:
        yield from _read_with_bases(path.parent / base, (*extended_by, real))
    yield tree, sources


def _parse_override(override: str) -> tuple[Tree, Sources]:
    """Returns `training.max_steps=5` as a tree."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {override!r} should have the form section.key=value")
    try:
        tree = parse_value(text)
    except yaml.YAMLError:
        raise UserError(f"override {override!r}: the value does not parse as YAML; quote it if it is text") from None
    for part in reversed(key.split(".")):
        tree = {part: tree}
    return tree, dict.fromkeys(_leaves(tree), COMMAND_LINE)


def _leaves(value: Any, dotted: str = "") -> Iterator[str]:
    """Yields the dotted keys of all values that are not sections."""
    if not is_section(value):
        yield dotted
        return
    for key, inner in value.items():
        yield from _leaves(inner, f"{dotted}.{key}" if dotted else key)


def parse_value(text: str) -> Any:
    """Returns the value of a YAML text, such as the right side of a `key=value` override."""
    return yaml.load(text, Loader=_Loader)


def read_yaml(path: Path) -> tuple[Tree, Sources]:
    """Returns the mapping in a file, and the `file:line` of every key in it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "It is not a text in UTF-8"
        raise UserError(f"{path} cannot be read: {reason[0].lower()}{reason[1:]}; give a YAML file") from None

    sources: Sources = {}
    try:
        loader = _Loader(text)
        node = loader.get_single_node() or yaml.MappingNode("tag:yaml.org,2002:map", [])
        if not isinstance(node, yaml.MappingNode):
            found = "a list" if isinstance(node, yaml.SequenceNode) else f"only {node.value!r}"
            raise UserError(f"{path} should hold `key: value` lines; found {found}")
        return _construct(loader, node, path, "", sources), sources
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        raise UserError(f"{where} does not parse as YAML: {getattr(error, 'problem', None) or error}") from None


def _construct(loader: _Loader, node: yaml.Node, path: Path, prefix: str, sources: Sources) -> Any:
    """Returns the value of a node, and adds the lines of all keys inside it to `sources`."""
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node, deep=True)
    tree: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        dotted, where = f"{prefix}{key}", f"{path}:{key_node.start_mark.line + 1}"
        if key in tree:
            raise UserError(f"{where}: {dotted} is given twice")
        tree[key] = _construct(loader, value_node, path, f"{dotted}.", sources)
        sources[dotted] = where
    return tree


def is_section(value: Any) -> bool:
    """True for a mapping with text keys. Other mappings, such as a schedule by epoch, are values."""
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def flatten(tree: Tree, prefix: str = "") -> Tree:
    """Returns the values of a nested mapping by dotted key."""
    flat: Tree = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def format_value(value: Any) -> str:
    """Returns a value as one line of YAML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{format_value(k)}: {format_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(format_value, value)) + "]"
    if not isinstance(value, str):
        return _WORDS.get(str(value), str(value))
    plain = _PLAIN.match(value) and parse_value(value) == value
    return value if plain else yaml.safe_dump(value, default_style='"', width=10**9, allow_unicode=True).strip()
