"""Strategies by name: from a config, or in Python by the name and options that people know."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from inspect import signature
from typing import Any

from pydantic import BaseModel, ValidationError

from shoal.config.deepspeed_json import fit_json, read_json
from shoal.config.layout import Layout, layout_of
from shoal.config.schema import Config, TrainingConfig
from shoal.config.schema_distributed import DDPConfig, DeepSpeedConfig, DistributedConfig, FSDPConfig
from shoal.errors import UserError
from shoal.processes.detect import detect
from shoal.processes.world import World
from shoal.strategies.contract import DistributedStrategy
from shoal.strategies.deepspeed import ZeroStrategy
from shoal.strategies.native import NativeStrategy

_TRAINING = (
    "device",
    "mixed_precision",
    "tf32",
    "compile",
    "activation_checkpointing",
    "loss_chunks",
    "sync_batch_norm",
)
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


def _build(layout: Layout, world: World, device: str, seed: int, backend: str, timeout: float) -> DistributedStrategy:
    kind = ZeroStrategy if layout.engine == "deepspeed" else NativeStrategy
    return kind(layout, world, device=device, seed=seed, backend=backend, timeout=timeout)


def SingleStrategy(**options: Any) -> DistributedStrategy:
    """One process, one device. `options` are keys of `training` (`device`, `mixed_precision`, `compile` …), `seed`,
    `deterministic`, `backend` and `timeout`; all strategies take these."""
    return _from_options(SingleStrategy, "single", {}, options)


def DDPStrategy(
    *,
    compression: str | Mapping[str, Any] = "none",
    local_sgd: Mapping[str, Any] | None = None,
    **options: Any,
) -> DistributedStrategy:
    """Replicas by torch's DistributedDataParallel, whose options are the keys of `distributed.ddp`.

    `compression` and `local_sgd` are those of `distributed`; a `Loop` takes neither.
    """
    sections = {"ddp": _take(options, DDPConfig), "compression": compression, "local_sgd": local_sgd}
    return _from_options(DDPStrategy, "ddp", sections, options, DDPConfig)


def FSDPStrategy(
    *, mesh: Mapping[str, int] | None = None, compression: str | Mapping[str, Any] = "none", **options: Any
) -> DistributedStrategy:
    """Shards by torch's fully_shard, whose options are the keys of `distributed.fsdp`.

    `compression` is that of `distributed`, for replicas of shards.
    """
    sections = {"fsdp": _take(options, FSDPConfig), "mesh": mesh and dict(mesh), "compression": compression}
    return _from_options(FSDPStrategy, "fsdp", sections, options, FSDPConfig)


def MeshStrategy(
    *, mesh: Mapping[str, int], sequence_parallel: bool = False, schedule: str = "1f1b", **options: Any
) -> DistributedStrategy:
    """Any product of stages, replicas, shards, parts of a sequence and parts of a layer, as `mesh` says."""
    sections = {
        "fsdp": _take(options, FSDPConfig),
        "mesh": dict(mesh),
        "tensor": {"sequence_parallel": sequence_parallel},
        "pipeline": {"schedule": schedule},
    }
    return _from_options(MeshStrategy, "mesh", sections, options, FSDPConfig)


def ThreeDParallelism(
    data_parallel_size: int = -1, pipeline_parallel_size: int = 1, tensor_parallel_size: int = 1, **options: Any
) -> DistributedStrategy:
    """A mesh by the three sizes that people know it by; data parallelism shards, as FSDP does."""
    mesh = {"pp": pipeline_parallel_size, "dp_shard": data_parallel_size, "tp": tensor_parallel_size}
    return MeshStrategy(mesh=mesh, **options)


def DeepSpeedStrategy(
    *,
    stage: int | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    **options: Any,
) -> DistributedStrategy:
    """ZeRO by DeepSpeed, whose options are the keys of `distributed.deepspeed`, or all in a DeepSpeed JSON: `config` is
    its path or its content."""
    section = _take(options, DeepSpeedConfig)
    if stage is not None:
        section["zero_stage"] = stage
    not_in_force: Mapping[str, str] = {}
    if config is not None:
        if section:
            raise UserError("DeepSpeedStrategy(config=...) says what the other options would; leave those out")
        if isinstance(config, Mapping):
            content, place = dict(config), "DeepSpeedStrategy(config=...)"
        else:
            content, place = read_json(config), f"distributed.deepspeed.config_file {config}"
        world = options.setdefault("world", detect())
        fitted = fit_json(content, None, world.size, place, options.get("mixed_precision", "fp32"))
        section, not_in_force = fitted.options, fitted.idle
    return _from_options(DeepSpeedStrategy, "deepspeed", {"deepspeed": section}, options, DeepSpeedConfig, not_in_force)


def _take(options: dict[str, Any], section: type[BaseModel]) -> dict[str, Any]:
    """Removes the keys of a config section from the options, and returns them."""
    return {key: options.pop(key) for key in section.model_fields.keys() & options.keys()}


def _from_options(
    preset: Callable[..., DistributedStrategy],
    strategy: str,
    sections: dict[str, Any],
    options: dict[str, Any],
    section: type[BaseModel] | None = None,
    not_in_force: Mapping[str, str] | None = None,
) -> DistributedStrategy:
    """Builds the strategy of a preset. `options` are those that all presets take; `section` has the keys of its own."""
    name, common = preset.__name__, (*_TRAINING, *_RUN)
    if unknown := options.keys() - {*common}:
        key, of_section = min(unknown), section.model_fields if section else ()
        own = signature(preset).parameters.keys() - {"options"}
        meant = get_close_matches(key, (*common, *of_section, *own), n=1)
        raise TypeError(f"{name} has no option {key!r}" + (f"; did you mean {meant[0]!r}?" if meant else ""))
    try:
        training = TrainingConfig(max_steps=1, **{key: options[key] for key in _TRAINING if key in options})
        distributed = DistributedConfig(strategy=strategy, **sections)  # type: ignore[arg-type]
    except ValidationError as error:
        raise UserError(_explain(name, error)) from None
    world: World = options.get("world") or detect()
    layout = layout_of(training, distributed, world.size, world.local_size, options.get("deterministic", False))
    if not_in_force:
        layout.not_in_force.update(not_in_force)  # type: ignore[attr-defined]
    run = {key: options.get(key, default) for key, default in (("seed", 0), ("backend", "auto"), ("timeout", 1800))}
    return _build(layout, world, training.device, **run)


def _explain(name: str, error: ValidationError) -> str:
    """Returns pydantic's first complaint in terms of the preset's options."""
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ").replace("deepspeed.", "").replace("zero_stage: ", "stage=")
    keys = [str(part) for part in first["loc"] if part not in ("ddp", "fsdp", "deepspeed", "tensor", "pipeline")]
    if not keys:
        return f"{name}: {message}"
    key = "stage" if keys[0] == "zero_stage" else ".".join(keys)
    return f"{name}({key}={first['input']!r}): {message}"
