"""Detects which process of a run this one is, once; the World that it returns is handed to all code that needs it."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.processes.environments import ENVIRONMENTS, LaunchKeys, Plain, ShoalLauncher, read_number
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
