"""Detects which process of a run this one is, once; the World that it returns is handed to all code that needs it."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shoal.errors import UserError
from shoal.processes.environments import (
    ENVIRONMENTS,
    LaunchKeys,
    NodeVariables,
    Plain,
    ShoalLauncher,
    read_number,
    read_port,
)
from shoal.processes.world import LOOPBACK, World


def detect(environment: Mapping[str, str] = os.environ, launch: LaunchKeys | None = None) -> World:
    """Returns the world of the default process group if there is one, else the world that the environment describes.

    `launch` is the section of the config: then the world may be that of a process which has to start others
    (`World.starts`). Raises UserError if variables are missing, or contradict each other or the config.
    """
    known: dict[str, Any] = {
        "job": _job(environment),
        "attempt": detect_attempt(environment),
        "notes": _notes(environment),
    }
    if _group_exists():
        return _world_of_group(replace(World(), **known), environment)
    candidates = ENVIRONMENTS if launch is None or launch.detect == "auto" else (ShoalLauncher(), Plain())
    found = next(one for one in candidates if one.matches(environment, launch))
    world = found.world(environment, launch)
    if isinstance(found, ShoalLauncher):
        known["notes"] = ()  # the launcher has shown them
    if isinstance(found, Plain):
        known["notes"] = (*_notes(environment), *_notes_outside_tasks(environment))
    else:
        known["run_id"] = environment.get("TORCHELASTIC_RUN_ID", world.run_id)
    return replace(world, **known, environment=found.name)


def world_by_number(rank: int, size: int, environment: Mapping[str, str] = os.environ) -> World:
    """Returns the world of a script that numbers its processes itself, as under torch.multiprocessing.spawn.

    They meet at MASTER_ADDR and MASTER_PORT, by default at port 29500 of this machine. Raises UserError if a launcher,
    or the process group that exists, says another rank or size.
    """
    if not 0 <= rank < size:
        raise UserError(
            f"rank = {rank}, world_size = {size}: ranks count from 0 to world_size - 1; correct one of them"
        )
    if _group_exists() or {"RANK", "LOCAL_RANK"} <= {*environment}:
        found = detect(environment)
        if (found.rank, found.size) != (rank, size):
            raise UserError(
                f"rank = {rank}, world_size = {size}: {found.environment} says {found.rank} of {found.size}; leave "
                "both out, or make them agree"
            )
        return found
    if size == 1:
        return World()
    local_size = read_number(environment, "LOCAL_WORLD_SIZE", size)
    return World(
        rank,
        size,
        read_number(environment, "LOCAL_RANK", rank % max(1, local_size)),
        local_size,
        environment.get("MASTER_ADDR", "127.0.0.1"),
        read_port({"MASTER_PORT": "29500", **environment}),
        environment="a rank and a world size from Python",
    )


def nodes_by_hand(processes: int, environment: Mapping[str, str] = os.environ) -> World:
    """Returns which machine this is, if a script is started by hand on several, each of which starts `processes`.

    They are described by MASTER_ADDR, MASTER_PORT, WORLD_SIZE (the number of all processes) and NODE_RANK. Without
    NODE_RANK this machine is the only one.
    """
    if "NODE_RANK" not in environment or environment.get("WORLD_SIZE", "1") == "1":
        return World()
    return NodeVariables().world(environment, _Processes(procs_per_node=processes))


@dataclass(frozen=True)
class _Processes:
    """The keys of `launch` of a script that only says how many processes a machine has."""

    procs_per_node: int
    min_nodes: int = 1
    max_nodes: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    node_rank: int | None = None
    detect: str = "auto"


def detect_attempt(environment: Mapping[str, str] = os.environ) -> tuple[int, int, int]:
    """Returns how often SLURM, shoal's launcher and torchrun have restarted this run.

    shoal's launcher writes the number of the attempt into torchrun's run id.
    """
    launched = re.fullmatch(r"attempt (\d+)", environment.get("TORCHELASTIC_RUN_ID", ""))
    slurm, torchrun = (read_number(environment, f"{name}_RESTART_COUNT") for name in ("SLURM", "TORCHELASTIC"))
    return slurm, int(launched[1]) if launched else 0, torchrun


def is_worker(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns True if a launcher started this process as one of several."""
    return "LOCAL_RANK" in environment


def rank_from_launcher(environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns the rank that a launcher gave to the process with this environment, or None."""
    return environment.get("RANK")


def _group_exists() -> bool:
    """Returns whether there is a default process group. Whoever has made one has imported torch."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _world_of_group(world: World, environment: Mapping[str, str]) -> World:
    """Returns the world with rank and size of the default process group, which somebody else has made.

    They need not have set any variables, for example under torch.multiprocessing.spawn. Without LOCAL_WORLD_SIZE, all
    ranks are assumed to be on one machine, unless MASTER_ADDR names another: then each machine has one rank per device.
    """
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    address = environment.get("MASTER_ADDR", "127.0.0.1")
    default_local_size = size if address in LOOPBACK else torch.accelerator.device_count() or size
    local_size = read_number(environment, "LOCAL_WORLD_SIZE", default_local_size)
    return replace(
        world,
        rank=rank,
        size=size,
        local_rank=read_number(environment, "LOCAL_RANK", rank % local_size),
        local_size=local_size,
        address=address,
        run_id=environment.get("TORCHELASTIC_RUN_ID", ""),
        environment="Ray Train" if "ray.train" in sys.modules else "a process group",
        group="imagined" if dist.get_backend() == "fake" else "made",
    )


def _job(environment: Mapping[str, str]) -> str:
    """Returns a name for the launcher that would restart this run, or an empty string.

    torchrun without a run id is identified by its process id.
    """
    if slurm := environment.get("SLURM_JOB_ID"):
        return f"SLURM job {slurm}"
    if launcher := environment.get("SHOAL_LAUNCHER"):
        return f"launcher {launcher} on {socket.gethostname()}"
    run_id = environment.get("TORCHELASTIC_RUN_ID")
    if run_id == "none":
        return f"torchrun {os.getppid()} on {socket.gethostname()}"
    return f"torchrun {run_id}" if run_id else ""


def _notes(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns warnings about variables that do not do what people expect."""
    if "NCCL_TIMEOUT" not in environment:
        return ()
    value = environment["NCCL_TIMEOUT"]
    return (f"NCCL_TIMEOUT={value} has no effect: PyTorch does not read it; set distributed.timeout",)


def _notes_outside_tasks(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns a warning for a process in the shell of a SLURM job that has several tasks: srun did not start it."""
    nodes, tasks = (environment.get(f"SLURM_{name}", "1") for name in ("JOB_NUM_NODES", "NTASKS"))
    if "SLURM_JOB_ID" not in environment or (nodes == "1" and tasks == "1"):
        return ()
    return (
        f"SLURM job {environment['SLURM_JOB_ID']} has {nodes} machines and {tasks} tasks, and this process is none of "
        "its tasks, so it uses this machine alone; start it by srun",
    )
