"""Before a run begins: what can be refused without processes or a run folder, and then the run folder itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.checkpoint import CheckpointManager, step_folders
from shoal.checkpoint.init_from import open_weights
from shoal.checkpoint.latest import find_resumable
from shoal.checkpoint.run_lock import RunLock
from shoal.config import Run, derive_batches
from shoal.config.batch import derived_values
from shoal.config.layout import check_layout
from shoal.errors import UserError, as_user_error
from shoal.observe.loggers import replace_file
from shoal.processes.environments import SPAWNED, Plain
from shoal.processes.world import World
from shoal.training.refused_start import StartTraces

if TYPE_CHECKING:
    from shoal.strategies import DistributedStrategy


def check_before_launch(run: Run, world: World) -> None:
    """Refuses what the processes that a launcher would start could not use, with any number of machines it may have."""
    launch = run.config.launch
    for nodes in range(launch.min_nodes if launch.is_elastic else world.size, world.size + 1):
        check_start(run, nodes * max(1, world.starts), max(1, world.starts), world.was_restarted)


def check_start(run: Run, size: int, local_size: int, was_restarted: bool) -> None:
    """Refuses a layout, a checkpoint to resume from, or weights to begin with that `size` processes could not use."""
    config = run.config
    check_layout(config, run.make_recipe(), size, local_size)
    found = find_checkpoints(
        config.checkpoint.resume, CheckpointManager(config.output_dir), lambda warning: None, was_restarted
    )
    if config.checkpoint.init_from and not found:
        open_weights(config.checkpoint.init_from)


def find_checkpoints(
    resume: str, manager: CheckpointManager, warn: Callable[[str], None], was_restarted: bool
) -> list[Path]:
    """Returns the checkpoints that a run may go on from, the best first; none means a fresh start.

    `resume` is the value of checkpoint.resume.
    """
    try:
        return find_resumable(resume, manager, warn, was_restarted)
    except PermissionError as error:
        raise UserError(f"checkpoint.resume = {resume}: {error.filename} cannot be read: {error.strerror}") from None


def check_world(run: Run, world: World) -> None:
    """Refuses processes that were started in another number than the config says."""
    launch = run.config.launch
    if run.config.distributed.strategy == "ddp_spawn" and world.environment not in (SPAWNED, Plain.name):
        raise UserError(
            f"distributed.strategy = ddp_spawn: {world.environment} has started the processes already; use ddp"
        )
    if world.starts > 1 or (world.starts and world.size > 1):
        raise UserError(
            f"launch.procs_per_node = {world.starts}, but 1 processes were started on this machine; use the command "
            "`shoal train` or torchrun"
        )
    is_given = "launch.procs_per_node" in run.sources and not run.uses_every_gpu
    if is_given and launch.procs_per_node != world.local_size:
        raise UserError(
            f"launch.procs_per_node = {launch.procs_per_node}, but {world.local_size} processes were started on this "
            f"machine; remove the key or set it to {world.local_size}"
        )
    nodes = world.size // world.local_size
    if "launch.nodes" in run.sources and not launch.min_nodes <= nodes <= launch.max_nodes:
        raise UserError(f"launch.nodes = {launch.nodes}, but there are {nodes}; remove the key or set it to {nodes}")


@contextmanager
def open_run_folder(run: Run, strategy: DistributedStrategy) -> Iterator[RunLock]:
    """Makes the folder, holds it against other runs, and writes the config of a run that has no checkpoints yet.

    A run that is refused before its first step leaves nothing that it has made.
    """
    folder = Path(run.config.output_dir)
    traces, refused = StartTraces(folder), False
    run_lock = RunLock(folder, strategy.world.job, strategy.world.attempt)
    try:
        try:
            if strategy.world.local_rank == 0:  # others would make it again after a refusal
                (folder / "logs" if strategy.world_size > 1 else folder).mkdir(parents=True, exist_ok=True)
            if strategy.is_main_process:
                run_lock.acquire()
                if not step_folders(folder):
                    _write_config(run, strategy)
        except OSError as error:
            raise UserError(f"experiment.output_dir = {str(folder)!r} cannot be written: {error.strerror}") from None
        yield run_lock
    except UserError:
        refused = True
        raise
    finally:
        run_lock.release()
        if refused and strategy.is_main_process:
            traces.take_back()


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
    replace_file(Path(run.config.output_dir) / "config.yaml", text.encode())  # a run goes on by this file


def move_aside(folder: Path) -> Path | None:
    """Renames a run folder to the first free of `<folder>.1`, `<folder>.2`, …; returns the new name, or None if there
    is no folder. Raises UserError if a run is using it."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return None
    with RunLock(folder):
        pass
    new = next(path for number in count(1) if not (path := folder.with_name(f"{folder.name}.{number}")).exists())
    return folder.rename(new)
