"""Writes and reads the checkpoints of a model in its place, for `Loop` and for a strategy's own methods."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoal.checkpoint import Checkpoint, DamagedCheckpoint, open_checkpoint, write_checkpoint
from shoal.checkpoint.latest import check_same_model, named_checkpoint
from shoal.checkpoint.manifest import MANIFEST, tied_and_buffers
from shoal.checkpoint.peers import ALL, ALONE
from shoal.checkpoint.regions import held_of
from shoal.checkpoint.trees import read_tree
from shoal.errors import UserError
from shoal.strategies.contract import DistributedStrategy
from shoal.strategies.module_state import ModuleState
from shoal.strategies.state import (
    check_jsonable,
    check_same_optimizers,
    collect_state,
    optimizer_settings,
    restore_settings,
    restore_state,
)
from shoal.tensors import named_tensors
from shoal.torch_private import uncompiled
from shoal.types import TrainState

_SAME_MODEL = "build the model it was saved from"


def find_placed(strategy: DistributedStrategy, model: nn.Module) -> nn.Module | None:
    """Returns the plain model inside `model`, which is itself, or what `Loop.wrap` returned; None for other models."""
    if strategy._engine is None:
        return None
    engine = strategy.engine
    wraps = isinstance(engine, DistributedDataParallel) or strategy.layout.engine == "deepspeed"
    plain: nn.Module = engine.module if wraps else engine  # type: ignore[assignment]
    return plain if uncompiled(model) in (engine, plain) else None


def placed_model(strategy: DistributedStrategy, model: nn.Module) -> nn.Module:
    """As `find_placed`, and refuses other models."""
    if strategy._engine is None:
        raise UserError(
            "the strategy has no model yet; call loop.wrap(model, build_optimizer), or strategy.prepare, first"
        )
    if (plain := find_placed(strategy, model)) is None:
        raise UserError(
            f"this {type(model).__name__} is not the model that the strategy has; give the one that loop.wrap, or "
            "strategy.prepare, returned"
        )
    return plain


def is_replicated(strategy: DistributedStrategy) -> bool:
    """Returns whether every rank has the whole model, so that rank 0 can write it alone."""
    return strategy.layout.engine in ("plain", "ddp") and not strategy.layout.is_sharded_family


def save(
    strategy: DistributedStrategy,
    path: Path,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    state: dict[str, Any],
) -> None:
    """Writes the folder `path`, which appears whole or not at all; `state` is anything that JSON can hold.

    Where every rank has the whole model, rank 0 writes alone, and the other ranks need not call it.
    """
    check_jsonable("state", state)
    model, replicated = placed_model(strategy, model), is_replicated(strategy)
    if replicated and not strategy.is_main_process:
        return
    if not replicated and strategy._roll_call is not None:
        strategy._roll_call.wait(f"save({path})", "every rank has a part of the model, so ")
    occupied = path.exists() and not (path / MANIFEST).exists() and (path.is_file() or any(path.iterdir()))
    if occupied if replicated else strategy.any_rank(occupied):  # a save replaces only a checkpoint
        raise UserError(f"save: {path} exists and is not a checkpoint; choose another folder")
    settings: Any = [optimizer_settings(optimizer) for optimizer in optimizers]
    about = {
        "layout": strategy.layout.as_dict(),
        **tied_and_buffers(model),
        "optimizer": settings[0] if len(settings) == 1 else settings,
    }
    # Rank 0 alone takes part in no collectives; every step starts with its buffers.
    strategy._module_state.check()
    collect = partial(collect_state, own=strategy._own_state()) if replicated else strategy.state
    states = [collect(model, optimizer) for optimizer in optimizers]
    moments = {name: slots for one in states for name, slots in one.optimizer.items()}
    collected = TrainState(states[0].model, moments, states[0].strategy)
    write_checkpoint(path, collected, state, about, ALONE if replicated else ALL)


def load(
    strategy: DistributedStrategy,
    path: Path,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    weights_only: bool = False,
    with_weights: bool = True,
) -> dict[str, Any]:
    """Puts back weights, optimizer state and learning rates, saved in any layout; returns the `state` of that save.

    Only weights, or all but weights, if the last two arguments say so. All ranks call it. Raises UserError if it is of
    another model or optimizer, DamagedCheckpoint if any rank cannot read it; nothing is changed then.
    """
    model = placed_model(strategy, model)
    if strategy._roll_call is not None:
        strategy._roll_call.wait(f"load({path})")
    path = named_checkpoint(path)
    problem: Exception | None = None
    if not strategy.any_rank(path.is_dir()):
        raise UserError(f"load: there is no folder {path}")
    held = strategy.held()
    try:
        checkpoint = open_checkpoint(path)
        unknown = [None] * len(optimizers)  # a run of `shoal train` has its config instead
        settings = unknown if weights_only else checkpoint.manifest.get("optimizer") or unknown
        by_optimizer = settings if isinstance(settings, list) else [settings]
        check_same_model(checkpoint, {name: [*one.shape] for name, one in held.items()}, _SAME_MODEL)
        check_same_optimizers(optimizers, by_optimizer, path)
        loaded = checkpoint.checked_state(held, with_base=True)
    except (DamagedCheckpoint, UserError) as error:
        problem = error
    if strategy.any_rank(problem is not None):  # all ranks load it or none does
        raise problem or DamagedCheckpoint(f"{path}: another rank cannot read it")
    if weights_only:
        loaded = TrainState(loaded.model, {}, {})
    if not with_weights:
        loaded = TrainState({}, loaded.optimizer, loaded.strategy)
    for optimizer, stored in zip(optimizers, by_optimizer, strict=True):
        strategy.load_state(model, optimizer, loaded)
        restore_settings(optimizer, stored)
    if not optimizers:
        strategy.load_state(model, None, loaded)
    return checkpoint.trainer


def load_plain(path: Path, model: nn.Module) -> dict[str, Any]:
    """Loads the weights of a checkpoint into a model that no strategy has prepared; returns the `state` of the save."""
    checkpoint, tensors = _open(path), named_tensors(model)
    check_same_model(checkpoint, {name: [*tensor.shape] for name, tensor in tensors.items()}, _SAME_MODEL)
    loaded = checkpoint.checked_state(held_of(tensors), with_base=True)
    restore_state(model, None, {}, loaded)
    ModuleState(model, ()).set_extra_state(loaded.strategy)
    return checkpoint.trainer


def read(path: Path) -> dict[str, Any]:
    """Returns the `state` that a checkpoint was saved with, and with it all of its tensors on the CPU."""
    checkpoint = _open(path)
    if (tree := read_tree(checkpoint)) is not None:
        return tree
    state = checkpoint.read()
    return {**checkpoint.trainer, "model": state.model, "optimizer": state.optimizer}


def _open(path: Path) -> Checkpoint:
    path = named_checkpoint(path)
    if not path.is_dir():
        raise UserError(f"load: there is no folder {path}")
    return open_checkpoint(path)
