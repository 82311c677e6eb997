"""How a run begins: its processes, its folder, and the checkpoint it goes on from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any
from zlib import crc32

from pydantic import ValidationError
from torch import nn
from torch.optim import Optimizer

from shoal.checkpoint import Checkpoint, CheckpointManager, DamagedCheckpoint, open_checkpoint
from shoal.checkpoint.frozen_base import Base
from shoal.checkpoint.init_from import open_weights, weights_for
from shoal.checkpoint.latest import check_same_model, check_same_run, find_start
from shoal.checkpoint.rotation import num_bytes
from shoal.checkpoint.run_lock import Lease, was_restarted
from shoal.config import Run, derive_batches
from shoal.config.batch import derived_values
from shoal.config.mesh import check_layout
from shoal.config.schema import TrainingConfig
from shoal.data import BatchSchedule
from shoal.errors import UserError
from shoal.processes.world import World
from shoal.strategies import DistributedStrategy
from shoal.strategies.state import sharded_parameter
from shoal.training.schedules import SCHEDULING
from shoal.types import BatchPhase, TrainState

COUNTS = ("step", "samples", "skipped_steps")
"""What a checkpoint says of a run's position."""


@dataclass(frozen=True)
class Progress:
    """How far a run is when this process begins."""

    batches: BatchSchedule
    step: int = 0
    samples: int = 0
    skipped_steps: int = 0
    evaluated: bool = False
    """Whether the checkpoint's step was evaluated before it was saved."""
    started_from: str = "scratch"
    weights_from: str | None = None
    """The checkpoint that the run goes on from, or `init_from`."""
    made_with: TrainingConfig | None = None
    """This run's `training`, with the schedule that the checkpoint was made with."""


def check_start(run: Run, processes: int) -> None:
    """Refuses what so many processes could not begin with, before there are any, and before there is a run folder."""
    config = run.config
    check_layout(config, run.recipe_type(run.recipe_config), processes)
    begins = not _find_start(run, CheckpointManager(config.output_dir), lambda warning: None)
    if begins and config.checkpoint.init_from:
        open_weights(config.checkpoint.init_from)


def check_world(run: Run, world: World) -> None:
    """Refuses processes that were started otherwise than the config says."""
    launch = run.config.launch
    if "launch.procs_per_node" in run.sources and launch.procs_per_node != world.local_size:
        raise UserError(
            f"launch.procs_per_node = {launch.procs_per_node}, but this machine runs {world.local_size}: start them by "
            "`shoal train`, leave the key out or make them agree"
        )
    nodes = world.size // world.local_size
    if "launch.nodes" in run.sources and launch.nodes != nodes:
        raise UserError(f"launch.nodes = {launch.nodes}, but there are {nodes}; leave the key out or make them agree")


@contextmanager
def open_run_folder(run: Run, strategy: DistributedStrategy) -> Iterator[Lease]:
    """Makes the run folder, holds it against other runs, and writes the resolved config into it."""
    folder = Path(run.config.output_dir)
    phases = derive_batches(run.config.training, strategy.data_size)
    lease = Lease(folder)
    try:
        try:
            (folder / "logs" if strategy.world_size > 1 else folder).mkdir(parents=True, exist_ok=True)
            if strategy.is_main_process:
                lease.take()
                (folder / "config.yaml").write_text(run.to_yaml(derived_values(phases[0], strategy.data_size)))
        except OSError as error:
            raise UserError(f"experiment.output_dir = {str(folder)!r} cannot be written: {error.strerror}") from None
        yield lease
    finally:
        lease.release()


