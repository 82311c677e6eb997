"""Loads a run from a config file and overrides, checks it, and prints it with the source of every value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from shoal.config.body import check_callbacks_of_body, import_body
from shoal.config.callbacks import CallbackChoice, check_callbacks
from shoal.config.classes import import_class, say_choices
from shoal.config.foreign.guide import LORA
from shoal.config.foreign.rules import Remark
from shoal.config.importable import NOT_IMPORTABLE, config_of
from shoal.config.imports import check_imports
from shoal.config.mesh import check_cut
from shoal.config.overrides import read_with_overrides
from shoal.config.schema import Config, LoaderConfig
from shoal.config.validation import fields_of, refuse_unknown, validate, without_null_sections
from shoal.config.yaml import Sources, Tree, flatten, format_value, is_section, named
from shoal.errors import UserError

RECIPES = {
    "bdh": "shoal.recipes.bdh:BDHRecipe",
    "causal_lm": "shoal.recipes.causal_lm:CausalLMRecipe",
    "text_lora": "shoal.recipes.text_lora:TextLoraRecipe",
}
"""The recipes that have a short name."""
RECIPE_SECTIONS = ("model", "lora", "dataset")
"""The sections whose keys the recipe declares."""
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
    callbacks: tuple[CallbackChoice, ...] = ()
    recipe_object: Any = None
    """The recipe itself, if Python code handed over an object."""
    body: Any = None
    """The function that computes every step, if it is not the recipe's loss that does."""
    remarks: tuple[Remark, ...] = ()
    """The keys of a file in other words that change nothing, with the reasons."""
    uses_every_gpu: bool = False
    """True if `launch.procs_per_node` is `auto`, so that the config has the number of GPUs of this machine."""

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

    def to_yaml(self, derived: Mapping[str, Any] | None = None, only_changed: bool = False) -> str:
        """Returns a config file with all values, each with its source. It loads as the same run.

        With `only_changed` it has the values that a file or the command line sets to something else than the default.

        `derived` are values by dotted key for keys that the config leaves out. They are written as comments: as values
        they would contradict a later override of another factor of the batch size.
        """
        (tree, sources), derived = _in_one_spelling(self.tree(), self.sources), derived or {}
        if only_changed:
            tree, derived = self._changed(tree, sources), {}
        rows = [*_rows(tree, sources, derived)]
        width = min(60, max(len(left) for left, _ in rows))
        lines = [f"{left:<{width}}  # {note}" if note else left for left, note in rows]
        return "".join(f"{line}\n" for line in [*lines, *(f"# not in force: {remark}" for remark in self.remarks)])

    def _changed(self, tree: Tree, sources: Sources) -> Tree:
        """Returns the part of the tree that differs from a run of the same recipe with defaults.

        If the recipe has required keys, there is no such run, and all values that were set are returned.
        """
        defaults: Tree = {}
        with suppress(UserError):
            defaults = flatten(check_run({"recipe": self.config.recipe, "training": {"max_steps": 1}}).tree())
        for key in ("recipe", "experiment.name", "training.max_steps"):  # set above, or after the file
            defaults.pop(key, None)
        return _without(tree, defaults, sources)


def _in_one_spelling(tree: Tree, sources: Sources) -> tuple[Tree, Sources]:
    """Returns the tree without the other spellings of adapters' keys, such as `lora.rank`, which are null once they
    are read, and the sources at the keys that they set, such as `lora.r`."""
    lora = tree.get("lora") or {}
    spellings = {
        key: str(rule.ours)
        for key, rule in LORA.items()
        if rule.ours and key in lora and lora[key] is None and str(rule.ours).removeprefix("lora.") in lora
    }
    moved = {ours: sources[f"lora.{key}"] for key, ours in spellings.items() if f"lora.{key}" in sources}
    kept = {key: value for key, value in lora.items() if key not in spellings}
    return {**tree, **({"lora": kept} if lora else {})}, {**sources, **moved}


