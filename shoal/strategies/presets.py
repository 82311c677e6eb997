"""Strategies by name: from a config, or in Python by the name and options that people know."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from shoal.config.deepspeed_json import fit_json, read_json
from shoal.config.layout import Layout, layout_of
from shoal.config.overrides import merge, merge_layers, read_with_bases
from shoal.config.schema import Config, TrainingConfig
from shoal.config.schema_distributed import DDPConfig, DeepSpeedConfig, DistributedConfig, FSDPConfig
from shoal.config.validation import validate
from shoal.errors import UserError
from shoal.parallel.sharding.units import WrapPolicy
from shoal.processes.detect import detect
from shoal.processes.world import World
from shoal.strategies.contract import DistributedStrategy
from shoal.strategies.deepspeed import ZeroStrategy
from shoal.strategies.native import NativeStrategy
from shoal.strategies.torch_words import translate_offload, translate_options

_TRAINING = (
    "device",
    "mixed_precision",
    "tf32",
    "compile",
    "kernels",
    "cuda_graphs",
    "activation_checkpointing",
    "loss_chunks",
    "fp8_head",
    "sync_batch_norm",
)
_NOT_GIVEN: Any = object()
"""The default of options whose usual value, such as `compression="none"`, has to win over a config if it is given."""
_RUN = ("seed", "deterministic", "backend", "timeout", "world")


def from_config(
    config: Config, world: World | None = None, timeout_seconds: float | None = None
) -> DistributedStrategy:
    """Returns the strategy that a config names. `auto` is `single` for one process and `ddp` for several.

    `timeout_seconds` is that of its process groups, if it is not `distributed.timeout`.
    """
    world, training, distributed = world or detect(), config.training, config.distributed
    layout = layout_of(training, distributed, world.size, world.local_size, config.experiment.deterministic)
    timeout = distributed.timeout if timeout_seconds is None else timeout_seconds
    return _build(layout, world, training.device, config.experiment.seed, distributed.backend, timeout)


def from_any_config(config: Any, world: World | None = None, **sections: Mapping[str, Any]) -> DistributedStrategy:
    """Returns the strategy of a config as Python code may have it: a file, a dict of sections, a `Config` or a `Run`.

    `sections` are merged over it. A recipe is not needed: of the sections `experiment`, `training` and `distributed`
    are used.
    """
    config = getattr(config, "config", config)
    if isinstance(config, Config) and not sections:
        return from_config(config, world)
    tree, sources = _tree_of(config)
    said, wanted = (one.get("distributed", {}).get("strategy") for one in (tree, sections))
    if wanted and said not in (None, "auto", wanted):
        raise UserError(f"distributed.strategy = {said}, but this is the strategy {wanted}; leave the key out")
    tree = merge(tree, {name: dict(section) for name, section in sections.items()})
    training = dict(tree.get("training", {}))
    if not training.keys() & {"max_steps", "num_epochs"}:
        training["max_steps"] = 1  # it says nothing about the strategy
    checked: dict[str, Any] = {key: tree[key] for key in ("experiment", "distributed") if key in tree}
    # The recipe is only a name here: it is not imported.
    return from_config(validate(Config, {"recipe": "none", "training": training, **checked}, sources), world)


def _tree_of(config: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the sections of a config as nested dicts, and where each value was set."""
    tree: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if isinstance(config, str | os.PathLike):
        tree, sources, _ = merge_layers(read_with_bases(Path(config)))
    elif isinstance(config, BaseModel):
        tree = config.model_dump(exclude_unset=True)
    elif isinstance(config, Mapping):
        tree = {**config}
    else:
        raise TypeError(f"config is a {type(config).__name__}; give a dict of sections, or the path of a config file")
    if "strategy" in tree and "distributed" not in tree:  # the section itself
        return {"distributed": tree}, sources
    known = {*Config.model_fields, "model", "lora", "dataset"}
    if unknown := tree.keys() - known:
        meant = get_close_matches(str(min(unknown)), known, n=1)
        hint = f"did you mean {meant[0]}?" if meant else f"there are {', '.join(sorted(known))}"
        raise UserError(f"{min(unknown)} is not a section of a config; {hint}")
    return tree, sources


def _build(layout: Layout, world: World, device: str, seed: int, backend: str, timeout: float) -> DistributedStrategy:
    kind = ZeroStrategy if layout.engine == "deepspeed" else NativeStrategy
    return kind(layout, world, device=device, seed=seed, backend=backend, timeout=timeout)


