"""Reads and writes YAML 1.2, in which `1e-4` is a number and `on` is a text, and finds the line of every value.

A file has limits, so that a wrong one ends in a message at once: of size, of depth, and of the number of values that it
has when its aliases are written out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from shoal.errors import UserError, one_line, printable

MAX_BYTES, MAX_VALUES, MAX_DEPTH, MAX_INT_DIGITS, MAX_KEY_LENGTH = 1_000_000, 50_000, 50, 100, 200
"""The limits of a config file."""

Tree = dict[str, Any]
"""A config as nested dicts."""
Sources = dict[str, str]
"""Where each value was set, such as `run.yaml:3`, by dotted key."""


_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, which is ten times as fast, if it is there


class _Loader(_SafeLoader):
    """Reads scalars as YAML 1.2 does. PyYAML implements YAML 1.1, where `on` is true and `1e-4` is a text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012, PyYAML reads it from the class


for tag, pattern, first_characters in (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", [*"tTfF"]),
    ("int", r"^[-+]?(?:\d[\d_]*|0x[0-9a-fA-F]+)$", [*"-+0123456789"]),
    (
        "float",
        # No two neighbouring parts match the same digits: a long number that is none would take minutes.
        r"^[-+]?(?:(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        [*"-+.0123456789"],
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), first_characters)


def _construct_int(loader: Any, node: yaml.ScalarNode) -> int:
    if len(node.value) > MAX_INT_DIGITS:
        raise _error(node, f"an integer has {len(node.value)} digits; at most {MAX_INT_DIGITS} are allowed")
    return int(loader.construct_yaml_int(node))


def _construct_text(loader: Any, node: yaml.ScalarNode) -> str:
    text = str(loader.construct_yaml_str(node))
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise _error(node, "a text has a null character or half a character, which no file name or terminal can have")
    return text


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:str", _construct_text)

_PLAIN = re.compile(r"^[A-Za-z_./~][\w./+:-]*(?<!:)$", re.ASCII)  # a text that needs no quotes, even inside a list

_WORDS = {"None": "null", "True": "true", "False": "false", "inf": ".inf", "-inf": "-.inf", "nan": ".nan"}


def parse_value(text: str) -> Any:
    """Returns the value of a YAML text, such as the right side of a `key=value` override. Raises YAMLError."""
    with _plain_errors():
        _check_limits(text)
        return yaml.load(text, Loader=_Loader)


def read_yaml(path: Path) -> tuple[Tree, Sources]:
    """Returns the mapping in a file, and the `file:line` of every key in it."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)  # not all of it: a device has no end
        text = data.decode("utf-8").replace("\r\n", "\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "It is not a text in UTF-8"
        reason = reason if isinstance(error, OSError | UnicodeDecodeError) else "The name has a null character"
        raise UserError(f"{_shown(path)} cannot be read: {reason[0].lower()}{reason[1:]}; give a YAML file") from None
    if len(data) > MAX_BYTES:
        raise UserError(f"{path} has more than {MAX_BYTES:,} bytes; a config file is smaller")

    sources: Sources = {}
    try:
        with _plain_errors():
            _check_limits(text)
            loader = _Loader(text)
            node = loader.get_single_node() or yaml.MappingNode("tag:yaml.org,2002:map", [])
            if not isinstance(node, yaml.MappingNode):
                found = "a list" if isinstance(node, yaml.SequenceNode) else f"only {node.value!r:.200}"
                raise UserError(f"{path} should hold `key: value` lines; found {found}")
            return _construct(loader, node, path, "", sources), sources
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        problem = one_line(getattr(error, "problem", None) or error)
        raise UserError(f"{where} does not parse as YAML: {problem}") from None


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Turns what PyYAML raises for a value that contradicts its tag, such as `!!bool 7`, into a YAMLError."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise yaml.YAMLError(f"a value does not fit its tag: {type(error).__name__} {one_line(error)}") from None


def _check_limits(text: str) -> None:
    """Raises YAMLError if a text is too deep, has too many values, or has an alias inside of what it stands for.

    Only events are looked at, because putting values together takes memory for each, and recursion for each level.
    """
    if "\0" in text:
        raise yaml.MarkedYAMLError(problem="a null character", problem_mark=_mark_at(text, text.index("\0")))
    sizes: dict[str, int] = {}  # of the values with an anchor, aliases written out
    open_nodes: list[tuple[str | None, int]] = []  # their anchors, and how many values there were before them
    values = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            if anchor is not None:
                sizes[anchor] = values - before
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in open_nodes):
                raise _error(event, f"the alias *{event.anchor:.100} is inside of the value that it stands for")
            values += sizes.get(str(event.anchor), 1)  # an unknown one is refused when the values are put together
        elif isinstance(event, yaml.NodeEvent):
            if isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((event.anchor, values))
            elif event.anchor is not None:
                sizes[event.anchor] = 1
            values += 1
        if len(open_nodes) > MAX_DEPTH:
            raise _error(event, f"values are nested more than {MAX_DEPTH} deep")
        if values > MAX_VALUES:
            raise _error(event, f"there are more than {MAX_VALUES:,} values, those of aliases counted each time")


def _error(at: Any, problem: str) -> yaml.MarkedYAMLError:
    """Returns an error at the line of a node or an event."""
    return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


def _mark_at(text: str, index: int) -> yaml.Mark:
    return yaml.Mark("", index, text.count("\n", 0, index), 0, None, 0)


def _shown(value: object) -> str:
    """Returns a value as text that can be printed on one line."""
    return printable(str(value))[:300]


def _construct(loader: Any, node: yaml.Node, path: Path, prefix: str, sources: Sources) -> Any:
    """Returns the value of a node, and adds the lines of all keys inside it to `sources`."""
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node, deep=True)
    tree: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        where = f"{path}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise UserError(f"{where}: a key is a {key_node.id}; it should be a text or a number")
        if len(key_node.value) > MAX_KEY_LENGTH:
            raise UserError(
                f"{where}: a key has {len(key_node.value)} characters; at most {MAX_KEY_LENGTH} are allowed"
            )
        key = loader.construct_object(key_node, deep=True)
        dotted = f"{prefix}{key}"
        if key in tree:
            raise UserError(f"{where}: {_shown(dotted)} is given twice")
        tree[key] = _construct(loader, value_node, path, f"{dotted}.", sources)
        sources[dotted] = where
    return tree


def named(dotted: str, sources: Sources) -> str:
    """Returns a key with where it was set, for messages."""
    shown = printable(dotted)[:300]
    return f"{shown} ({sources[dotted]})" if dotted in sources else shown


def is_section(value: Any) -> bool:
    """True for a mapping with text keys. Other mappings, such as a schedule by epoch, are values."""
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def find_leaves(value: Any, dotted: str = "") -> Iterator[str]:
    """Yields the dotted keys of all values that are not sections."""
    if not is_section(value):
        yield dotted
        return
    for key, inner in value.items():
        yield from find_leaves(inner, f"{dotted}.{key}" if dotted else key)


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
