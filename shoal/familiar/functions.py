"""Plain functions for scripts that come from plain PyTorch; docs/plain_pytorch.md says which call each one replaces.

They keep one process group, and one strategy and `Loop` for every model that they wrap. A new script is shorter with
these two objects themselves: `with DDPStrategy() as strategy: loop = Loop(strategy)`.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import nn
from torch.optim import Optimizer

from shoal.checkpoint import CheckpointManager, DamagedCheckpoint
from shoal.checkpoint.folders import checkpoint_folders
from shoal.config.schema_distributed import DDPConfig, FSDPConfig
from shoal.errors import UserError, printable
from shoal.processes.detect import detect, world_by_number
from shoal.seeding import mix
from shoal.strategies import DDPStrategy, DistributedStrategy, FSDPStrategy, Loop
from shoal.torch_private import uncompiled

_options: dict[str, Any] = {}
_strategies: list[DistributedStrategy] = []  # that of setup_distributed, then one for every model
_loops: list[Loop] = []


class Ranks(NamedTuple):
    """Which process this is: `rank, world_size, local_rank = setup_distributed()`."""

    rank: int
    """The number of this process, from 0."""
    world_size: int
    """The number of processes."""
    local_rank: int
    """The number of this process among those of its machine, which is the number of its GPU."""


def setup_distributed(rank: int | None = None, world_size: int | None = None, **options: Any) -> Ranks:
    """Joins the processes that torchrun started, or stays alone; returns `(rank, world_size, local_rank)`.

    With `rank` and `world_size` it joins processes that a script numbers itself, such as those of
    torch.multiprocessing.spawn, at MASTER_ADDR and MASTER_PORT (default: port 29500 of this machine). The options are
    those of DDPStrategy, such as device and backend.
    """
    global _options
    if rank is not None and not isinstance(rank, int):
        raise TypeError(f"setup_distributed({rank!r:.60}): the first argument is a rank; write backend=… or device=…")
    if (rank is None) != (world_size is None):
        raise TypeError("setup_distributed: give rank and world_size, or neither: setup_distributed(rank, world_size)")
    if _strategies:
        raise UserError("setup_distributed was called before; call cleanup_distributed() first")
    if rank is not None and world_size is not None:
        options["world"] = world_by_number(rank, world_size)
    strategy = DDPStrategy(**options)
    strategy.setup()
    _strategies.append(strategy)
    _options = options
    return ranks()


def ranks() -> Ranks:
    """Returns which process this is, after setup_distributed."""
    world = _set_up().world
    return Ranks(world.rank, world.size, world.local_rank)


def is_set_up() -> bool:
    """Returns whether setup_distributed was called."""
    return bool(_strategies)


def cleanup_distributed() -> None:
    """Leaves the process group. Does nothing if setup_distributed was not called."""
    _loops.clear()
    while _strategies:
        _strategies.pop().teardown()


def get_rank() -> int:
    """Returns the number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else detect().rank


def get_world_size() -> int:
    """Returns the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else detect().size


def is_main_process() -> bool:
    """Returns True on rank 0, which prints and writes."""
    return get_rank() == 0


def wrap_model_ddp(model: nn.Module, device: torch.device | str | int | None = None, **options: Any) -> nn.Module:
    """Returns the model on its device, in DistributedDataParallel if there are several processes.

    Build the optimizer from the module that it returns. `device` is this rank's, such as `cuda:1` or its local rank,
    and may be left out. The options are those of DDPStrategy.
    """
    return _wrap(DDPStrategy, DDPConfig, model, options | _device_option(device))


def wrap_model_fsdp(model: nn.Module, auto_wrap_policy: Any = None, **options: Any) -> nn.Module:
    """Returns the model sharded by fully_shard. Build the optimizer from it; the options are those of FSDPStrategy.

    `auto_wrap_policy` is a set of module classes, `transformer_based`, `size_based`, or a policy of torch's first FSDP.
    """
    if auto_wrap_policy is not None:
        options["auto_wrap_policy"] = auto_wrap_policy
    return _wrap(FSDPStrategy, FSDPConfig, model, options)


def get_loop(model: nn.Module) -> Loop:
    """Returns the Loop of a wrapped model: for autocast, accumulation, clipping, and steps with the loss scale of fp16.

    `model` is what wrap_model_ddp or wrap_model_fsdp returned, also after torch.compile, or the plain model.
    """
    for loop in _loops:
        if uncompiled(model) in (loop.model, loop.strategy.engine):
            return loop
    raise UserError("this model was not wrapped by wrap_model_ddp or wrap_model_fsdp; wrap it first")


def save_checkpoint_distributed(
    model: nn.Module,
    optimizer: Optimizer,
    scaler: Any,
    step: int,
    checkpoint_manager: CheckpointManager,
    **state: Any,
) -> Path:
    """Saves a step of a wrapped model in the folder of a CheckpointManager, and returns the path of the checkpoint.

    Any number of processes can load it. `scaler` is a torch.amp.GradScaler, or None; `state` is anything that JSON can
    hold. Under DDP rank 0 writes, and the other ranks may call it or not; under FSDP every rank calls it.
    """
    if not isinstance(model, nn.Module) or not isinstance(checkpoint_manager, CheckpointManager):
        raise TypeError(
            "save_checkpoint_distributed: call it with (model, optimizer, scaler, step, checkpoint_manager), such as "
            "CheckpointManager('out'); to save to a path, call get_loop(model).save(path, step=step)"
        )
    if scaler is not None:
        state["scaler"] = scaler.state_dict()
    loop = _loop_with(model, optimizer)
    return checkpoint_manager.save(loop.strategy, step, model=loop.model, optimizer=optimizer, **state)


def load_checkpoint_distributed(
    model: nn.Module, optimizer: Optimizer | None, scaler: Any, checkpoint_path: str | Path
) -> int:
    """Loads a checkpoint into a wrapped model, its optimizer and a GradScaler or None; returns its step.

    `checkpoint_path` may also be `OUTPUT_DIR/last` or `OUTPUT_DIR/best`. Without an optimizer the weights alone are
    loaded. Every rank calls it.
    """
    if not isinstance(model, nn.Module):
        raise TypeError("load_checkpoint_distributed: call it with (model, optimizer, scaler, checkpoint_path)")
    loop = get_loop(model)
    if optimizer is not None:
        loop.add(optimizer)
    state = loop.strategy.load_checkpoint(checkpoint_path, loop.model, optimizer)
    if scaler is not None and "scaler" in state:
        scaler.load_state_dict(state["scaler"])
    return int(state.get("step", 0))


def auto_resume(config: Any, model: Any, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Loads the last good checkpoint of an output folder and returns its `state`; {} if there is none.

    `auto_resume(output_dir, model, optimizer)` loads it into a wrapped model. `auto_resume(config, trainer)` calls
    `trainer.load_checkpoint(path)`; `config` is the folder, or a dict or an object that has `output_dir`.
    """
    output_dir = _output_dir(config)
    if hasattr(model, "load_checkpoint") and optimizer is None:
        return _resume_by(output_dir, lambda path: model.load_checkpoint(path) or {"checkpoint": str(path)})
    if optimizer is None:
        raise TypeError(
            f"auto_resume: a {type(model).__name__} has no load_checkpoint; call auto_resume(output_dir, model, "
            "optimizer), or auto_resume(config, trainer)"
        )
    return resume(output_dir, _loop_with(model, optimizer))


