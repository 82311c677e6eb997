"""What can be refused before a run begins: before there are processes, and before there is a run folder."""

from __future__ import annotations

from shoal.checkpoint import CheckpointManager
from shoal.checkpoint.init_from import open_weights
from shoal.config import Run
from shoal.config.layout import check_layout
from shoal.errors import UserError
from shoal.processes.world import World
from shoal.training.resume import find_checkpoints


def check_start(run: Run, size: int, local_size: int, was_restarted: bool) -> None:
    """Refuses a layout, a checkpoint to resume from, or weights to begin with that `size` processes could not use."""
    config = run.config
    check_layout(config, run.recipe_type(run.recipe_config), size, local_size)
    resumes = find_checkpoints(run, CheckpointManager(config.output_dir), lambda warning: None, was_restarted)
    if not resumes and config.checkpoint.init_from:
        open_weights(config.checkpoint.init_from)


def check_world(run: Run, world: World) -> None:
    """Refuses processes that were started in another number than the config says."""
    launch = run.config.launch
    if "launch.procs_per_node" in run.sources and launch.procs_per_node != world.local_size:
        raise UserError(
            f"launch.procs_per_node = {launch.procs_per_node}, but this machine runs {world.local_size}: start them by "
            "`shoal train`, leave the key out or make them agree"
        )
    nodes = world.size // world.local_size
    if "launch.nodes" in run.sources and launch.nodes != nodes:
        raise UserError(f"launch.nodes = {launch.nodes}, but there are {nodes}; leave the key out or make them agree")
