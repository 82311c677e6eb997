"""Merges a config file, the bases that it extends and the overrides of the command line; later values win.

Files in Hugging Face's words are translated first: those that follow each other are merged in their words, and then
translated as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from itertools import combinations, count, groupby
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from shoal.config.foreign.guide import defaults_for, from_guide, has_our_sections, is_guide, without_replaced
from shoal.config.foreign.recognise import recognise
from shoal.config.foreign.rules import Remark
from shoal.config.yaml import MAX_DEPTH, Sources, Tree, find_leaves, format_value, is_section, parse_value, read_yaml
from shoal.errors import UserError, one_line, printable

COMMAND_LINE = "command line"
MAX_FILES = 100
"""How many files a config may extend, counted each time: two bases that each have two bases are four, and so on."""
ALTERNATIVES = {
    "training": (("max_steps", "num_epochs"), ("warmup_steps", "warmup_ratio")),
    "lora": (("r", "rank"), ("lora_alpha", "alpha"), ("lora_dropout", "dropout")),
}
"""Keys of a section of which a run has one: to set one on the command line replaces the other one of the file."""


class Layer(NamedTuple):
    """A part of a config: a file, or what the command line or Python code sets."""

    tree: Tree
    sources: Sources
    """Where each value was set, by dotted key."""
    remarks: tuple[Remark, ...] = ()
    """The keys of a file in other words that change nothing."""


def read_with_overrides(path: Path, overrides: Sequence[str]) -> Layer:
    """Returns a file, its bases and the overrides in one."""
    return merge_layers([*read_with_bases(path), read_overrides(overrides)])


def read_overrides(overrides: Sequence[str]) -> Layer:
    """Returns overrides such as `training.max_steps=5` as one layer, in which alternatives contradict."""
    parsed = [_parse_override(override) for override in overrides]
    for (one, layer), (other, its_layer) in combinations(zip(overrides, parsed, strict=True), 2):
        _refuse_overlap((one, layer), (other, its_layer))
        _refuse_overlap((other, its_layer), (one, layer))
    tree: Tree = reduce(merge, (layer.tree for layer in parsed), {})
    return Layer(tree, {key: source for layer in parsed for key, source in layer.sources.items()})


def _refuse_overlap(outer: tuple[str, Layer], inner: tuple[str, Layer]) -> None:
    """Raises UserError if one override sets a value, and the other one a key inside of it: one would be lost."""
    inside = next((key for key in inner[1].sources for whole in outer[1].sources if key.startswith(f"{whole}.")), None)
    if inside is None:
        return
    whole = next(key for key in outer[1].sources if inside.startswith(f"{key}."))
    value, inner_value = _value_at(outer[1].tree, whole), _value_at(inner[1].tree, inside)
    short = {"activation_checkpointing": "mode", "compression": "method"}.get(whole.rpartition(".")[2], "name")
    section: Tree = {short: value} if isinstance(value, str) else {}
    *path, last = inside[len(whole) + 1 :].split(".")
    nested: Tree = {last: inner_value}
    for part in reversed(path):
        nested = {part: nested}
    section |= nested
    raise UserError(
        f"overrides {outer[0]!r:.200} and {inner[0]!r:.200}: the first sets all of {printable(whole)[:100]}, so one of "
        f"them would be lost; write one section: {printable(whole)[:100]}={one_line(format_value(section))[:200]}"
    )


def _value_at(tree: Tree, dotted: str) -> Any:
    return reduce(lambda section, part: section[part], dotted.split("."), tree)


def read_with_bases(path: Path) -> list[Layer]:
    """Returns the bases that a file extends and then the file.

    Files in Hugging Face's words are translated, as one if they follow each other: there, `bf16: false` undoes a
    `bf16: true` of the base. Their defaults come first of all, because what such a file leaves out has the value that
    it would have there.
    """
    read = [Layer(tree, sources) for tree, sources in _read_with_bases(path, (), count())]
    layers: list[Layer] = []
    for ours, group in groupby(read, lambda layer: has_our_sections(layer.tree) and not is_guide(layer.tree)):
        files = [*group]
        is_theirs = not ours and any(is_guide(layer.tree) for layer in files)
        layers += [_translate_as_one(files)] if is_theirs else files
    if layers != read:
        layers.insert(0, Layer(*defaults_for(merge_layers(layers).tree)))
    return layers


def _translate_as_one(files: Sequence[Layer]) -> Layer:
    """Returns files in Hugging Face's words as one layer in ours; the later wins."""
    tree: Tree = {}
    sources: Sources = {}
    for later in files:
        tree, sources = merge(without_replaced(tree, later.tree), later.tree), {**sources, **later.sources}
    return Layer(*from_guide(tree, sources))


def merge_layers(layers: Iterable[Layer]) -> Layer:
    """Returns all layers in one; the later wins."""
    tree: Tree = {}
    sources: Sources = {}
    remarks: tuple[Remark, ...] = ()
    for later in layers:
        tree = merge(_without_alternatives(tree, later.tree), later.tree)
        sources, remarks = {**sources, **later.sources}, remarks + later.remarks
    return Layer(tree, {key: sources[key] for key in find_leaves(tree) if key in sources}, remarks)


def _without_alternatives(tree: Tree, later: Tree) -> Tree:
    """Returns the tree without the keys that a later layer replaces by their alternatives."""
    result = dict(tree)
    for section, pairs in ALTERNATIVES.items():
        old, new = tree.get(section), later.get(section)
        if isinstance(old, dict) and isinstance(new, dict):
            both_ways = [*pairs, *(pair[::-1] for pair in pairs)]
            replaced = {other for key, other in both_ways if new.get(key) is not None and other not in new}
            result[section] = {key: value for key, value in old.items() if key not in replaced}
    return result


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
    if "recipe" not in tree and (projects := recognise(tree)):
        raise UserError(
            f"{path}: it is a file of {projects[0]}, not of shoal; write it as one: shoal translate {path} > run.yaml"
        )
    bases = tree.pop("extends", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise UserError(f"{path}: extends = {bases!r:.200} should be a file name or a list of them")
    for base in bases:
        yield from _read_with_bases(path.parent / base, (*extended_by, real), files)
    yield tree, sources


def _parse_override(override: str) -> Layer:
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
    return Layer(tree, dict.fromkeys(find_leaves(tree), COMMAND_LINE))