def SingleStrategy(**options: Any) -> DistributedStrategy:
    """One process, one device. `options` are keys of `training` (`device`, `mixed_precision`, `compile` …), `seed`,
    `deterministic`, `backend` and `timeout`; all strategies take these."""
    translate_options(options)
    return _from_options(SingleStrategy, "single", {}, options)


SingleGPUStrategy = SingleStrategy


def DDPStrategy(
    config: Any = None,
    *,
    compression: str | Mapping[str, Any] = _NOT_GIVEN,
    local_sgd: Mapping[str, Any] | None = _NOT_GIVEN,
    **options: Any,
) -> DistributedStrategy:
    """Replicas by torch's DistributedDataParallel, whose options are the keys of `distributed.ddp`.

    `compression` and `local_sgd` are those of `distributed`; a `Loop` takes neither. `config` is a config file, or a
    dict of sections, over which the options are merged.
    """
    translate_options(options)
    sections = {"ddp": _take(options, DDPConfig), "compression": compression, "local_sgd": local_sgd}
    return _from_options(DDPStrategy, "ddp", sections, options, DDPConfig, config)


def FSDPStrategy(
    config: Any = None,
    *,
    mesh: Mapping[str, int] | None = _NOT_GIVEN,
    compression: str | Mapping[str, Any] = _NOT_GIVEN,
    **options: Any,
) -> DistributedStrategy:
    """Shards by torch's fully_shard, whose options are the keys of `distributed.fsdp`.

    `auto_wrap_policy` may also be a set of module classes, or a policy of torch's first FSDP, such as
    `functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})`. `activation_checkpointing` is what
    `training` has, or True, or a set of module classes, which may also be `activation_checkpointing_policy`.
    `compression` is that of `distributed`, for replicas of shards. `config` is a config file, or a dict of sections,
    over which the options are merged.
    """
    policy = translate_options(options)
    sections = {"fsdp": _take(options, FSDPConfig), "mesh": mesh, "compression": compression}
    return _from_options(FSDPStrategy, "fsdp", sections, options, FSDPConfig, config, policy=policy)


def MeshStrategy(
    *, mesh: Mapping[str, int], sequence_parallel: bool = False, schedule: str = "1f1b", **options: Any
) -> DistributedStrategy:
    """Any product of stages, replicas, shards, parts of a sequence and parts of a layer, as `mesh` says."""
    policy = translate_options(options)
    sections = {
        "fsdp": _take(options, FSDPConfig),
        "mesh": dict(mesh),
        "tensor": {"sequence_parallel": sequence_parallel},
        "pipeline": {"schedule": schedule},
    }
    return _from_options(MeshStrategy, "mesh", sections, options, FSDPConfig, policy=policy)


def DeepSpeedStrategy(config: Any = None, *, stage: int | None = None, **options: Any) -> DistributedStrategy:
    """ZeRO by DeepSpeed, whose options are the keys of `distributed.deepspeed`; `offload_optimizer=True` is `cpu`.

    `config` is a DeepSpeed JSON, by its path or its content; options beside it may add to it and not contradict it. Or
    it is a config file of shoal's, or a dict of its sections. `cpu_checkpointing` recomputes blocks, unless
    `activation_checkpointing` says how.
    """
    translate_options(options)
    section = _take(options, DeepSpeedConfig)
    translate_offload(section)
    if stage is not None:
        section["zero_stage"] = stage
    if section.get("cpu_checkpointing"):
        options.setdefault("activation_checkpointing", "full")
    not_in_force: Mapping[str, str] = {}
    if config is not None and _is_deepspeed_json(config):
        world = options.setdefault("world", detect())
        section, not_in_force = _with_json(config, section, world, options.get("mixed_precision", "fp32"))
        config = None
    sections = {"deepspeed": section}
    return _from_options(
        DeepSpeedStrategy, "deepspeed", sections, options, DeepSpeedConfig, config, not_in_force=not_in_force
    )


def _is_deepspeed_json(config: Any) -> bool:
    """Returns whether a config is DeepSpeed's, and not one of shoal's."""
    if isinstance(config, str | os.PathLike):
        return Path(config).suffix not in (".yaml", ".yml")
    return isinstance(config, Mapping) and not config.keys() & {"distributed", "training", "experiment", "strategy"}


