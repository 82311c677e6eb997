"""Finds the modules that get an adapter, by the rules of PEFT."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import sqrt
from typing import Any

from torch import nn

from shoal.errors import UserError
from shoal.lora.config import LoraConfig
from shoal.lora.layers import is_linear
from shoal.tensors import is_packed


@dataclass(frozen=True)
class Target:
    """The size of one module's adapter."""

    rank: int
    alpha: float


def find_targets(model: Any, lora: LoraConfig) -> dict[str, Target]:
    """Returns the modules that get an adapter, by name. Raises UserError if there are none, or if one cannot have an
    adapter."""
    modules = {name: module for name, module in model.named_modules() if name}
    wanted = target_names(model, lora)
    names = [name for name in modules if not _is_excluded(name, lora) and _is_wanted(name, wanted, lora)]
    if not names and lora.target_modules != []:
        raise UserError(_nothing_found(modules, wanted, lora))
    for end in lora.target_modules if isinstance(lora.target_modules, list) else ():
        if not any(_is_named(name, [end]) for name in modules):
            linear = [name for name, module in modules.items() if is_linear(module)]
            raise UserError(f"lora.target_modules: {end!r} matches no module of the model{_nearest([end], linear)}")
    for name in names:
        if not is_linear(modules[name]) and not isinstance(modules[name], nn.Embedding):
            raise UserError(
                f"lora.target_modules = {_say(lora.target_modules)}: {name} is a {type(modules[name]).__name__}, which "
                "cannot have an adapter; name linear layers or embeddings"
            )
        if isinstance(modules[name], nn.Embedding) and (lora.use_dora or lora.lora_bias):
            key = "use_dora" if lora.use_dora else "lora_bias"
            raise UserError(f"lora.{key} = true is not for the embedding {name}; take it out of lora.target_modules")
    adapted = [*names, *find_parameters(model, lora)]
    for key, pattern in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        for part in pattern or ():
            if not any(_ends_with(part, name) for name in adapted):
                raise UserError(f"lora.{key}: {part!r} matches no module with an adapter; they are {_some(adapted)}")
    return {name: _target(lora, name) for name in names}


