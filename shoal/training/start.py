"""How a run begins: its folder, and the checkpoint it goes on from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.checkpoint import CheckpointManager, DamagedCheckpoint
from shoal.checkpoint.manager import check_same_model, check_same_run, find_start
from shoal.config import Run
from shoal.config.batch import derived_values
from shoal.errors import UserError
from shoal.strategies import SingleStrategy
from shoal.types import BatchPhase


def open_run_folder(run: Run, phase: BatchPhase, data_size: int) -> Path:
    """Makes the run folder and writes the resolved config into it."""
    folder = Path(run.config.output_dir)
    derived = derived_values(phase, data_size)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(run.to_yaml(derived))
    except OSError as error:
        raise UserError(f"experiment.output_dir = {str(folder)!r} cannot be written: {error.strerror}") from None
    return folder


def restore(
    run: Run,
    manager: CheckpointManager,
    strategy: SingleStrategy,
    model: nn.Module,
    optimizer: Optimizer,
    phases: tuple[BatchPhase, ...],
    warn: Callable[[str], None],
) -> dict[str, Any] | None:
    """Loads the last good checkpoint, if there is one, and returns what it says of the run's progress."""
    allowed = run.config.checkpoint.allow_changed
    for checkpoint in find_start(run.config.checkpoint.resume, manager, warn):
        shapes = {name: [*tensor.shape] for name, tensor in strategy.state(model, optimizer).model.items()}
        check_same_model(checkpoint, shapes)
        check_same_run(checkpoint, run.tree(), allowed)
        _check_same_batches(checkpoint.manifest["batches"], phases, allowed)
        try:
            strategy.load_state(model, optimizer, checkpoint.read())
        except DamagedCheckpoint as damage:
            warn(f"checkpoint {checkpoint.folder.name} is damaged and passed over: {damage}")
            continue
        return {**checkpoint.trainer, "from": str(checkpoint.folder)}
    return None


def _check_same_batches(then: list[list[int]], phases: tuple[BatchPhase, ...], allowed: list[str]) -> None:
    now = [[phase.first_epoch, phase.global_batch_size] for phase in phases]
    if then != now and "training.global_batch_size" not in allowed:
        raise UserError(
            f"training.global_batch_size is {_batches(now)}, but the checkpoint was made with {_batches(then)}; "
            "set it back or list training.global_batch_size in checkpoint.allow_changed"
        )


def _batches(phases: list[list[int]]) -> str:
    return str(phases[0][1]) if len(phases) == 1 else ", ".join(f"{size} from epoch {epoch}" for epoch, size in phases)
