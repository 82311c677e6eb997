"""Validates a tree against pydantic models or dataclasses; every mistake is one line with the key and its source."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, TypeAdapter, ValidationError

from shoal.config.hints import hint_for
from shoal.config.yaml import Sources, Tree, named
from shoal.errors import UserError, one_line


def validate(model: Any, tree: Tree, sources: Sources) -> Any:
    """Returns the model that a tree describes; raises a UserError about the first thing that is wrong."""
    try:
        return TypeAdapter(model).validate_python(tree)
    except ValidationError as error:
        first, *more = error.errors()
        raise UserError(_explain(first, tree, sources) + (f" (and {len(more)} more)" if more else "")) from None


def _explain(error: Any, tree: Tree, sources: Sources) -> str:
    keys: list[str] = []
    value: Any = tree
    for part in error["loc"]:
        with suppress(LookupError, TypeError):  # the location also has union tags, which the tree does not have
            value = value[part]
            keys.append(str(part))
    if error["type"] == "missing":
        return f"{named('.'.join([*keys, str(error['loc'][-1])]), sources)} is missing"
    name, message = named(".".join(keys), sources), error["msg"]
    if error["type"] == "union_tag_invalid":
        name = name if ".".join(keys) in sources else named(".".join([*keys, "name"]), sources)
        tag, names = error["ctx"]["tag"], error["ctx"]["expected_tags"]
        near = get_close_matches(str(tag)[:100], names.replace("'", "").split(", "), n=1)
        return f"{name} = {tag!r:.200} is not one of {names}" + "".join(f"; did you mean {one!r}?" for one in near)
    if error["type"] in ("bool_type", "bool_parsing"):
        message = "should be true or false"
    for prefix in ("Value error, ", "Assertion failed, ", "Input "):
        message = message.removeprefix(prefix)
    # Of a contradiction in a section, `key = value: …`, name the key, which may have been written in other words.
    key = message.partition(" = ")[0]
    if isinstance(value, dict) and (dotted := ".".join([*keys, key])) in sources:
        return f"{named(dotted, sources)}{one_line(message, 600)[len(key) :]}"
    shown = "" if error["type"] == "value_error" or isinstance(value, dict) else f" = {value!r:.200}"
    return f"{name}{shown}: {message[0].lower()}{one_line(message, 600)[1:]}"


def fields_of(annotation: Any, value: Any = None) -> Mapping[str, Any] | None:
    """Returns the annotations of a section's keys: of a pydantic model or a dataclass. None for anything else.

    In a union of several it is the one whose `name` the value has. A mapping is returned as it is.
    """
    if isinstance(annotation, Mapping):
        return annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {name: field.annotation for name, field in annotation.model_fields.items()}
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return get_type_hints(annotation)
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType, Annotated) else ()
    sections = [fields for member in members if (fields := fields_of(member, value)) is not None]
    if len(sections) > 1 and isinstance(value, dict):
        sections = [fields for fields in sections if value.get("name") in get_args(fields.get("name"))]
    return sections[0] if len(sections) == 1 else None


def without_null_sections(tree: Tree, fields: Mapping[str, Any]) -> Tree:
    """Returns the tree without sections that are null, at any depth: they are as if they had been left out."""
    kept: Tree = {}
    for key, value in tree.items():
        inner = fields_of(fields.get(key), value)
        if inner is not None and isinstance(value, dict):
            kept[key] = without_null_sections(value, inner)
        elif value is not None or not _may_be_section(fields.get(key)):
            kept[key] = value
    return kept


def _may_be_section(annotation: Any) -> bool:
    """Returns whether a key takes a section, or one of several sections, such as an optimizer."""
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType, Annotated) else ()
    return fields_of(annotation) is not None or any(map(_may_be_section, members))


def refuse_unknown(
    tree: Tree,
    fields: Mapping[str, Any],
    sources: Sources,
    owner: str,
    prefix: str = "",
    root: Mapping[str, Any] | None = None,
) -> None:
    """Refuses unknown keys at any depth, with the key that was probably meant. `root` has all sections of a config.

    pydantic's own `extra="forbid"` suggests nothing and does not reach into a user's plain models.
    """
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if key not in fields:
            hint = hint_for(str(key), prefix, fields, root, fields_of)
            known = f"{owner} has {', '.join(fields) or 'no such section'}"
            raise UserError(f"{named(dotted, sources)} is not a key; {hint or known}")
        inner = fields_of(fields[key], value)
        if inner is not None and isinstance(value, dict):
            refuse_unknown(value, inner, sources, f"section {dotted}" if inner else owner, f"{dotted}.", root)
        elif inner is not None and not prefix:
            raise UserError(f"{named(dotted, sources)} = {value!r:.200} should be a section of `key: value` lines")
