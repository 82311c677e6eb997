"""From a file, its bases and overrides to one checked run that knows where every value came from."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from shoal.config.mesh import check_cut
from shoal.config.schema import Config, LoaderConfig
from shoal.config.yaml import Sources, Tree, format_value, is_section, parse_value, read_yaml
from shoal.errors import UserError

RECIPES = {"bdh": "shoal.recipes.bdh:BDHRecipe", "causal_lm": "shoal.recipes.causal_lm:CausalLMRecipe"}
RECIPE_SECTIONS = ("model", "lora", "dataset")
OVERRIDE, DEFAULT = "command line", "default"


@dataclass(frozen=True)
class Run:
    """A checked configuration: shoal's own sections, the recipe's, and where each value came from."""

    config: Config
    recipe_type: type[Any]
    recipe_config: Any
    sources: Sources

    def tree(self) -> Tree:
        """The whole run as plain data, in the order a person reads it; sections the recipe owns merged in."""
        core = self.config.model_dump()
        core["experiment"]["output_dir"] = self.config.output_dir
        own = TypeAdapter(type(self.recipe_config)).dump_python(self.recipe_config)
        tree: Tree = {"experiment": core.pop("experiment"), "recipe": core.pop("recipe")}
        for section in RECIPE_SECTIONS:
            merged = {**(own.get(section) or {}), **core.pop(section, {})}
            if merged:
                tree[section] = merged
        return {**tree, **core}

    def to_yaml(self, derived: dict[str, Any] | None = None) -> str:
        """The resolved file: every value with its source. It loads again as the same run.

        Derived values are comments: writing them as values would turn a later override of one factor
        into a contradiction.
        """
        rows: list[tuple[str, str]] = []
        _render(self.tree(), "", 0, self.sources, derived or {}, rows)
        width = min(60, max(len(left) for left, _ in rows))
        return "".join(f"{left:<{width}}  # {note}\n" if note else f"{left}\n" for left, note in rows)


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Reads, merges and checks a run; every mistake is a UserError of one line."""
    path = Path(path)
    tree, sources = _read_with_bases(path, ())
    for override in overrides:
        _apply_override(tree, sources, override)
    return check_run(tree, sources, import_from=path.parent)


def check_run(tree: Tree, sources: Sources | None = None, import_from: Path | None = None) -> Run:
    sources = sources or {}
    for key in tree:
        inside = [name for name, field in Config.model_fields.items() if key in (_fields(field.annotation) or {})]
        if key not in {*Config.model_fields, *RECIPE_SECTIONS} and inside:
            raise UserError(f"{_name(key, sources)} is not a key; did you mean {inside[0]}.{key}?")
    _refuse_unknown(tree, sorted({*Config.model_fields, *RECIPE_SECTIONS}), "", sources)
    for section in {*Config.model_fields, *RECIPE_SECTIONS} - {"recipe"}:
        if not isinstance(tree.get(section, {}), dict):
            raise UserError(f"{_name(section, sources)} = {tree[section]!r} should be a section of `key: value` lines")

    recipe_type = import_recipe(tree.get("recipe"), sources, import_from)
    core = {key: value for key, value in tree.items() if key not in RECIPE_SECTIONS}
    dataset = tree.get("dataset", {})
    core["dataset"] = {key: value for key, value in dataset.items() if key in LoaderConfig.model_fields}
    own = {key: tree[key] for key in RECIPE_SECTIONS if key in tree}
    own["dataset"] = {key: value for key, value in dataset.items() if key not in LoaderConfig.model_fields}

    known = _fields(recipe_type.Config) or {}
    for section in RECIPE_SECTIONS:
        if section in known:
            continue
        if extra := own.pop(section, None):
            valid = sorted(LoaderConfig.model_fields) if section == "dataset" else []
            _refuse_unknown(extra, valid, f"{section}.", sources, owner=f"recipe {tree['recipe']!r}")

    config = _validate(Config, core, sources)
    recipe_config = _validate(
        recipe_type.Config, own, sources, extra_keys={"dataset": sorted(LoaderConfig.model_fields)}
    )
    if config.distributed.strategy == "3d" and config.distributed.mesh is not None:
        check_cut(recipe_type(recipe_config), config.distributed, config.distributed.mesh.model_dump())
    return Run(config, recipe_type, recipe_config, sources)


