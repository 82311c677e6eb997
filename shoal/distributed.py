"""Plain functions for scripts that come from plain PyTorch; docs/plain_pytorch.md says which call each one replaces.

They keep one process group, and one strategy and `Loop` for every model that they wrap. A new script is shorter with
these two objects themselves: `with DDPStrategy() as strategy: loop = Loop(strategy)`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import nn
from torch.optim import Optimizer

from shoal.checkpoint import DamagedCheckpoint, find_latest_checkpoint, step_folders
from shoal.checkpoint import step_folder as checkpoint_path
from shoal.config.schema_distributed import DDPConfig, FSDPConfig
from shoal.errors import UserError, printable
from shoal.launch.spawn import run_function
from shoal.parallel.compression.gradient_compressor import GradientCompressor
from shoal.processes.detect import detect
from shoal.seeding import mix
from shoal.strategies import DDPStrategy, DistributedStrategy, FSDPStrategy, Loop
from shoal.torch_private import uncompiled

__all__ = [
    "GradientCompressor",
    "auto_resume",
    "checkpoint_path",
    "cleanup_distributed",
    "find_latest_checkpoint",
    "get_loop",
    "get_rank",
    "get_world_size",
    "is_main_process",
    "launch_distributed",
    "load_checkpoint_distributed",
    "resume",
    "save_checkpoint_distributed",
    "seed_everything",
    "setup_distributed",
    "wrap_model_ddp",
    "wrap_model_fsdp",
]

_options: dict[str, Any] = {}
_strategies: list[DistributedStrategy] = []  # that of setup_distributed, then one for every model
_loops: list[Loop] = []


def setup_distributed(**options: Any) -> DistributedStrategy:
    """Joins the processes that torchrun started, or stays alone; takes the options of DDPStrategy, such as device."""
    global _options
    if _strategies:
        raise UserError("setup_distributed was called before; call cleanup_distributed() first")
    strategy = DDPStrategy(**options)
    strategy.setup()
    _strategies.append(strategy)
    _options = options
    return strategy


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


def wrap_model_ddp(model: nn.Module, **options: Any) -> nn.Module:
    """Returns the model on its device, in DistributedDataParallel if there are several processes.

    Build the optimizer from the module that it returns. The options are those of DDPStrategy.
    """
    return _wrap(DDPStrategy, DDPConfig, model, options)


def wrap_model_fsdp(model: nn.Module, **options: Any) -> nn.Module:
    """Returns the model sharded by fully_shard. Build the optimizer from it; the options are those of FSDPStrategy."""
    return _wrap(FSDPStrategy, FSDPConfig, model, options)


def get_loop(model: nn.Module) -> Loop:
    """Returns the Loop of a wrapped model: for autocast, accumulation, clipping, and steps with the loss scale of fp16.

    `model` is what wrap_model_ddp or wrap_model_fsdp returned, also after torch.compile, or the plain model.
    """
    for loop in _loops:
        if uncompiled(model) in (loop.model, loop.strategy.engine):
            return loop
    raise UserError("this model was not wrapped by wrap_model_ddp or wrap_model_fsdp; wrap it first")


def save_checkpoint_distributed(path: str | Path, model: nn.Module, optimizer: Optimizer, **state: Any) -> None:
    """Writes a folder that any number of processes can load; `state` is anything that JSON can hold.

    Under DDP rank 0 writes, and the other ranks may call it or not; under FSDP every rank calls it.
    """
    _loop_with(model, optimizer).save(path, **state)


def load_checkpoint_distributed(path: str | Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Loads a checkpoint into model and optimizer and returns the `state` it was saved with. Every rank calls it."""
    return _loop_with(model, optimizer).load(path)


def auto_resume(output_dir: str | Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Loads the last good checkpoint under `output_dir` and returns its `state`; {} if there is none."""
    return resume(output_dir, _loop_with(model, optimizer))


def resume(output_dir: str | Path, loop: Loop) -> dict[str, Any]:
    """Loads the last good checkpoint under `output_dir` into a Loop and returns its `state`; {} if there is none."""
    damages: list[str] = []
    for path in reversed(step_folders(output_dir)):
        try:
            return loop.load(path)
        except DamagedCheckpoint as damage:
            damages.append(str(damage))
            if loop.strategy.is_main_process:
                print(printable(f"checkpoint {path.name} is damaged and passed over: {damage}"), file=sys.stderr)
    if damages:
        raise UserError(
            f"output_dir = {str(output_dir)!r}: all {len(damages)} checkpoints are damaged ({damages[0]}); move them "
            "away or choose another folder"
        )
    return {}


def launch_distributed(
    function: Callable[..., Any], *args: Any, processes: int = 2, start_method: str = "auto"
) -> list[Any]:
    """Runs `function(*args)` in processes of this machine; returns its results by rank or raises the first error.

    The function may be defined in a cell of a notebook. `start_method` is `spawn`, `fork`, or `auto`: `spawn` if a new
    process can import the function, else `fork`, or `spawn` with the function sent by value if this process uses CUDA.
    """
    return run_function(function, args, processes, start_method)


def seed_everything(seed: int, *place: int | str) -> int:
    """Seeds Python, NumPy and torch from `seed` and, if given, a place in the run such as (step, rank)."""
    seed = mix(seed, *place) if place else seed
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
    return seed


def _wrap(
    preset: Callable[..., DistributedStrategy], section: type[BaseModel], model: nn.Module, options: dict[str, Any]
) -> nn.Module:
    """Wraps the model by a strategy in the process group that exists, with the options of setup_distributed."""
    if not _strategies:
        raise UserError("call shoal.distributed.setup_distributed() first")
    only_ddp = DDPConfig.model_fields.keys() - section.model_fields.keys()
    kept = {name: value for name, value in _options.items() if name not in only_ddp}
    strategy = preset(**kept | options | {"world": _strategies[0].world})  # whose process group is ours to leave
    strategy.setup()
    _strategies.append(strategy)
    loop = Loop(strategy)
    (module,) = loop.wrap(model)
    _loops.append(loop)
    return module


def _loop_with(model: nn.Module, optimizer: Optimizer) -> Loop:
    """Returns the loop of a wrapped model, after the optimizer has joined it."""
    loop = get_loop(model)
    loop.add(optimizer)
    return loop