def restore(
    run: Run,
    manager: CheckpointManager,
    strategy: DistributedStrategy,
    model: nn.Module,
    optimizer: Optimizer,
    base: Base,
    warn: Callable[[str], None],
) -> Progress:
    """Loads the last good checkpoint, if there is one; stops if there are some and none is good."""
    resume, allowed = run.config.checkpoint.resume, run.config.checkpoint.allow_changed
    folders = _find_start(run, manager, warn)
    _check_same_storage(folders, manager, strategy)
    damages: list[str] = []
    for folder in folders:
        here = strategy.state(model, optimizer).model
        shapes, damage = strategy.shapes(here), ""
        try:
            checkpoint = open_checkpoint(folder)
            if "config" not in checkpoint.manifest:
                raise UserError(f"{folder} was saved by a loop of its own; load it with strategy.load_checkpoint")
            _check_position(checkpoint)
            check_same_model(checkpoint, shapes)
            check_same_run(checkpoint, run.tree(), allowed)
            batches = _batches_after(checkpoint.manifest, run, strategy.data_size, warn)
            state = checkpoint.checked_for(here)
        except DamagedCheckpoint as error:
            damage = str(error)
        if strategy.highest(bool(damage)):  # one that a single rank cannot read is read by none
            damages.append(damage or f"{folder}: another rank cannot read it")
            manager.pass_over(folder)
            warn(f"checkpoint {folder.name} is damaged and passed over: {damages[-1]}")
            continue
        state.model.update(base.check(checkpoint, here))
        strategy.load_state(model, optimizer, state)
        if resume not in ("auto", "never") and manager.is_own_step(Path(resume)):
            manager.set_aside_after(folder)
        manager.note_damage()
        counts = {key: checkpoint.trainer[key] for key in COUNTS}
        evaluated = "metrics" in checkpoint.trainer
        return Progress(
            batches=batches,
            started_from=str(folder),
            weights_from=str(folder),
            evaluated=evaluated,
            made_with=_made_with(checkpoint.manifest["config"], run.config.training),
            **counts,
        )
    if damages:  # starting anew would soon rotate away what might still be saved
        count = f"the checkpoint {folders[0].name}" if len(damages) == 1 else f"all {len(damages)} checkpoints"
        raise UserError(
            f"checkpoint.resume = {resume}: {count} in {folders[0].parent} cannot be used ({damages[0]}); "
            f"move {'it' if len(damages) == 1 else 'them'} away, or choose another experiment.output_dir or "
            "checkpoint.resume"
        )
    if path := run.config.checkpoint.init_from:
        take_weights(path, strategy, model, optimizer, base, warn)
    return Progress(BatchSchedule(derive_batches(run.config.training, strategy.data_size)), weights_from=path)


def _find_start(run: Run, manager: CheckpointManager, warn: Callable[[str], None]) -> list[Path]:
    resume = run.config.checkpoint.resume
    try:
        return find_start(resume, manager, warn, was_restarted())
    except PermissionError as error:
        raise UserError(f"checkpoint.resume = {resume}: {error.filename} cannot be read: {error.strerror}") from None


def take_weights(
    path: str,
    strategy: DistributedStrategy,
    model: nn.Module,
    optimizer: Optimizer,
    base: Base,
    warn: Callable[[str], None],
) -> None:
    """Each rank its part of the weights there; the optimizer and the position begin anew."""
    elsewhere = strategy.shapes(strategy.state(model, optimizer).model).keys()
    try:
        strategy.load_state(model, optimizer, TrainState(weights_for(model, path, base, warn, elsewhere), {}))
    except DamagedCheckpoint as error:
        raise UserError(f"checkpoint.init_from = {path!r} is a damaged checkpoint: {error}") from None


def check_room(
    manager: CheckpointManager,
    strategy: DistributedStrategy,
    state: TrainState,
    optimizer: Optimizer,
    warn: Callable[[str], None],
) -> int:
    """Says before the run if its next checkpoint will not fit, and how many bytes it will take.

    An optimizer that has not stepped yet is estimated.
    """
    needed_bytes = num_bytes(state)
    if not state.optimizer:
        slots = 2 if "betas" in optimizer.defaults else 1 if optimizer.defaults.get("momentum") else 0
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        needed_bytes += slots * sum((whole := sharded_parameter(p)).numel() * whole.element_size() for p in parameters)
    needed_bytes = strategy.over_stages(needed_bytes)
    if lack := manager.lack_of_room(needed_bytes):
        warn(f"{lack}; make room, or the run will not be saved")
    return needed_bytes


