"""Resuming: finds and loads the last good checkpoint, or the weights that a run begins with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from pydantic import ValidationError

from shoal.checkpoint import Checkpoint, CheckpointManager, DamagedCheckpoint, open_checkpoint
from shoal.checkpoint.folders import step_folders
from shoal.checkpoint.frozen_base import FrozenBase
from shoal.checkpoint.init_from import weights_for_model
from shoal.checkpoint.inspect import as_dict
from shoal.checkpoint.latest import check_same_model, check_same_run, is_allowed
from shoal.checkpoint.regions import Held
from shoal.checkpoint.same_data import check_same_data
from shoal.config import Run, derive_batches
from shoal.config.schema import TrainingConfig
from shoal.data import BatchSchedule
from shoal.errors import UserError
from shoal.parallel.sharding.trial import builder_of
from shoal.strategies import DistributedStrategy
from shoal.tensors import tensors_with_names
from shoal.training.hooks import HookState
from shoal.training.metric_sums import SinceLog
from shoal.training.optimizers import build_optimizer, is_by_recipe, kept_slots
from shoal.training.preflight import find_checkpoints
from shoal.training.recipe_source import describe_change, recipe_source
from shoal.training.schedules import SCHEDULING
from shoal.training.session import Session
from shoal.types import BatchPhase, TrainState

COUNTS = ("step", "samples", "skipped_steps")
"""The counts in a checkpoint that give the position of a run."""


@dataclass(frozen=True)
class Progress:
    """How far a run has come when this process begins."""

    batches: BatchSchedule
    step: int = 0
    samples: int = 0
    step_start: int = 0
    """The position of the first sample of the last step."""
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    since_log: SinceLog = field(default_factory=SinceLog)
    """What the next line of the log adds to."""
    skipped_samples: tuple[tuple[int, int], ...] = ()
    """The positions that were left out of training, each from one to before another."""
    evaluated: bool = False
    """True if the step of the checkpoint was evaluated before it was saved."""
    started_from: str = "scratch"
    weights_from: str | None = None
    """The checkpoint that the run resumes from, or `init_from`."""
    is_adapter: bool = False
    """True if `init_from` has an adapter alone, so that frozen weights stay as they were read."""
    schedule: Mapping[str, Any] | None = None
    """What a schedule that follows evaluations had noted."""
    logged: Any = None
    """What steps of the user's own had logged since the last line of the log."""
    last_metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics that were logged last, which hooks may look at."""
    made_with: TrainingConfig | None = None
    """The section `training`, with the schedule that the checkpoint was made with."""
    hooks: HookState = field(default_factory=HookState)
    """The state of recipe and callbacks in the checkpoint."""


def restore(
    run: Run,
    session: Session,
    manager: CheckpointManager,
    base: FrozenBase,
    warn: Callable[[str], None],
    goes_back: bool = False,
) -> Progress:
    """Loads the last good checkpoint, if there is any; raises UserError if there are some and none is good.

    With `goes_back` this process has trained already, and goes back to its last checkpoint.
    """
    resume, allowed = run.config.checkpoint.resume, run.config.checkpoint.allow_changed
    if goes_back and step_folders(manager.output_dir):
        resume = "auto"  # what the config names was only where the run started
    strategy, held = session.strategy, session.strategy.held()
    folders = find_checkpoints(resume, manager, warn, strategy.world.was_restarted)
    _check_same_storage(folders, manager, strategy)
    damages: list[str] = []
    for folder in folders:
        damage = ""
        try:
            checkpoint = open_checkpoint(folder)
            if "config" not in checkpoint.manifest:
                raise UserError(f"{folder} was saved by a loop of its own; load it with Loop.load")
            _check_position(checkpoint)
            since_log = _since_log(checkpoint)
            check_same_model(checkpoint, {name: [*one.shape] for name, one in held.items()}, config=run.tree())
            check_same_run(checkpoint, run.tree(), allowed)
            check_same_data(checkpoint, session.recipe.data_digests(), run.tree(), allowed, warn)
            change = optimizer_change(checkpoint, run, session)
            _check_allowed(change, checkpoint, run)
            batches = _batches_after(checkpoint.manifest, run, strategy.data_size, warn)
            state = state_for(checkpoint, held, change, strategy.rank)
        except DamagedCheckpoint as error:
            damage = str(error)
        if strategy.any_rank(bool(damage)):  # if one rank cannot read it, none does
            damages.append(damage or f"{folder}: another rank cannot read it")
            manager.mark_damaged(folder)
            warn(f"checkpoint {folder.name} is damaged and passed over: {damages[-1]}")
            continue
        if change:
            differs = f"{change.key} is {change.value!r} and was {change.before!r}"
            warn(f"{differs}: the optimizer starts with fresh state at step {checkpoint.trainer['step']}")
        if difference := describe_change(checkpoint.manifest.get("recipe_source"), recipe_source(run.recipe_type)):
            warn(f"going on from {folder}: {difference}")
        load_checkpoint(session, checkpoint, state, base)
        if restarted := strategy.engaged.restarted:
            warn(f"going on from {folder}: {restarted}")
        if resume not in ("auto", "never") and manager.owns(Path(resume)):
            manager.set_aside_later_steps(folder)
        manager.leave_damage_notes()
        return Progress(
            batches=batches,
            started_from=str(folder),
            weights_from=str(folder),
            since_log=since_log,
            skipped_in_a_row=checkpoint.trainer.get("skipped_in_a_row", 0),
            evaluated="metrics" in checkpoint.trainer,
            schedule=checkpoint.trainer.get("schedule"),
            logged=checkpoint.trainer.get("logged"),
            last_metrics={
                name: value
                for name, value in as_dict(checkpoint.trainer.get("last_metrics")).items()
                if isinstance(value, int | float)
            },
            made_with=_earlier(checkpoint.manifest["config"], run.config.training, SCHEDULING),
            hooks=_hook_state(checkpoint, state),
            skipped_samples=tuple((start, end) for start, end in checkpoint.trainer.get("skipped_samples", ())),
            step_start=checkpoint.trainer.get("step_start", checkpoint.trainer["samples"]),  # earlier versions had none
            **{key: checkpoint.trainer[key] for key in COUNTS},
        )
    if damages:  # a fresh start would soon delete what might still be rescued
        count = f"the checkpoint {folders[0].name}" if len(damages) == 1 else f"all {len(damages)} checkpoints"
        raise UserError(
            f"checkpoint.resume = {resume}: {count} in {folders[0].parent} cannot be used ({damages[0]}); "
            f"move {'it' if len(damages) == 1 else 'them'} away, or choose another experiment.output_dir or "
            "checkpoint.resume"
        )
    path, is_adapter = run.config.checkpoint.init_from, False
    if path:
        is_adapter = _take_weights(path, session, base, warn, is_allowed("model.name", allowed))
    batches = BatchSchedule(derive_batches(run.config.training, strategy.data_size))
    return Progress(batches, weights_from=path, is_adapter=is_adapter)


def state_for(
    checkpoint: Checkpoint, held: Mapping[str, Held], change: OptimizerChange | None, rank: int
) -> TrainState:
    """Returns the state to load, after its digests were compared. State of another optimizer is left out."""
    state = checkpoint.checked_state(held, rank=rank)
    return replace(state, optimizer={}) if change else state


def load_checkpoint(session: Session, checkpoint: Checkpoint, state: TrainState, base: FrozenBase) -> None:
    """Loads a checkpoint that every rank has checked, with the frozen weights that it refers to."""
    if checkpoint.base:
        state.model.update(base.check(checkpoint, session.state().model))
    session.load_state(state)


def _take_weights(
    path: str, session: Session, base: FrozenBase, warn: Callable[[str], None], allows_other_base: bool
) -> bool:
    """Gives each rank its part of the weights in `path`; the optimizer and the position begin anew.

    Returns whether `path` has an adapter alone.
    """
    try:
        held = session.strategy.held().keys()
        new_tokens = getattr(session.recipe, "added_tokens", ())
        weights = weights_for_model(session.model, path, base, warn, held, allows_other_base, new_tokens)
        session.load_state(TrainState(weights, {}))
        return any(names[0] not in weights for _, names in tensors_with_names(session.model))
    except DamagedCheckpoint as error:
        raise UserError(f"checkpoint.init_from = {path!r} is a damaged checkpoint: {error}") from None


def _check_same_storage(folders: list[Path], manager: CheckpointManager, strategy: DistributedStrategy) -> None:
    """Refuses ranks that see different checkpoints: they would resume from different steps."""
    seen = crc32(" ".join(folder.name for folder in folders).encode())
    if strategy.max_over_ranks(seen) != -strategy.max_over_ranks(-seen):
        raise UserError(
            f"not all ranks see the same checkpoints in {manager.folder}; put experiment.output_dir on storage that "
            "all machines share"
        )


def _check_position(checkpoint: Checkpoint) -> None:
    """Refuses a checkpoint without a valid position. Digests prove nothing about who wrote the numbers."""
    about = checkpoint.manifest
    try:
        epochs, sizes = zip(*about["batches"], strict=True)
        numbers = {
            0: [
                *epochs,
                *(checkpoint.trainer[key] for key in COUNTS),
                checkpoint.trainer.get("step_start", 0),
                checkpoint.trainer.get("skipped_in_a_row", 0),
                *_skipped_positions(checkpoint.trainer),
            ],
            1: [*sizes, about["layout"]["data_size"]],
        }
        right = isinstance(about["config"], dict) and all(
            type(number) is int and least <= number < 1 << 62 for least in numbers for number in numbers[least]
        )
    except (LookupError, TypeError, ValueError):
        right = False
    if not right:
        raise DamagedCheckpoint(
            f"{checkpoint.folder}: its manifest or trainer.json lacks a valid step, position or batch size"
        )


def _skipped_positions(trainer: Mapping[str, Any]) -> list[Any]:
    return [position for start, end in trainer.get("skipped_samples", ()) for position in (start, end)]


def _since_log(checkpoint: Checkpoint) -> SinceLog:
    """Returns the sums since the last line of the log; earlier versions stored none."""
    try:
        stored = checkpoint.trainer.get("since_log")
        return SinceLog() if stored is None else SinceLog.from_json(stored)
    except (LookupError, TypeError, ValueError, OverflowError):
        raise DamagedCheckpoint(f"{checkpoint.folder}: the sums since the last line of the log are damaged") from None


class OptimizerChange(NamedTuple):
    """How the optimizer differs from the one that a checkpoint was saved with."""

    key: str
    """The key that was changed, such as `training.optimizer.name`."""
    value: Any
    before: Any


def optimizer_change(checkpoint: Checkpoint, run: Run, session: Session) -> OptimizerChange | None:
    """Returns how the optimizer differs from the one that a checkpoint was saved with, or None.

    Only what changes the stored state counts: another optimizer, or options that keep other tensors for a parameter.
    A manifest is not trusted, so an optimizer that it names is built only if the config names the same.
    """
    training, stored, groups = run.config.training, _stored_slots(checkpoint), session.optimizer_groups
    earlier = _earlier(checkpoint.manifest["config"], training, ("optimizer",))
    name, by_recipe = session.optimizer_name, is_by_recipe(session.optimizer)
    then, now = earlier.optimizer.model_dump() if earlier else {}, training.optimizer.model_dump()
    before = checkpoint.manifest.get("optimizer", then.get("name"))
    if before not in (None, name):
        return OptimizerChange("training.optimizer" if by_recipe else "training.optimizer.name", name, before)
    kept = kept_slots(builder_of(session.optimizer), groups)
    # Small tensors do not show the slots that only large ones have.
    stored = {slot for slot in stored if slot.partition("@")[0] not in getattr(session.optimizer, "slots_of_large", ())}
    if by_recipe or earlier is None or then["name"] != name:
        fits = stored in (set(), kept)
    else:
        # A checkpoint has no slots if all of its updates were skipped, so what its config asked for counts as well.
        fits = stored <= kept and kept_slots(partial(build_optimizer, earlier), groups) == kept
    if fits:
        return None
    key = None if by_recipe else next((key for key in now if key in then and then[key] != now[key]), None)
    if key:
        return OptimizerChange(f"training.optimizer.{key}", now[key], then[key])
    return OptimizerChange("training.optimizer", name, f"slots {', '.join(sorted(stored))}")


def _check_allowed(change: OptimizerChange | None, checkpoint: Checkpoint, run: Run) -> None:
    """Raises UserError if the optimizer was changed, unless checkpoint.allow_changed lists the key."""
    if change and not is_allowed(change.key, run.config.checkpoint.allow_changed):
        raise UserError(
            f"{change.key} = {change.value!r}, but {checkpoint.folder} was saved with {change.before!r}, whose state "
            f"does not fit; set it back, choose another experiment.output_dir, or list {change.key} in "
            "checkpoint.allow_changed to start the optimizer with fresh state"
        )


def _hook_state(checkpoint: Checkpoint, state: TrainState) -> HookState:
    """Returns the state of recipe and callbacks in a checkpoint. Entries that are not objects count as absent."""
    run, values = (as_dict(checkpoint.trainer.get(key)) for key in ("hooks", "callbacks"))
    values = {name: as_dict(value) for name, value in values.items()}
    return HookState(run, values, state.callbacks, checkpoint.manifest["config"].get("callbacks"))


def _stored_slots(checkpoint: Checkpoint) -> set[str]:
    """Returns the names of the optimizer's tensors in a checkpoint, such as exp_avg."""
    return {slot for slots in checkpoint.stored_state().optimizer.values() for slot in slots}


def _batches_after(manifest: dict[str, Any], run: Run, data_size: int, warn: Callable[[str], None]) -> BatchSchedule:
    """Returns the batches of the resumed run: the checkpoint's global batch stays, the accumulation is derived anew.

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


def _earlier(config: dict[str, Any], now: TrainingConfig, keys: Iterable[str]) -> TrainingConfig | None:
    """Returns the section `training` with some keys as they are in a manifest's config; None if they are not valid."""
    then = config.get("training")
    earlier = {key: then[key] for key in keys if key in then} if isinstance(then, dict) else {}
    try:
        return TrainingConfig.model_validate({**now.model_dump(), **earlier})
    except ValidationError:  # written by another version, or by hand
        return None


def _sizes(phases: tuple[BatchPhase, ...]) -> list[tuple[int, ...]]:
    return [(phase.first_epoch, phase.global_batch_size) for phase in phases]


def _say(sizes: list[tuple[int, ...]]) -> str:
    return str(sizes[0][1]) if len(sizes) == 1 else ", ".join(f"{size} from epoch {epoch}" for epoch, size in sizes)
