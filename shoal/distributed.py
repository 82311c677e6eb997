"""Plain functions for scripts that come from plain PyTorch; docs/plain_pytorch.md says which replaces what.

They are thin over a strategy, which `setup_distributed` makes and returns. A new script is better off with the
strategy itself: `with DDPStrategy() as strategy:`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shoal.checkpoint import DamagedCheckpoint, find_latest_checkpoint, step_folder, step_folders
from shoal.errors import UserError
from shoal.launch.spawn import run_function
from shoal.processes.world import World
from shoal.seeding import mix
from shoal.strategies import DDPStrategy, DistributedStrategy, FSDPStrategy

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
    "save_checkpoint_distributed",
    "seed_everything",
    "setup_distributed",
    "wrap_model_ddp",
    "wrap_model_fsdp",
]

_options: dict[str, Any] = {}
_strategy: DistributedStrategy | None = None  # one for the process, like torch's own default process group


def setup_distributed(**options: Any) -> DDPStrategy:
    """Joins the processes torchrun started, or stays alone; takes the options of DDPStrategy, such as device."""
    global _strategy, _options
    if _strategy is not None:
        raise UserError("setup_distributed was called before; call cleanup_distributed() first")
    strategy = DDPStrategy(**options)
    strategy.setup()
    _strategy, _options = strategy, options
    return strategy


def cleanup_distributed() -> None:
    """Leaves the process group; does nothing where there is none."""
    global _strategy
    if _strategy is not None:
        _strategy.teardown()
        _strategy = None


def get_rank() -> int:
    """This process's number among all, from 0; 0 where there is one."""
    return dist.get_rank() if dist.is_initialized() else World.from_environment().rank


def get_world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else World.from_environment().size


def is_main_process() -> bool:
    """Whether this is rank 0, which prints and writes."""
    return get_rank() == 0


def wrap_model_ddp(model: nn.Module, **options: Any) -> nn.Module:
    """The model on its device, in DistributedDataParallel if there are several processes; DDPStrategy's options."""
    return _go_over_to(DDPStrategy, options).wrap_model(model)


def wrap_model_fsdp(model: nn.Module, **options: Any) -> nn.Module:
    """The model sharded by fully_shard; FSDPStrategy's options. Build the optimizer after it, not before."""
    return _go_over_to(FSDPStrategy, options).wrap_model(model)


def save_checkpoint_distributed(path: str | Path, model: nn.Module, optimizer: Optimizer, **state: Any) -> None:
    """Writes a checkpoint that opens on any number of processes; every rank calls it, and `state` is JSON."""
    _running().save_checkpoint(path, model, optimizer, **state)


def load_checkpoint_distributed(path: str | Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Puts a checkpoint into model and optimizer and returns the `state` it was saved with; every rank calls it."""
    return _running().load_checkpoint(path, model, optimizer)


def checkpoint_path(output_dir: str | Path, step: int) -> Path:
    """Where `find_latest_checkpoint` and `auto_resume` look for the checkpoint of a step."""
    return step_folder(output_dir, step)


def auto_resume(
    output_dir: str | Path, model: nn.Module, optimizer: Optimizer, strategy: DistributedStrategy | None = None
) -> dict[str, Any]:
    """Loads the last good checkpoint under `output_dir` and returns its `state`; {} if there is none."""
    strategy = strategy or _running()
    damages: list[str] = []
    for path in reversed(step_folders(output_dir)):
        try:
            return strategy.load_checkpoint(path, model, optimizer)
        except DamagedCheckpoint as damage:
            damages.append(str(damage))
            if strategy.is_main_process:
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


def _go_over_to(kind: type[DistributedStrategy], options: dict[str, Any]) -> DistributedStrategy:
    """Another strategy in the process group that is there."""
    global _strategy
    _running()
    common = signature(DistributedStrategy.__init__).parameters  # those of setup_distributed's that any kind takes
    kept = {name: value for name, value in _options.items() if name in common or kind is DDPStrategy}
    _strategy = kind(**kept | options)
    _strategy.setup()
    return _strategy


def _running() -> DistributedStrategy:
    if _strategy is None:
        raise UserError("call shoal.distributed.setup_distributed() first")
    return _strategy