def resume(output_dir: str | Path, loop: Loop) -> dict[str, Any]:
    """Loads the last good checkpoint under `output_dir` into a Loop and returns its `state`; {} if there is none."""
    return _resume_by(output_dir, loop.load)


def seed_everything(seed: int, *place: int | str, workers: bool = True) -> int:
    """Seeds Python, NumPy and torch from `seed` and, if given, a place in the run such as (step, rank).

    The worker processes of a DataLoader are seeded, too: torch makes their seeds from this one. `workers` is accepted
    because Lightning has it, and can only be True.
    """
    if not workers:
        raise UserError("seed_everything(workers=False): torch seeds the workers of a DataLoader always; leave it out")
    seed = mix(seed, *place) if place else seed
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
    return seed


def _set_up() -> DistributedStrategy:
    if not _strategies:
        raise UserError("call shoal.distributed.setup_distributed() first")
    return _strategies[0]


def _wrap(
    preset: Callable[..., DistributedStrategy], section: type[BaseModel], model: nn.Module, options: dict[str, Any]
) -> nn.Module:
    """Wraps the model by a strategy in the process group that exists, with the options of setup_distributed."""
    world = _set_up().world  # whose process group is ours to leave
    only_ddp = DDPConfig.model_fields.keys() - section.model_fields.keys()
    kept = {name: value for name, value in _options.items() if name not in only_ddp}
    strategy = preset(**kept | options | {"world": world})
    strategy.setup()
    _strategies.append(strategy)
    loop = Loop(strategy)
    (module,) = loop.wrap(model)
    _loops.append(loop)
    return module


def _device_option(device: torch.device | str | int | None) -> dict[str, str]:
    """Returns the option `device` for the device that a script names; refuses a GPU that is not this rank's."""
    if device is None:
        return {}
    named = torch.device("cuda" if isinstance(device, int) else device)
    number = device if isinstance(device, int) else named.index
    own = _set_up().device
    if number is not None and named.type == own.type and own.index not in (None, number):
        raise UserError(f"device = {device}: the GPU of this rank is {own}; leave it out, or use local_rank")
    if isinstance(device, int) and own.type == "cpu":  # `wrap_model_ddp(model, rank)` on a machine without GPUs
        return {}
    return {"device": named.type}


def _output_dir(config: Any) -> str | Path:
    """Returns the output folder that a script's config names, in one of the usual places."""
    if isinstance(config, str | os.PathLike):
        return Path(config)
    for place in ((), ("experiment",), ("checkpoint",), ("training",)):
        found = config
        for key in (*place, "output_dir"):
            found = found.get(key) if isinstance(found, Mapping) else getattr(found, key, None)
        if isinstance(found, str | os.PathLike):
            return Path(found)
    raise TypeError(f"auto_resume: this {type(config).__name__} has no output_dir; give the folder itself")


def _resume_by(output_dir: str | Path, load: Callable[[Path], Any]) -> Any:
    """Calls `load` with the last checkpoint, or with one before it if that is damaged; returns what it returns."""
    damages: list[str] = []
    for path in reversed(checkpoint_folders(output_dir)):
        try:
            return load(path)
        except DamagedCheckpoint as damage:
            damages.append(str(damage))
            if is_main_process():
                print(printable(f"checkpoint {path.name} is damaged and passed over: {damage}"), file=sys.stderr)
    if damages:
        raise UserError(
            f"output_dir = {str(output_dir)!r}: all {len(damages)} checkpoints are damaged ({damages[0]}); move them "
            "away or choose another folder"
        )
    return {}


def _loop_with(model: nn.Module, optimizer: Optimizer) -> Loop:
    """Returns the loop of a wrapped model, after the optimizer has joined it."""
    loop = get_loop(model)
    loop.add(optimizer)
    return loop