def import_recipe(name: Any, sources: Sources, import_from: Path | None = None) -> type[Any]:
    """The class behind `recipe: NAME` or `recipe: module:Class`, also from the current or the config's folder."""
    where = _name("recipe", sources)
    choices = f"one of {', '.join(RECIPES)}, or your own as package.module:Class"
    if name is None:
        raise UserError(f"recipe is missing: say what to train, {choices}")
    if not isinstance(name, str) or (name not in RECIPES and name.count(":") != 1):
        hint = get_close_matches(str(name), RECIPES, n=1)
        raise UserError(f"{where} = {name!r} is not {choices}" + (f"; did you mean {hint[0]!r}?" if hint else ""))
    module_name, class_name = RECIPES.get(name, name).split(":")
    for folder in (str(import_from) if import_from else "", ""):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.split(".")[0] and error.name != module_name:
            raise
        raise UserError(
            f"{where} = {name!r}: no module {error.name!r} in the config's folder, {Path.cwd()} or the Python path"
        ) from None
    recipe_type = getattr(module, class_name, None)
    if recipe_type is None:
        found = get_close_matches(class_name, dir(module), n=1)
        raise UserError(
            f"{where} = {name!r}: {module_name} has no {class_name!r}"
            + (f"; did you mean {found[0]!r}?" if found else "")
        )
    return recipe_type


def _read_with_bases(path: Path, chain: tuple[Path, ...]) -> tuple[Tree, Sources]:
    real = path.resolve()
    if real in chain:
        raise UserError(f"{path}: `extends` goes in a circle: {' → '.join(str(p) for p in (*chain, real))}")
    own, own_sources = read_yaml(path)
    bases = own.pop("extends", [])
    if isinstance(bases, str):
        bases = [bases]
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise UserError(f"{path}: extends = {bases!r} should be a file name or a list of them")
    tree: Tree = {}
    sources: Sources = {}
    for base in bases:
        _merge(tree, sources, *_read_with_bases(path.parent / base, (*chain, real)))
    _merge(tree, sources, own, own_sources)
    return tree, sources


def _merge(tree: Tree, sources: Sources, later: Tree, later_sources: Sources, prefix: str = "") -> None:
    """The later value wins; sections merge key by key."""
    for key, value in later.items():
        dotted = f"{prefix}{key}"
        if is_section(value) and is_section(tree.get(key)):
            _merge(tree[key], sources, value, later_sources, f"{dotted}.")
        else:
            tree[key] = value
            for stale in [name for name in sources if name == dotted or name.startswith(f"{dotted}.")]:
                del sources[stale]
            sources.update({k: v for k, v in later_sources.items() if k == dotted or k.startswith(f"{dotted}.")})