def load_best(
    manager: CheckpointManager,
    strategy: DistributedStrategy,
    model: nn.Module,
    optimizer: Optimizer,
    base: Base,
    warn: Callable[[str], None],
) -> tuple[int, float] | None:
    """Loads the best checkpoint that can be read; its step and value, or None if there is none."""
    here = strategy.state(model, optimizer).model
    for step, value in manager.best():
        damage = ""
        try:
            checkpoint = open_checkpoint(manager.path_of(step))
            state = checkpoint.checked_for(here)
        except DamagedCheckpoint as error:
            damage = str(error)
        if strategy.highest(bool(damage)):
            warn(f"the best checkpoint, of step {step}, is damaged and passed over: {damage or 'on another rank'}")
            continue
        state.model.update(base.check(checkpoint, here))
        strategy.load_state(model, optimizer, state)
        return step, value
    return None


def _check_same_storage(folders: list[Path], manager: CheckpointManager, strategy: DistributedStrategy) -> None:
    """Ranks that see different checkpoints would go on from different steps."""
    seen = crc32(" ".join(folder.name for folder in folders).encode())
    if strategy.highest(seen) != -strategy.highest(-seen):
        raise UserError(
            f"not all ranks see the same checkpoints in {manager.folder}; put experiment.output_dir on storage that "
            "all machines share"
        )


def _check_position(checkpoint: Checkpoint) -> None:
    """Refuses what is not a place in a run. Whoever can make digests can write anything."""
    about = checkpoint.manifest
    try:
        epochs, sizes = zip(*about["batches"], strict=True)
        counts = [*epochs, *(checkpoint.trainer[key] for key in COUNTS)]
        sizes = (*sizes, about["layout"]["data_size"])
        least = [*((count, 0) for count in counts), *((size, 1) for size in sizes)]
        right = isinstance(about["config"], dict) and all(type(n) is int and low <= n < 1 << 62 for n, low in least)
    except (LookupError, TypeError, ValueError):
        right = False
    if not right:
        raise DamagedCheckpoint(f"{checkpoint.folder}: it does not say where in which run it was made")


def _batches_after(manifest: dict[str, Any], run: Run, data_size: int, warn: Callable[[str], None]) -> BatchSchedule:
    """On another number of ranks the checkpoint's global batch stays, and the accumulation is derived anew.

    If the config would have given another global batch on the checkpoint's own ranks, its batch keys were changed.
    """
    training, allowed = run.config.training, run.config.checkpoint.allow_changed
    then = [tuple(phase) for phase in manifest["batches"]]
    unchanged = _sizes(derive_batches(training, manifest["layout"]["data_size"]))
    now = derive_batches(training, data_size)
    if "training.global_batch_size" in allowed or _sizes(now) == then:
        return BatchSchedule(now)
    if unchanged != then:
        raise UserError(
            f"training.global_batch_size is {_say(unchanged)}, but the checkpoint was made with {_say(then)}; "
            "set it back or list training.global_batch_size in checkpoint.allow_changed"
        )
    warn(f"training.global_batch_size stays {_say(then)}, as in the checkpoint, over {data_size} data-parallel ranks")
    kept = ((epoch, size, phase.batch_size) for (epoch, size), phase in zip(then, now, strict=True))
    return BatchSchedule(
        tuple(BatchPhase(epoch, size, min(batch, ceil(size / data_size))) for epoch, size, batch in kept)
    )


def _made_with(config: dict[str, Any], now: TrainingConfig) -> TrainingConfig | None:
    then = config.get("training")
    scheduling = {key: then[key] for key in SCHEDULING if key in then} if isinstance(then, dict) else {}
    try:
        return TrainingConfig.model_validate({**now.model_dump(), **scheduling})
    except ValidationError:  # of another version, or by another hand
        return None


def _sizes(phases: tuple[BatchPhase, ...]) -> list[tuple[int, ...]]:
    return [(phase.first_epoch, phase.global_batch_size) for phase in phases]


def _say(sizes: list[tuple[int, ...]]) -> str:
    return str(sizes[0][1]) if len(sizes) == 1 else ", ".join(f"{size} from epoch {epoch}" for epoch, size in sizes)
