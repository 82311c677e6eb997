"""Loads a run from a config file and overrides, checks it, and prints it with the source of every value."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from shoal.config.importable import NOT_IMPORTABLE, config_of
from shoal.config.mesh import check_cut
from shoal.config.overrides import read_with_overrides
from shoal.config.schema import Config, LoaderConfig
from shoal.config.validation import fields_of, named, refuse_unknown, validate
from shoal.config.yaml import Sources, Tree, format_value, is_section
from shoal.errors import UserError

RECIPES = {"bdh": "shoal.recipes.bdh:BDHRecipe", "causal_lm": "shoal.recipes.causal_lm:CausalLMRecipe"}
"""The recipes that have a short name."""
RECIPE_SECTIONS = ("model", "lora", "dataset")
"""The sections whose keys the recipe declares."""
_CLASS_PATH = re.compile(r"^[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*$")
"""`package.module:Class`, each part a name of Python."""
DEFAULT = "default"
"""The source of values that neither a file nor the command line sets."""


@dataclass(frozen=True)
class Run:
    """A checked config."""

    config: Config
    """The sections that belong to shoal."""
    recipe_type: type[Any]
    recipe_config: Any
    """The sections that belong to the recipe, as its `Config`."""
    sources: Sources
    """Where each value was set, by dotted key."""
    recipe_object: Any = None
    """The recipe itself, if Python code handed over an object."""
    body: Any = None
    """The function that computes every step, if it is not the recipe's loss that does."""

    def make_recipe(self) -> Any:
        """Returns the recipe: the object that was handed over, or a new one of its class and config."""
        return self.recipe_type(self.recipe_config) if self.recipe_object is None else self.recipe_object

    def tree(self) -> Tree:
        """Returns all sections as nested dicts, shoal's and the recipe's, in the order of a config file."""
        tree = self.config.model_dump()
        tree["experiment"]["output_dir"] = self.config.output_dir
        recipe_tree = TypeAdapter(type(self.recipe_config)).dump_python(self.recipe_config)
        sections = {name: {**(recipe_tree.get(name) or {}), **tree.pop(name, {})} for name in RECIPE_SECTIONS}
        first = {name: tree.pop(name) for name in ("experiment", "recipe")}
        return {**first, **{name: section for name, section in sections.items() if section}, **tree}

    def to_yaml(self, derived: Mapping[str, Any] | None = None) -> str:
        """Returns a config file with all values, each with its source. It loads as the same run.

        `derived` are values by dotted key for keys that the config leaves out. They are written as comments: as values
        they would contradict a later override of another factor of the batch size.
        """
        rows = [*_rows(self.tree(), self.sources, derived or {})]
        width = min(60, max(len(left) for left, _ in rows))
        return "".join(f"{left:<{width}}  # {note}\n" if note else f"{left}\n" for left, note in rows)


