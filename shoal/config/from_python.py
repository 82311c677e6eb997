"""Makes a run of what Python code hands over: a file or a dict, sections as keyword arguments, a recipe."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from shoal.config.importable import NOT_IMPORTABLE, config_of, is_built_from_config, recorded_name
from shoal.config.overrides import Layer, merge, merge_layers, read_with_bases
from shoal.config.run import RECIPE_SECTIONS, RECIPES, Run, check_run, name_after_file
from shoal.config.schema import LoaderConfig
from shoal.config.validation import validate
from shoal.config.yaml import MAX_DEPTH, Sources, Tree, find_leaves, flatten, named
from shoal.errors import UserError

ConfigLike = str | os.PathLike[str] | Mapping[str, Any] | None
"""A config file, the content of one, or nothing."""


def run_from_python(config: ConfigLike, recipe: Any, sections: Mapping[str, Any], caller: str) -> Run:
    """Returns the run of a config file or dict with sections merged over it; every mistake is a UserError of one line.

    Keys of `sections` may be dotted. `recipe` is a name as in a config file, a class, or an object; None leaves it to
    the config. `caller` is the source of all values that do not come from a file.
    """
    tree, sources, remarks = merge_layers(_layers(config, sections, caller))
    folder = None
    if isinstance(config, str | os.PathLike):
        folder = Path(config).parent
        name_after_file(tree, sources, Path(config))
    if recipe is not None:
        tree["recipe"], sources["recipe"] = recipe, caller
    recipe = tree.get("recipe")
    if recipe is None or isinstance(recipe, str):
        return check_run(tree, _used(sources, tree), folder, remarks=remarks)
    _check_recipe(recipe)
    tree["recipe"], sources["recipe"] = recipe_name(recipe), caller  # also if it came in a dict
    if not isinstance(recipe, type):
        _check_sections(recipe, tree, sources)
        built = _sections_of(recipe)
        tree, sources = merge(tree, built), {**dict.fromkeys(find_leaves(built), caller), **sources}
    return check_run(tree, _used(sources, tree), folder, recipe, remarks=remarks)


def recipe_name(recipe: Any) -> str:
    """Returns the recorded name of a recipe, which is a class or an object: short for those that shoal ships."""
    kind = recipe if isinstance(recipe, type) else type(recipe)
    for short, path in RECIPES.items():
        module, _, name = path.partition(":")
        if kind.__name__ == name and f"{kind.__module__}.".startswith(f"{module}."):
            return short
    name = recorded_name(kind)
    if kind is recipe or name.startswith(NOT_IMPORTABLE) or is_built_from_config(recipe):
        return name
    return NOT_IMPORTABLE + name.replace(":", ".")


def _layers(config: ConfigLike, sections: Mapping[str, Any], caller: str) -> Iterator[Layer]:
    """Yields the parts of the config in their order; the later wins."""
    if isinstance(config, Mapping):
        yield _plain_tree(dict(config), caller)
    elif isinstance(config, str | os.PathLike):
        yield from read_with_bases(Path(config))
    elif config is not None:
        raise UserError(
            f"{caller}: the config is a {type(config).__name__}; give the path of a config file, or a dict of sections"
        )
    for key, value in sections.items():
        tree: Any = value
        for part in reversed(str(key).split(".")):
            tree = {part: tree}
        yield _plain_tree(tree, caller)


def _plain_tree(tree: Tree, caller: str) -> Layer:
    recipe = tree.get("recipe")
    handed = {} if recipe is None or isinstance(recipe, str) else {"recipe": recipe}
    plain = _plain({key: value for key, value in tree.items() if key not in handed}, "")
    return Layer({**plain, **handed}, dict.fromkeys(find_leaves(plain), caller))


def _plain(value: Any, dotted: str) -> Any:
    """Returns a value as a config file would give it: paths as text, tuples as lists. Refuses what no file can hold."""
    if dotted.count(".") >= MAX_DEPTH:
        raise UserError(f"{dotted[:100]}…: sections are nested more than {MAX_DEPTH} deep; flatten them")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {key: _plain(one, f"{dotted}.{key}" if dotted else str(key)) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, f"{dotted}.{index}") for index, one in enumerate(value)]
    raise UserError(
        f"{dotted} = {value!r:.100}: a {type(value).__name__} cannot be written into a config file; give a number, "
        "text, list or dict"
    )


def _check_recipe(recipe: Any) -> None:
    kind = recipe if isinstance(recipe, type) else type(recipe)
    if not hasattr(kind, "Config"):
        raise UserError(
            f"recipe = {recipe!r:.100}: {kind.__name__} is not a recipe; make it a subclass of shoal.Recipe"
        )


def _sections_of(recipe: Any) -> Tree:
    """Returns the sections of the config that a recipe object was built with."""
    config = config_of(recipe)
    tree: Tree = {} if config is None else TypeAdapter(type(config)).dump_python(config)
    return {name: section for name, section in tree.items() if isinstance(section, dict)}


def _check_sections(recipe: Any, tree: Tree, sources: Sources) -> None:
    """Refuses keys of the recipe's sections that differ from those which the object was built with: nothing would use
    them. Unknown keys are refused later."""
    built, kind, advice = _sections_of(recipe), type(recipe), "pass the class in place of the object"
    for name in (name for name in RECIPE_SECTIONS if isinstance(tree.get(name), dict)):
        asked = {key: value for key, value in tree[name].items() if key not in LoaderConfig.model_fields}
        if config_of(recipe) is None and asked:
            key = f"{name}.{min(asked)}"
            raise UserError(f"{named(key, sources)}: the recipe object of {kind.__name__} keeps no config; {advice}")
        known = {key: value for key, value in asked.items() if key in built.get(name, {})}
        merged = validate(kind.Config, merge(built, {name: known}), sources) if known else config_of(recipe)
        if merged == config_of(recipe):
            continue
        then, now = flatten(built), flatten(TypeAdapter(type(merged)).dump_python(merged))
        key = next(key for key in now if now[key] != then.get(key))
        raise UserError(
            f"{named(key, sources)} = {now[key]!r:.100}, but the recipe object was built with {then.get(key)!r:.100}; "
            f"build it with this value, or {advice}"
        )


def _used(sources: Sources, tree: Tree) -> Sources:
    return {key: sources[key] for key in find_leaves(tree) if key in sources}
