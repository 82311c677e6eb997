"""Detects which process of a run this one is. No other file of shoal reads the variables that launchers set."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from shoal.errors import UserError
from shoal.processes.world import LOOPBACK, World

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def detect(environment: Mapping[str, str] = os.environ) -> World:
    """Returns the world of the default process group if there is one, else the world that the environment describes.

    The environment variables are those of torchrun; without any of them the world is one process. Raises UserError if
    only some of them are set.
    """
    world = World(
        job=_job(environment),
        run_id=environment.get("TORCHELASTIC_RUN_ID", ""),
        attempt=detect_attempt(environment),
    )
    if dist.is_initialized():
        return _world_of_group(world, environment)
    if not {"RANK", "LOCAL_RANK"} & {*environment} and environment.get("WORLD_SIZE", "1") == "1":
        return world
    if missing := [name for name in _RANK_VARIABLES if name not in environment]:
        present = ", ".join(f"{name}={environment[name]}" for name in _RANK_VARIABLES if name in environment)
        raise UserError(
            f"{present}: the environment has no {', '.join(missing)}; "
            "start the processes by `torchrun` or launch.procs_per_node, or unset all of these variables"
        )
    rank, size = _read_number(environment, "RANK"), _read_number(environment, "WORLD_SIZE")
    if rank >= size:
        raise UserError(f"RANK={rank}: it must be below WORLD_SIZE={size}; ranks count from 0")
    return replace(
        world,
        rank=rank,
        size=size,
        local_rank=_read_number(environment, "LOCAL_RANK"),
        local_size=_read_number(environment, "LOCAL_WORLD_SIZE", size),
        address=environment["MASTER_ADDR"],
        port=_read_number(environment, "MASTER_PORT"),
        launcher_keeps_board=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        launcher_pid=_read_number(environment, "SHOAL_LAUNCHER") or None,
    )


def detect_attempt(environment: Mapping[str, str] = os.environ) -> tuple[int, int, int]:
    """Returns how often SLURM, shoal's launcher and torchrun have restarted this run.

    shoal's launcher writes the number of the attempt into torchrun's run id.
    """
    launched = re.fullmatch(r"attempt (\d+)", environment.get("TORCHELASTIC_RUN_ID", ""))
    slurm, torchrun = (_read_number(environment, f"{name}_RESTART_COUNT") for name in ("SLURM", "TORCHELASTIC"))
    return slurm, int(launched[1]) if launched else 0, torchrun


def detect_launchers(nodes: int, procs_per_node: int, environment: Mapping[str, str] = os.environ) -> World:
    """Returns the world of the launchers, one process on each of `nodes` machines.

    Raises UserError if the variables that say which machine this is are missing or wrong.
    """
    if nodes == 1:
        detect(environment)  # raises UserError if another launcher set only some of its variables
        return World(address="127.0.0.1")  # port 0: any free port
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if name not in environment]:
        raise UserError(
            f"launch.nodes = {nodes}: the environment has no {', '.join(missing)}; "
            "set MASTER_ADDR, MASTER_PORT and NODE_RANK on every machine"
        )
    node, port = _read_number(environment, "NODE_RANK"), _read_number(environment, "MASTER_PORT")
    if node >= nodes:
        raise UserError(f"NODE_RANK={node}: it must be below launch.nodes = {nodes}; machines count from 0")
    processes = nodes * procs_per_node
    if (size := _read_number(environment, "WORLD_SIZE", processes)) != processes:
        raise UserError(
            f"WORLD_SIZE={size}: launch.nodes {nodes} × launch.procs_per_node {procs_per_node} = {processes}; "
            "unset WORLD_SIZE or make them agree"
        )
    return World(node, nodes, address=environment["MASTER_ADDR"], port=port)


def is_worker(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns True if a launcher started this process as one of several."""
    return "LOCAL_RANK" in environment


def rank_from_launcher(environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns the rank that a launcher gave to the process with this environment, or None."""
    return environment.get("RANK")


def _world_of_group(world: World, environment: Mapping[str, str]) -> World:
    """Returns the world with rank and size of the default process group, which somebody else has made.

    They need not have set any variables, for example under torch.multiprocessing.spawn. Without LOCAL_WORLD_SIZE, all
    ranks are assumed to be on one machine, unless MASTER_ADDR names another: then each machine has one rank per device.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    address = environment.get("MASTER_ADDR", "127.0.0.1")
    default_local_size = size if address in LOOPBACK else torch.accelerator.device_count() or size
    local_size = _read_number(environment, "LOCAL_WORLD_SIZE", default_local_size)
    return replace(
        world,
        rank=rank,
        size=size,
        local_rank=_read_number(environment, "LOCAL_RANK", rank % local_size),
        local_size=local_size,
        address=address,
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


def _read_number(environment: Mapping[str, str], name: str, default: int = 0) -> int:
    text = environment.get(name, str(default))
    if not text.isdigit():
        raise UserError(f"{name}={text!r}: the environment variable must be a number; correct or unset it")
    return int(text)