def _with_json(
    config: Any, section: dict[str, Any], world: World, precision: str
) -> tuple[dict[str, Any], Mapping[str, str]]:
    """Returns the options of a DeepSpeed JSON with those of `section`, and the keys of the JSON that have no effect."""
    content, place = (
        (dict(config), "DeepSpeedStrategy(config=...)")
        if isinstance(config, Mapping)
        else (
            read_json(config),
            f"distributed.deepspeed.config_file {config}",
        )
    )
    if "zero_stage" in section and isinstance(zero := content.get("zero_optimization", {}), Mapping):
        content["zero_optimization"] = {"stage": section["zero_stage"], **zero}
    fitted = fit_json(content, None, world.size, place, precision)
    for key, value in section.items():
        if fitted.options.get(key, value) != value:
            name = "stage" if key == "zero_stage" else key
            raise UserError(
                f"DeepSpeedStrategy({name}={value!r}): {place} says {fitted.options[key]!r}; leave one of them out"
            )
    return {**section, **fitted.options}, fitted.idle


def _take(options: dict[str, Any], section: type[BaseModel]) -> dict[str, Any]:
    """Removes the keys of a config section from the options, and returns them."""
    return {key: options.pop(key) for key in section.model_fields.keys() & options.keys()}


def _from_options(
    preset: Callable[..., DistributedStrategy],
    strategy: str,
    sections: dict[str, Any],
    options: dict[str, Any],
    section: type[BaseModel] | None = None,
    config: Any = None,
    not_in_force: Mapping[str, str] | None = None,
    policy: WrapPolicy | None = None,
) -> DistributedStrategy:
    """Builds the strategy of a preset. `options` are those that all presets take; `section` has the keys of its own.

    `config` is what the options are merged over, if the user gave one.
    """
    name, common = preset.__name__, (*_TRAINING, *_RUN)
    sections = {key: value for key, value in sections.items() if value is not _NOT_GIVEN}
    if unknown := options.keys() - {*common}:
        key, of_section = min(unknown), section.model_fields if section else ()
        own = signature(preset).parameters.keys() - {"options"}
        meant = get_close_matches(key, (*common, *of_section, *own), n=1)
        raise TypeError(f"{name} has no option {key!r}" + (f"; did you mean {meant[0]!r}?" if meant else ""))
    of_training = {key: options[key] for key in _TRAINING if key in options}
    world: World = options.get("world") or detect()
    if config is not None:
        of_run = {key: options[key] for key in ("seed", "deterministic") if key in options}
        sections |= {key: options[key] for key in ("backend", "timeout") if key in options}
        merged: dict[str, Any] = {
            "training": of_training,
            "experiment": of_run,
            "distributed": {"strategy": strategy, **sections},
        }
        return _with_policy(from_any_config(config, world, **merged), policy)
    try:
        training = TrainingConfig(max_steps=1, **of_training)
        distributed = DistributedConfig(strategy=strategy, **sections)  # type: ignore[arg-type]
    except ValidationError as error:
        raise UserError(_explain(name, error)) from None
    layout = layout_of(training, distributed, world.size, world.local_size, options.get("deterministic", False))
    if not_in_force:
        layout.not_in_force.update(not_in_force)  # type: ignore[attr-defined]
    run = {key: options.get(key, default) for key, default in (("seed", 0), ("backend", "auto"), ("timeout", 1800))}
    return _with_policy(_build(layout, world, training.device, **run), policy)


def _with_policy(strategy: DistributedStrategy, policy: WrapPolicy | None) -> DistributedStrategy:
    """Gives a strategy a wrap policy, which is a function and so cannot be in its layout."""
    if policy is not None and isinstance(strategy, NativeStrategy):
        strategy._wrap_policy = policy
        if strategy.layout.engine == "plain":
            strategy.layout.not_in_force["auto_wrap_policy"] = "nothing is sharded on one process"  # type: ignore[index]
    return strategy


def _explain(name: str, error: ValidationError) -> str:
    """Returns pydantic's first complaint in terms of the preset's options."""
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ").replace("deepspeed.", "").replace("zero_stage: ", "stage=")
    keys = [str(part) for part in first["loc"] if part not in ("ddp", "fsdp", "deepspeed", "tensor", "pipeline")]
    if not keys:
        return f"{name}: {message}"
    key = "stage" if keys[0] == "zero_stage" else ".".join(keys)
    return f"{name}({key}={first['input']!r}): {message}"