def _without(tree: Tree, defaults: Tree, sources: Sources, prefix: str = "") -> Tree:
    """Returns the values that were set and are not those of `defaults`, by dotted key."""
    kept: Tree = {}
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if is_section(value) and value:
            if inner := _without(value, defaults, sources, f"{dotted}."):
                kept[key] = inner
        elif source_of(dotted, sources) != DEFAULT and (dotted not in defaults or defaults[dotted] != value):
            kept[key] = value
    return kept


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
    """Returns where a key was set. The short form `optimizer: sgd` sets `optimizer.name`, others a mode or method."""
    section, _, key = dotted.rpartition(".")
    return sources.get(dotted) or (sources.get(section) if key in ("name", "mode", "method") else None) or DEFAULT


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Loads a config file with overrides such as `training.max_steps=5`; every mistake is a UserError of one line."""
    tree, sources, remarks = read_with_overrides(Path(path), overrides)
    name_after_file(tree, sources, Path(path))
    return check_run(tree, sources, import_from=Path(path).parent, remarks=remarks)


def name_after_file(tree: Tree, sources: Sources, path: Path) -> None:
    """Gives a run without a name that of its config file, so that two configs do not share a run folder."""
    if tree.get("experiment") is None:
        tree["experiment"] = {}
    experiment = tree["experiment"]
    if isinstance(experiment, dict) and "name" not in experiment and path.stem:
        experiment["name"], sources["experiment.name"] = path.stem, "the file's name"


def check_run(
    tree: Tree,
    sources: Sources | None = None,
    import_from: Path | None = None,
    recipe: Any = None,
    body: Any = None,
    remarks: tuple[Remark, ...] = (),
) -> Run:
    """Checks a config as nested dicts, and returns it as a run. The recipe may be in the folder `import_from`.

    `recipe`, a class or an object, and `body` are what the tree has the recorded names of; without them, what it names
    is imported.
    """
    sources = dict(sources or {})
    tree, uses_every_gpu = count_gpus(tree, sources)
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
    fields = {**(fields_of(Config) or {}), **sections}
    tree = without_null_sections(tree, fields)
    refuse_unknown(tree, fields, sources, f"recipe {tree['recipe']!r}", root=fields)

    recipe_dataset = dict(tree.get("dataset", {}))
    loader = {key: recipe_dataset.pop(key) for key in LoaderConfig.model_fields if key in recipe_dataset}
    shoal_tree = {key: value for key, value in tree.items() if key not in RECIPE_SECTIONS}
    config = validate(Config, {**shoal_tree, "dataset": loader}, sources)
    check_imports(config.training, sources, import_from)
    recipe_tree = {**tree, "dataset": recipe_dataset}
    recipe_sections = {key: recipe_tree[key] for key in RECIPE_SECTIONS if key in recipe_tree and key in recipe_fields}
    if recipe_object is None:
        recipe_config = validate(recipe_type.Config, recipe_sections, sources)
    else:
        recipe_config = config_of(recipe_object) or {}
    if uses_every_gpu and config.launch.target != "local":
        raise UserError(
            f"launch.procs_per_node = auto: launch.target = {config.launch.target} starts the run on other machines, "
            "whose GPUs this one cannot count; give a number"
        )
    callbacks = check_callbacks(config.callbacks, sources, import_from)
    if config.training.body is not None:
        check_callbacks_of_body(callbacks)
        body = body or import_body(config.training.body, sources, import_from)
    run = Run(config, recipe_type, recipe_config, sources, callbacks, recipe_object, body, remarks, uses_every_gpu)
    if config.distributed.strategy == "mesh" and config.distributed.mesh is not None:
        check_cut(run.make_recipe(), config.distributed, config.distributed.mesh.model_dump())
    return run


def count_gpus(tree: Tree, sources: Sources) -> tuple[Tree, bool]:
    """Returns the tree with a number in place of `launch.procs_per_node: auto`, whose source then says where it comes
    from; and whether there was an `auto`."""
    launch, training = tree.get("launch"), tree.get("training")
    if not isinstance(launch, dict) or launch.get("procs_per_node") != "auto":
        return tree, False
    import torch

    number = torch.cuda.device_count()
    why = "one process for every GPU of this machine" if number else "one process, because this machine has no GPU"
    if isinstance(training, dict) and training.get("device") == "cpu":
        number, why = 1, "one process, because training.device is cpu"
    key = "launch.procs_per_node"
    sources[key] = ", ".join(filter(None, (sources.get(key), f"auto: {why}")))
    return {**tree, "launch": {**launch, "procs_per_node": max(1, number)}}, True


def import_recipe(name: Any, sources: Sources, import_from: Path | None = None) -> type[Any]:
    """Returns the class for `recipe: NAME` or `recipe: module:Class`, also from the current folder or `import_from`."""
    where = f"{named('recipe', sources)} = {name!r:.200}"
    if name is None:
        raise UserError(f"recipe is missing; set it to {say_choices(RECIPES)}")
    if isinstance(name, str) and name.startswith(NOT_IMPORTABLE):
        raise UserError(
            f"{where}: this run was started from a script or notebook with a recipe that cannot be imported; continue "
            "it there, or move the class into a module and let its constructor take the config alone"
        )
    recipe_type = import_class(where, name, RECIPES, import_from)
    if not isinstance(recipe_type, type) or not hasattr(recipe_type, "Config"):
        raise UserError(
            f"{where}: {name.rpartition(':')[2]} is not a recipe; make it a subclass of shoal.recipes.Recipe"
        )
    return recipe_type