def _apply_override(tree: Tree, sources: Sources, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {override!r} should look like key.sub=value")
    try:
        value = parse_value(text)
    except yaml.YAMLError:
        raise UserError(f"override {override!r}: the value does not parse as YAML; quote it if it is text") from None
    *parents, last = key.split(".")
    later: Tree = {last: value}
    for parent in reversed(parents):
        later = {parent: later}
    _merge(tree, sources, later, dict.fromkeys(_leaves(value, key), OVERRIDE))


def _leaves(value: Any, dotted: str) -> Iterator[str]:
    if is_section(value):
        for key, inner in value.items():
            yield from _leaves(inner, f"{dotted}.{key}")
    else:
        yield dotted


def _fields(model: Any) -> dict[str, Any] | None:
    """name → annotation of a pydantic model or dataclass; None for anything else."""
    if isinstance(model, type) and issubclass(model, BaseModel):
        return {name: field.annotation for name, field in model.model_fields.items()}
    if isinstance(model, type) and dataclasses.is_dataclass(model):
        return get_type_hints(model)
    return None


def _models_in(annotation: Any) -> Iterator[Any]:
    """The models an annotation may hold: itself, or the members of a union."""
    if get_origin(annotation) in (Union, UnionType, Annotated):
        for member in get_args(annotation):
            yield from _models_in(member)
    elif _fields(annotation) is not None:
        yield annotation


def _refuse_unknown(given: Tree, valid: Sequence[str], prefix: str, sources: Sources, owner: str | None = None) -> None:
    for key in given:
        if key in valid:
            continue
        meant = " or ".join(f"{prefix}{name}" for name in _meant_by(str(key), valid))
        place = owner or (f"section {prefix.removesuffix('.')}" if prefix else "a run")
        hint = f"did you mean {meant}?" if meant else f"{place} has {', '.join(valid) or 'no keys here'}"
        raise UserError(f"{_name(f'{prefix}{key}', sources)} is not a key; {hint}")


def _meant_by(key: str, valid: Sequence[str]) -> list[str]:
    """The keys that this may be short for, by their first words (`dp`) or initials (`lr`); else the nearest one."""
    initials = {name: "".join(word[0] for word in name.split("_") if word) for name in valid}
    short_for = [name for name in valid if len(key) > 1 and (name.startswith(f"{key}_") or initials[name] == key)]
    return short_for or get_close_matches(key, valid, n=1, cutoff=0.5)


def _refuse_unknown_deep(
    model: Any, given: Tree, prefix: str, sources: Sources, extra_keys: dict[str, list[str]] | None = None
) -> None:
    """Refuses unknown keys by name with the nearest valid one, at any depth.

    pydantic's own `extra="forbid"` neither suggests nor reaches into a user's plain models.
    """
    fields = _fields(model) or {}
    _refuse_unknown(given, [*fields, *(extra_keys or {}).get(prefix.removesuffix("."), [])], prefix, sources)
    for key, value in given.items():
        models = list(_models_in(fields[key])) if isinstance(value, dict) and key in fields else []
        if len(models) > 1 and "name" in value:
            models = [m for m in models if value["name"] in get_args((_fields(m) or {}).get("name"))]
        if len(models) == 1:
            _refuse_unknown_deep(models[0], value, f"{prefix}{key}.", sources, extra_keys)


def _validate(model: Any, data: Tree, sources: Sources, extra_keys: dict[str, list[str]] | None = None) -> Any:
    _refuse_unknown_deep(model, data, "", sources, extra_keys)
    try:
        return TypeAdapter(model).validate_python(data)
    except ValidationError as error:
        first, *more = error.errors()
        raise UserError(_explain(first, data, sources) + (f" (and {len(more)} more)" if more else "")) from None


def _explain(error: Any, data: Tree, sources: Sources) -> str:
    # pydantic puts union tags into the location; keep the parts that are keys of the data.
    keys: list[str] = []
    value: Any = data
    for part in error["loc"]:
        indices = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        if part in indices:
            keys.append(str(part))
            value = value[part]
        elif error["type"] == "missing":
            keys.append(str(part))
    dotted = ".".join(keys)
    message = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    message = message[0].lower() + message[1:]
    if error["type"] == "missing":
        return f"{_name(dotted, sources)} is missing"
    if error["type"] == "union_tag_invalid":
        context = error["ctx"]
        return f"{_name(dotted, sources)} = {context['tag']!r} is not one of {context['expected_tags']}"
    if error["type"] == "value_error" or isinstance(value, dict):
        return f"{_name(dotted, sources)}: {message}"
    return f"{_name(dotted, sources)} = {value!r}: {message.removeprefix('input ')}"


def _name(dotted: str, sources: Sources) -> str:
    return f"{dotted} ({sources[dotted]})" if dotted in sources else dotted


def _render(
    tree: Tree, prefix: str, depth: int, sources: Sources, derived: dict[str, Any], rows: list[tuple[str, str]]
) -> None:
    for key, value in tree.items():
        dotted, indent = f"{prefix}{key}", "  " * depth
        if is_section(value) and value:
            rows.append((f"{indent}{key}:", ""))
            _render(value, f"{dotted}.", depth + 1, sources, derived, rows)
        elif dotted in derived and value is None:
            rows.append((f"{indent}# {key}: {format_value(derived[dotted])}", "derived"))
        else:
            rows.append((f"{indent}{key}: {format_value(value)}", source_of(dotted, sources)))


def source_of(dotted: str, sources: Sources) -> str:
    """Who set a key. `optimizer: sgd` is what sets optimizer.name."""
    return sources.get(dotted) or sources.get(dotted.removesuffix(".name")) or DEFAULT