def _rows(tree: Tree, sources: Sources, derived: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the lines of a config file, each with its comment."""
    indent = "  " * prefix.count(".")
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if is_section(value) and value:
            yield f"{indent}{key}:", ""
            yield from _rows(value, sources, derived, f"{dotted}.")
        elif dotted in derived and value is None:
            yield f"{indent}# {key}: {format_value(derived[dotted])}", "derived"
        else:
            yield f"{indent}{key}: {format_value(value)}", source_of(dotted, sources)


def source_of(dotted: str, sources: Sources) -> str:
    """Returns where a key was set. The short form `optimizer: sgd` sets `optimizer.name`."""
    return sources.get(dotted) or sources.get(dotted.removesuffix(".name")) or DEFAULT


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Loads a config file with overrides such as `training.max_steps=5`; every mistake is a UserError of one line."""
    tree, sources = read_with_overrides(Path(path), overrides)
    return check_run(tree, sources, import_from=Path(path).parent)


def check_run(
    tree: Tree, sources: Sources | None = None, import_from: Path | None = None, recipe: Any = None, body: Any = None
) -> Run:
    """Checks a config as nested dicts, and returns it as a run. The recipe may be in the folder `import_from`.

    `recipe`, a class or an object, and `body` are what the tree has the recorded names of; without them, what it names
    is imported.
    """
    sources = sources or {}
    recipe_object = None if isinstance(recipe, type) else recipe
    recipe_type: Any = type(recipe) if recipe_object is not None else recipe
    if recipe is None:
        recipe_type = import_recipe(tree.get("recipe"), sources, import_from)
    recipe_fields = fields_of(recipe_type.Config) or {}
    sections: dict[str, Any] = {
        name: fields_of(recipe_fields.get(name, {}), tree.get(name)) for name in RECIPE_SECTIONS
    }
    if sections["dataset"] is not None:
        sections["dataset"] = {**LoaderConfig.model_fields, **sections["dataset"]}
    refuse_unknown(tree, {**(fields_of(Config) or {}), **sections}, sources, f"recipe {tree['recipe']!r}")

    recipe_dataset = dict(tree.get("dataset", {}))
    loader = {key: recipe_dataset.pop(key) for key in LoaderConfig.model_fields if key in recipe_dataset}
    shoal_tree = {key: value for key, value in tree.items() if key not in RECIPE_SECTIONS}
    config = validate(Config, {**shoal_tree, "dataset": loader}, sources)
    recipe_tree = {**tree, "dataset": recipe_dataset}
    recipe_sections = {key: recipe_tree[key] for key in RECIPE_SECTIONS if key in recipe_tree and key in recipe_fields}
    if recipe_object is None:
        recipe_config = validate(recipe_type.Config, recipe_sections, sources)
    else:
        recipe_config = config_of(recipe_object) or {}
    if config.training.body is not None and body is None:
        body = import_body(config.training.body, sources, import_from)
    run = Run(config, recipe_type, recipe_config, sources, recipe_object, body)
    if config.distributed.strategy == "mesh" and config.distributed.mesh is not None:
        check_cut(run.make_recipe(), config.distributed, config.distributed.mesh.model_dump())
    return run


def import_recipe(name: Any, sources: Sources, import_from: Path | None = None) -> type[Any]:
    """Returns the class for `recipe: NAME` or `recipe: module:Class`, also from the current folder or `import_from`."""
    where = f"{named('recipe', sources)} = {name!r:.200}"
    choices = f"one of {', '.join(RECIPES)}, or to your own as package.module:Class"
    if name is None:
        raise UserError(f"recipe is missing; set it to {choices}")
    if isinstance(name, str) and name.startswith(NOT_IMPORTABLE):
        raise UserError(
            f"{where}: this run was started from a script or notebook with a recipe that cannot be imported; continue "
            "it there, or move the class into a module and let its constructor take the config alone"
        )
    if not isinstance(name, str) or not (name in RECIPES or _CLASS_PATH.match(name)):
        raise UserError(f"{where} is unknown; set it to {choices}{_did_you_mean(str(name)[:100], RECIPES)}")
    # An export of an untrusted checkpoint, whose recipe is built in, must not import from the current folder.
    recipe_type = _import_name(RECIPES.get(name, name), where, import_from, searches_folders=name not in RECIPES)
    if not isinstance(recipe_type, type) or not hasattr(recipe_type, "Config"):
        shown = getattr(recipe_type, "__name__", type(recipe_type).__name__)
        raise UserError(f"{where}: {shown} is not a recipe; make it a subclass of shoal.recipes.Recipe")
    return recipe_type


def import_body(name: str, sources: Sources, import_from: Path | None = None) -> Any:
    """Returns the function for `training.body: module:function`."""
    where = f"{named('training.body', sources)} = {name!r:.200}"
    if name.startswith(NOT_IMPORTABLE):
        raise UserError(
            f"{where}: this run was started from a script or notebook with a loop that cannot be imported; continue it "
            "there, or move the body of the loop into a function body(run, step) in a module"
        )
    if not _CLASS_PATH.match(name):
        raise UserError(f"{where} should be package.module:function")
    body = _import_name(name, where, import_from)
    if not callable(body):
        raise UserError(f"{where}: it is a {type(body).__name__}; give a function body(run, step)")
    return body


def _import_name(path: str, where: str, import_from: Path | None, searches_folders: bool = True) -> Any:
    """Returns what `module:name` stands for, also from the current folder or `import_from`."""
    module_name, name = path.split(":")
    if searches_folders:
        sys.path[:0] = [folder for folder in dict.fromkeys(("", str(import_from or ""))) if folder not in sys.path]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):  # something that the recipe's module imports
            raise
        raise UserError(
            f"{where}: no module {error.name!r} in the config's folder, {Path.cwd()} or the Python path"
        ) from None
    if not hasattr(module, name):
        raise UserError(f"{where}: {module_name} has no {name!r}{_did_you_mean(name, dir(module))}")
    return getattr(module, name)


def _did_you_mean(name: str, choices: Iterable[str]) -> str:
    return "".join(f"; did you mean {near!r}?" for near in get_close_matches(name, choices, n=1))
