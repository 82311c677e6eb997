"""Plain functions for scripts that come from plain PyTorch; docs/plain_pytorch.md says which replaces what.

They are thin over a strategy and a loop, one of each per process. A new script is better off with those themselves:
`with DDPStrategy() as strategy: loop = Loop(strategy)`.
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

from shoal.checkpoint import DamagedCheckpoint, find_latest_checkpoint, step_folder, step_folders
from shoal.config.schema_distributed import DDPConfig, FSDPConfig
from shoal.errors import UserError
from shoal.launch.spawn import run_function
from shoal.processes.detect import detect
from shoal.seeding import mix
from shoal.strategies import DDPStrategy, DistributedStrategy, FSDPStrategy, Loop
from shoal.torch_private import uncompiled

__all__ = [
    "auto_resume",
    "checkpoint_path",
    "cleanup_distributed",
    "find_latest_checkpoint",
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
_strategy: DistributedStrategy | None = None  # one for the process, like torch's own default process group
_loop: Loop | None = None


def setup_distributed(**options: Any) -> DistributedStrategy:
    """Joins the processes that torchrun started, or stays alone; takes the options of DDPStrategy, such as device."""
    global _strategy, _options
    if _strategy is not None:
        raise UserError("setup_distributed was called before; call cleanup_distributed() first")
    _strategy = DDPStrategy(**options)
    _strategy.setup()
    _options = options
    return _strategy


def cleanup_distributed() -> None:
    """Leaves the process group; does nothing where there is none."""
    global _strategy, _loop
    if _strategy is not None:
        _strategy.teardown()
        _strategy = _loop = None


def get_rank() -> int:
    """This process's number among all, from 0; 0 where there is one."""
    return dist.get_rank() if dist.is_initialized() else detect().rank


def get_world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else detect().size


def is_main_process() -> bool:
    """Whether this is rank 0, which prints and writes."""
    return get_rank() == 0


def wrap_model_ddp(model: nn.Module, **options: Any) -> nn.Module:
    """Returns the model on its device, in DistributedDataParallel if there are several processes.

    Build the optimizer from what it returns. The options are DDPStrategy's.
    """
    return _wrap(DDPStrategy, DDPConfig, model, options)


def wrap_model_fsdp(model: nn.Module, **options: Any) -> nn.Module:
    """Returns the model sharded by fully_shard; otherwise as `wrap_model_ddp`, with FSDPStrategy's options."""
    return _wrap(FSDPStrategy, FSDPConfig, model, options)


def save_checkpoint_distributed(path: str | Path, model: nn.Module, optimizer: Optimizer, **state: Any) -> None:
    """Writes a folder that opens on any number of processes; `state` is anything that JSON can hold.

    Under DDP rank 0 writes, and the other ranks may call it or not; under FSDP every rank calls it.
    """
    _loop_of(model, optimizer).save(path, **state)


def load_checkpoint_distributed(path: str | Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Puts a checkpoint into model and optimizer and returns the `state` it was saved with; every rank calls it."""
    return _loop_of(model, optimizer).load(path)


def checkpoint_path(output_dir: str | Path, step: int) -> Path:
    """Where `find_latest_checkpoint` and `auto_resume` look for the checkpoint of a step."""
    return step_folder(output_dir, step)


def auto_resume(output_dir: str | Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Loads the last good checkpoint under `output_dir` and returns its `state`; {} if there is none."""
    return resume(output_dir, _loop_of(model, optimizer))


def resume(output_dir: str | Path, loop: Loop) -> dict[str, Any]:
    """Does the same for a loop."""
    damages: list[str] = []
    for path in reversed(step_folders(output_dir)):
        try:
            return loop.load(path)
        except DamagedCheckpoint as damage:
            damages.append(str(damage))
            if loop.strategy.is_main_process:
                print(f"checkpoint {path.name} is damaged and passed over: {damage}", file=sys.stderr)
    if damages:
        raise UserError(
            f"auto_resume: none of the {len(damages)} checkpoints in {output_dir} can be used ({damages[0]}); "
            "move them away or choose another folder"
        )
    return {}


def launch_distributed(
    function: Callable[..., Any], *args: Any, processes: int = 2, start_method: str = "auto"
) -> list[Any]:
    """Runs `function(*args)` in processes of this machine; returns its results by rank or raises the first error."""
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
    """Wraps the model by another strategy in the process group that is there, with the options of setup_distributed."""
    global _strategy, _loop
    if _strategy is None:
        raise UserError("call shoal.distributed.setup_distributed() first")
    ddp_alone = DDPConfig.model_fields.keys() - section.model_fields.keys()
    kept = {name: value for name, value in _options.items() if name not in ddp_alone}
    _strategy = preset(**kept | options | {"world": _strategy.world})  # in which the group is ours to leave
    _strategy.setup()
    _loop = Loop(_strategy)
    (module,) = _loop.wrap(model)
    return module


def _loop_of(model: nn.Module, optimizer: Optimizer) -> Loop:
    if _loop is None or uncompiled(model) not in (_loop.model, _loop.strategy.engine):
        raise UserError("this model was not wrapped by wrap_model_ddp or wrap_model_fsdp; wrap it first")
    _loop.add(optimizer)
    return _loop
