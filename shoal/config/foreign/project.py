"""A file of another project as a config of shoal: what is known of a project, and the steps that all have in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.config.foreign.recognise import has_key, value_of
from shoal.config.foreign.rules import Remark, Rules, Translated, translate
from shoal.config.overrides import COMMAND_LINE, Layer, merge_layers, read_overrides
from shoal.config.yaml import Sources, Tree, find_leaves, is_section

NOT_RESOLVED = "the reference is not resolved here; write its value"


@dataclass(frozen=True)
class Placeholder:
    """A value for a key that a run needs and that files of a project do not have."""

    value: Any
    why: str
    unless: tuple[str, ...] = ()
    """Other keys of ours, each of which makes the placeholder needless."""


@dataclass(frozen=True)
class Project:
    """A project whose files are translated: mainly a table of rules."""

    name: str
    """The name after `--from`; `recognise.py` has the keys by which its files are known."""
    title: str
    rules: Rules
    recipe: str | None = None
    """The recipe of all files, if they have one in common."""
    prepare: Callable[[Tree], Tree] = dict
    """Returns the tree in the form that the rules are written for. It keeps every value."""
    defaults: Callable[[Tree], Mapping[str, Any]] = field(default=lambda tree: {})
    """Returns values by dotted foreign key that the project uses for a key that the file leaves out, as far as they
    change the training and shoal would do something else."""
    missing: Callable[[Tree], Mapping[str, Placeholder]] = field(default=lambda ours: {})
    """Returns for a tree of ours, by dotted key, what is written if neither the file nor the command line sets it."""
    recipe_rules: Rules = field(default_factory=dict)
    """Rules in place of others of the same keys if the command line names the recipe."""


@dataclass(frozen=True)
class Translation:
    """A file of another project in our words."""

    project: Project
    translated: Translated
    unset: tuple[str, ...]
    """The foreign keys whose value is null or empty."""
    defaults: frozenset[str]
    """The foreign keys that the file leaves out and whose defaults are translated."""
    placeholders: Mapping[str, Placeholder]
    """The keys of ours that have a placeholder."""

    @property
    def tree(self) -> Tree:
        return self.translated.tree


def translate_project(tree: Tree, sources: Sources, project: Project, overrides: Sequence[str] = ()) -> Translation:
    """Returns a file of a project in our words. Raises UserError for keys that contradict each other.

    `overrides` are values of ours, such as `recipe=text_lora`; they win over what the file says.
    """
    tree = project.prepare(resolve_references(tree))
    kept, unset, unresolved = _without_unset(tree)
    defaults = {key: value for key, value in project.defaults(kept).items() if _is_free(kept, key)}
    for key, value in defaults.items():
        _set(kept, key, value)
    sources = {**sources, **dict.fromkeys(defaults, f"{project.title}'s default")}
    command_line = read_overrides(overrides)
    rules = {**project.rules, **project.recipe_rules} if "recipe" in command_line.tree else project.rules
    translated = translate(kept, sources, rules)
    remarks = [Remark(key, value, sources.get(key, ""), NOT_RESOLVED) for key, value in unresolved]
    translated = replace(translated, refused=(*translated.refused, *remarks))
    translated = _with_overrides(translated, command_line)
    if project.recipe is not None:
        translated.tree.setdefault("recipe", project.recipe)
    if callbacks := section_of(translated.tree, "callbacks"):  # rules set them by name, and a config has a list
        translated.tree["callbacks"] = [{"name": name, **section_of(callbacks, name)} for name in callbacks]
    placeholders = {
        key: placeholder
        for key, placeholder in project.missing(translated.tree).items()
        if all(_is_free(translated.tree, one) for one in (key, *placeholder.unless))
    }
    for key, placeholder in placeholders.items():
        _set(translated.tree, key, placeholder.value)
    unset = [key for key in unset if key not in defaults]
    return Translation(project, translated, tuple(unset), frozenset(defaults), placeholders)


def _with_overrides(translated: Translated, command_line: Layer) -> Translated:
    """Returns a translation in which the values of the command line are in the place of those of the file."""
    merged = merge_layers([Layer(translated.tree, translated.sources), command_line])
    keys = [*find_leaves(command_line.tree)] if command_line.tree else []
    origins = {key: names for key, names in translated.origins.items() if not _is_replaced(key, keys, merged.tree)}
    replaced = {key: names for key, names in translated.origins.items() if key not in origins}
    remarks = [
        Remark(name, value_of(translated.tree, key), "", f"the command line replaces {key}")
        for key, names in replaced.items()
        for name in names
    ]
    return replace(
        translated,
        tree=merged.tree,
        sources=merged.sources,
        origins={**origins, **dict.fromkeys(keys, (COMMAND_LINE,))},
        notes={key: note for key, note in translated.notes.items() if key in origins},
        idle=(*translated.idle, *remarks),
    )


def _is_replaced(key: str, others: Sequence[str], tree: Tree) -> bool:
    """Returns whether the command line sets a key, a section around it or something inside of it, or removed it."""
    clashes = any(f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.") for other in others)
    return clashes or (key not in {*find_leaves(tree)} and not has_key(tree, key))


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted key and the value of everything that is not a section with something in it."""
    for key, value in tree.items():
        if is_section(value) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def columns(entries: list[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Returns a list of sections as one section of lists: `[{a: 1}, {a: 2, b: 3}]` as `{a: [1, 2], b: [None, 3]}`.

    So every key inside a list has one rule, which gets the values of all entries.
    """
    keys = dict.fromkeys(key for entry in entries for key in entry)
    return {key: [entry.get(key) for entry in entries] for key in keys}


def section_of(tree: Mapping[str, Any], key: str) -> Tree:
    """Returns a section of a tree, or an empty one if something else, or nothing, is there."""
    value = tree.get(key)
    return dict(value) if is_section(value) and value is not None else {}


_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def resolve_references(tree: Tree) -> Tree:
    """Returns a tree in which `${key}` is replaced by the value of that key, as OmegaConf does it.

    A reference that leads nowhere, or in a circle, stays as it is.
    """

    def resolve(value: Any, depth: int = 0) -> Any:
        if isinstance(value, dict):
            return {key: resolve(inner, depth) for key, inner in value.items()}
        if isinstance(value, list):
            return [resolve(inner, depth) for inner in value]
        if not isinstance(value, str) or "${" not in value or depth > 10:
            return value
        if (whole := _REFERENCE.fullmatch(value)) and (found := value_of(tree, whole[1])) is not None:
            return resolve(found, depth + 1) if not isinstance(found, dict | list) else value
        texts = {match[0]: value_of(tree, match[1]) for match in _REFERENCE.finditer(value)}
        for reference, text in texts.items():
            if isinstance(text, str | int | float):
                value = value.replace(reference, str(text))[:10_000]
        return resolve(value, depth + 1)

    return {key: resolve(value) for key, value in tree.items()}


def _without_unset(tree: Tree, prefix: str = "") -> tuple[Tree, list[str], list[tuple[str, Any]]]:
    """Returns a tree without what is null, empty or an unresolved reference, and the keys of these."""
    kept: Tree = {}
    unset: list[str] = []
    unresolved: list[tuple[str, Any]] = []
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if is_section(value) and value:
            inner, inner_unset, inner_unresolved = _without_unset(value, f"{dotted}.")
            unset += inner_unset
            unresolved += inner_unresolved
            if inner:
                kept[key] = inner
        elif value is None or (isinstance(value, dict | list | str) and not value):
            unset.append(dotted)
        elif isinstance(value, str) and "${" in value:
            unresolved.append((dotted, value))
        else:
            kept[key] = value
    return kept, unset, unresolved


def _is_free(tree: Mapping[str, Any], dotted: str) -> bool:
    """Returns whether nothing is set at a dotted key, nor in the place of a section around it."""
    value: Any = tree
    for part in dotted.split("."):
        if value is not None and not isinstance(value, dict):
            return False
        value = (value or {}).get(part)
    return value is None


def _set(tree: Tree, dotted: str, value: Any) -> None:
    """Sets the value of a dotted key."""
    *path, last = dotted.split(".")
    for part in path:
        if tree.get(part) is None:
            tree[part] = {}
        tree = tree[part]
    tree[last] = value
