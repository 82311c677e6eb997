"""Settings that a run has and does not use, with the reasons, for the report at step 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shoal.config.imports import takes
from shoal.training.optimizers import is_by_recipe
from shoal.training.schedules import schedule_is_by_recipe

if TYPE_CHECKING:
    from shoal.training.loop import Shell

Idle = tuple[str, tuple[str, ...]]
"""What is not used and why, and the keys that ask for it."""

_STRATEGIES_BY_SECTION = {
    "ddp": ("ddp",),
    "fsdp": ("fsdp", "mesh"),
    "mesh": ("fsdp", "mesh"),
    "tensor": ("mesh",),
    "pipeline": ("mesh",),
    "deepspeed": ("deepspeed",),
    "zero_stage": ("deepspeed",),
    "offload": ("deepspeed",),
}
"""Sections and keys of `distributed`, and the strategies that use them."""


def settings_not_in_force(shell: Shell) -> Iterator[Idle]:
    """Yields the settings of a run that have no effect, with the keys that were set for them."""
    yield from _idle_for_another_key(shell)
    for key, why in _idle_for_the_optimizer(shell).items():
        if keys := _set_below(shell, key):
            yield f"{key}: {why}", keys
    yield from _idle_for_the_run(shell)
    for remark in shell.run.remarks:
        yield str(remark), ()
    for name, why in shell.hooks.idle().items():
        yield f"callbacks: {name}: {why}", ("callbacks",)
    for key, why in shell.strategy.engaged.not_in_force.items():
        yield f"{key}: {why}", (key,)
    for section, users in _STRATEGIES_BY_SECTION.items():
        keys = _set_below(shell, f"distributed.{section}")
        if keys and shell.strategy.name not in users:
            yield f"distributed.{section}: the strategy is {shell.strategy.name}", keys


def _set_below(shell: Shell, key: str) -> tuple[str, ...]:
    """Returns the keys that somebody has set and that are this key or below it."""
    return tuple(source for source in shell.run.sources if f"{source}.".startswith(f"{key}."))


def _idle_for_another_key(shell: Shell) -> Iterator[Idle]:
    config, sources = shell.config, shell.run.sources
    for decisive, value, idle in (
        ("dataset.num_workers", config.dataset.num_workers, ("dataset.persistent_workers", "dataset.prefetch")),
        ("checkpoint.keep_best", config.checkpoint.keep_best, ("checkpoint.metric", "checkpoint.mode")),
    ):
        keys = tuple(key for key in idle if key in sources)
        if keys and not value:
            yield f"{', '.join(keys)}: {decisive} is 0", keys


def _idle_for_the_run(shell: Shell) -> Iterator[Idle]:
    config, world = shell.config, shell.strategy.world
    if config.training.eval_batch_size and not shell.loaders.evaluation:
        yield "training.eval_batch_size: the recipe has no evaluation data", ("training.eval_batch_size",)
    if config.dataset.drop_last and config.training.max_steps and shell.loaders.epoch_size:
        why = "training.max_steps ends the run, and every step is full"
        yield f"dataset.drop_last: {why}", ("dataset.drop_last",)
    if config.checkpoint.init_from and shell.first_step:
        yield "checkpoint.init_from: the run goes on with its own weights", ("checkpoint.init_from",)
    place = ("launch.master_addr", "launch.master_port", "launch.node_rank")
    keys = tuple(key for key in place if key in shell.run.sources)
    if keys and world.size == world.local_size:
        yield f"{', '.join(keys)}: the run is on one machine", keys


def _idle_for_the_optimizer(shell: Shell) -> dict[str, str]:
    """Returns the keys that have no effect because of what the recipe or the optimizer does, with the reasons."""
    name = shell.session.optimizer_name
    idle: dict[str, str] = {}
    if is_by_recipe(shell.session.optimizer):
        idle["training.optimizer"] = f"the recipe builds {name}"
    if not takes(type(shell.session.optimizer), "weight_decay"):
        idle["training.weight_decay"] = f"{name} takes none"
    if schedule_is_by_recipe(shell.session.recipe, shell.total_steps):
        keys = ("lr_scheduler", "warmup_steps", "warmup_ratio")
        idle |= {f"training.{key}": "the recipe has a schedule" for key in keys}
    if name.startswith("paged_") and shell.strategy.device.type == "cpu":
        idle["training.optimizer"] = f"{name}: its state is not paged, because there is no GPU"
    if name == "rprop":
        idle["training.max_grad_norm"] = "rprop uses the signs of gradients alone"
    return idle
