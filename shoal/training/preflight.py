"""Before a run begins: what can be refused without processes or a run folder, and then the run folder itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from shoal.checkpoint import CheckpointManager, step_folders
from shoal.checkpoint.init_from import open_weights
from shoal.checkpoint.run_lock import RunLock
from shoal.config import Run, derive_batches
from shoal.config.batch import derived_values
from shoal.config.layout import check_layout
from shoal.errors import UserError, as_user_error
from shoal.processes.world import World
from shoal.strategies import DistributedStrategy
from shoal.training.resume import find_checkpoints


def check_start(run: Run, size: int, local_size: int, was_restarted: bool) -> None:
    """Refuses a layout, a checkpoint to resume from, or weights to begin with that `size` processes could not use."""
    config = run.config
    check_layout(config, run.make_recipe(), size, local_size)
    found = find_checkpoints(
        config.checkpoint.resume, CheckpointManager(config.output_dir), lambda warning: None, was_restarted
    )
    if config.checkpoint.init_from and not found:
        open_weights(config.checkpoint.init_from)


def check_world(run: Run, world: World) -> None:
    """Refuses processes that were started in another number than the config says."""
    launch = run.config.launch
    if "launch.procs_per_node" in run.sources and launch.procs_per_node != world.local_size:
        raise UserError(
            f"launch.procs_per_node = {launch.procs_per_node}, but {world.local_size} processes were started on this "
            f"machine; remove the key or set it to {world.local_size}"
        )
    nodes = world.size // world.local_size
    if "launch.nodes" in run.sources and launch.nodes != nodes:
        raise UserError(f"launch.nodes = {launch.nodes}, but there are {nodes}; remove the key or set it to {nodes}")


@contextmanager
def open_run_folder(run: Run, strategy: DistributedStrategy) -> Iterator[RunLock]:
    """Makes the folder, holds it against other runs, and writes the config of a run that has no checkpoints yet."""
    folder = Path(run.config.output_dir)
    run_lock = RunLock(folder, strategy.world.job, strategy.world.attempt)
    try:
        try:
            (folder / "logs" if strategy.world_size > 1 else folder).mkdir(parents=True, exist_ok=True)
            if strategy.is_main_process:
                run_lock.acquire()
                if not step_folders(folder):
                    _write_config(run, strategy)
        except OSError as error:
            raise UserError(f"experiment.output_dir = {str(folder)!r} cannot be written: {error.strerror}") from None
        yield run_lock
    finally:
        run_lock.release()


def update_config(run: Run, strategy: DistributedStrategy) -> None:
    """Writes the config of a run that goes on, once it is known that it does.

    A run that is finished, or that refuses to resume with changed keys, keeps the config that it was trained with.
    """
    if strategy.is_main_process:
        with as_user_error(f"experiment.output_dir = {run.config.output_dir!r} cannot be written", OSError):
            _write_config(run, strategy)


def _write_config(run: Run, strategy: DistributedStrategy) -> None:
    phases = derive_batches(run.config.training, strategy.data_size)
    text = run.to_yaml(derived_values(phases[0], strategy.data_size))
    (Path(run.config.output_dir) / "config.yaml").write_text(text)


def move_aside(folder: Path) -> Path | None:
    """Renames a run folder to the first free of `<folder>.1`, `<folder>.2`, …; returns the new name, or None if there
    is no folder. Raises UserError if a run is using it."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return None
    with RunLock(folder):
        pass
    new = next(path for number in count(1) if not (path := folder.with_name(f"{folder.name}.{number}")).exists())
    return folder.rename(new)