def find_parameters(model: nn.Module, lora: LoraConfig) -> dict[str, Target]:
    """Returns the parameters that get an adapter, by name. Raises UserError if a key matches none, or if one cannot
    have an adapter."""
    parameters = dict(model.named_parameters())
    found: dict[str, Target] = {}
    for key in lora.target_parameters or ():
        names = [name for name in parameters if name == key or name.endswith(f".{key}")]
        if not names:
            matrices = [name for name, p in parameters.items() if p.ndim > 1 and not is_packed(p)]
            experts = [name for name in matrices if parameters[name].ndim == 3]
            ends = dict.fromkeys(".".join(name.split(".")[-2:]) for name in experts or matrices)
            near = get_close_matches(key, ends, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {_some([*ends])}"
            raise UserError(f"lora.target_parameters = {key!r}: the model has no such parameter; {hint}")
        for name in names:
            parameter, owner = parameters[name], model.get_submodule(name.rpartition(".")[0])
            if parameter.ndim not in (2, 3) or isinstance(owner, nn.Embedding) or is_packed(parameter):
                raise UserError(
                    f"lora.target_parameters = {key!r}: {name} is a parameter {[*parameter.shape]} of a "
                    f"{type(owner).__name__}, which cannot have an adapter; name matrices, or experts of three "
                    "dimensions, and embeddings and quantised layers in target_modules"
                )
            found[name] = _target(lora, name)
    return found


def _target(lora: LoraConfig, name: str) -> Target:
    rank, alpha = (
        _by_pattern(lora.rank_pattern, name, lora.r),
        _by_pattern(lora.alpha_pattern, name, lora.lora_alpha),
    )
    return Target(rank, alpha)


def target_names(model: Any, lora: LoraConfig) -> list[str] | str:
    """Returns `target_modules` with the words `auto` and `all-linear` replaced by names."""
    if lora.target_modules == "all-linear":
        head = model.get_output_embeddings()
        return [name for name, module in model.named_modules() if is_linear(module) and module is not head]
    if lora.target_modules != "auto":
        return lora.target_modules
    try:
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as by_kind
    except ImportError:
        raise UserError(
            "lora.target_modules = 'auto': the package peft is missing; run `pip install shoal[hf]`, or name modules"
        ) from None
    kind = model.config.get_text_config().model_type
    if kind not in by_kind:
        raise UserError(f"lora.target_modules = 'auto': PEFT names no modules for a {kind}; name some, or all-linear")
    chosen: Any = by_kind[kind]
    return chosen if isinstance(chosen, str) else list(chosen)


def modules_to_save(model: nn.Module, lora: LoraConfig) -> list[str]:
    """Returns the names of the modules that are trained as a whole. Raises UserError if a key names none."""
    names = [name for name, _ in model.named_modules() if name]
    for key in lora.modules_to_save or ():
        if not any(name.endswith(key) for name in names):
            raise UserError(f"lora.modules_to_save = {key!r}: the model has no such module{_nearest([key], names)}")
    return [name for name in names if any(name.endswith(key) for key in lora.modules_to_save or ())]


def _is_excluded(name: str, lora: LoraConfig) -> bool:
    if lora.exclude_modules and _is_named(name, lora.exclude_modules):
        return True
    return any(re.match(rf"(^|.*\.){module}($|\..*)", name) for module in lora.modules_to_save or ())


def _is_wanted(name: str, wanted: list[str] | str, lora: LoraConfig) -> bool:
    if not _is_named(name, wanted):
        return False
    if lora.layers_to_transform in (None, []) or name in wanted:
        return True
    if lora.layers_pattern:
        patterns = [lora.layers_pattern] if isinstance(lora.layers_pattern, str) else lora.layers_pattern
        found = [re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", name) for pattern in patterns]
    else:
        found = [re.match(r".*?\.[^.]*\.(\d+)\.", name)]
    layers = lora.layers_to_transform
    number = next((int(match[1]) for match in found if match), None)
    return number is not None and (number == layers if isinstance(layers, int) else number in (layers or ()))


def _is_named(name: str, wanted: list[str] | str) -> bool:
    """Returns whether a name is one of these or ends like one, or matches a regular expression as a whole."""
    if isinstance(wanted, str):
        return bool(re.fullmatch(wanted, name))
    return name in wanted or any(name.endswith(f".{end}") for end in wanted)


def _ends_with(pattern: str, name: str) -> bool:
    return bool(re.match(rf"(.*\.)?({pattern})$", name))


def _by_pattern(pattern: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    return next((value for part, value in (pattern or {}).items() if _ends_with(part, name)), default)


def scale_by_pattern(config: Mapping[str, Any], name: str) -> float:
    """Returns what PEFT multiplies a module's adapter by, from the content of its adapter_config.json."""
    rank = _by_pattern(config.get("rank_pattern"), name, config.get("r", 8))
    alpha = _by_pattern(config.get("alpha_pattern"), name, config.get("lora_alpha", 8))
    return float(alpha) / (sqrt(rank) if config.get("use_rslora") else rank)


def _nothing_found(modules: Mapping[str, nn.Module], wanted: list[str] | str, lora: LoraConfig) -> str:
    """Returns the message about targets that match nothing, with the nearest names."""
    where = f"lora.target_modules = {_say(lora.target_modules)}"
    if any(_is_named(name, wanted) for name in modules):
        return (
            f"{where}: exclude_modules, modules_to_save or layers_to_transform leave none of the modules that match; "
            "change one of them"
        )
    if isinstance(wanted, str) and any(name.endswith(f".{wanted}") for name in modules):
        return f"{where}: a text is a regular expression for the whole name of a module; write a list, [{wanted}]"
    linear = [name for name, module in modules.items() if is_linear(module)]
    parts = [wanted] if isinstance(wanted, str) else wanted
    return f"{where}: no module of the model matches{_nearest(parts, linear)}"


def _nearest(parts: list[str], names: list[str]) -> str:
    ends = [*dict.fromkeys(name.rpartition(".")[2] for name in names)]
    near = [one for part in parts for one in get_close_matches(part.rpartition(".")[2], ends, n=1)]
    return f"; did you mean {', '.join(dict.fromkeys(near))}?" if near else f"; it has {_some(ends)}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")


def _say(targets: list[str] | str) -> str:
    return repr(targets) if isinstance(targets, str) else f"[{_some(targets)}]"
