"""Finds out which process of a run this one is. No other file of shoal reads the variables that launchers set."""

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

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def detect(environment: Mapping[str, str] = os.environ) -> World:
    """Returns the world of the process group that is there, or else the one that the environment describes.

    The variables are torchrun's; without any of them it is one process. Raises UserError if only some are set.
    """
    world = World(
        job=_job(environment),
        run_id=environment.get("TORCHELASTIC_RUN_ID", ""),
        attempt=detect_attempt(environment),
    )
    if dist.is_initialized():
        return _of_group(world, environment)
    if not {"RANK", "LOCAL_RANK"} & {*environment} and environment.get("WORLD_SIZE", "1") == "1":
        return world
    if missing := [name for name in _NEEDED if name not in environment]:
        given = ", ".join(f"{name}={environment[name]}" for name in _NEEDED if name in environment)
        raise UserError(
            f"the environment says {given}, but not {', '.join(missing)}: "
            "start the processes by `torchrun` or by launch.procs_per_node, or unset all of them"
        )
    rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if rank >= size:
        raise UserError(f"the environment says RANK={rank} in a world of WORLD_SIZE={size}; ranks count from 0")
    launcher_pid = _number(environment, "SHOAL_LAUNCHER") or None
    return replace(
        world,
        rank=rank,
        size=size,
        local_rank=_number(environment, "LOCAL_RANK"),
        local_size=_number(environment, "LOCAL_WORLD_SIZE", size),
        address=environment["MASTER_ADDR"],
        port=_number(environment, "MASTER_PORT"),
        launcher_keeps_board=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        launcher_pid=launcher_pid,
        found_by="shoal's launcher" if launcher_pid else "torchrun" if world.run_id else "environment variables",
    )


def detect_attempt(environment: Mapping[str, str] = os.environ) -> tuple[int, int, int]:
    """Returns how often SLURM, shoal's launcher and torchrun have started this run again.

    shoal's launcher counts its attempts in torchrun's run id.
    """
    launched = re.fullmatch(r"attempt (\d+)", environment.get("TORCHELASTIC_RUN_ID", ""))
    slurm, torchrun = (_number(environment, f"{name}_RESTART_COUNT") for name in ("SLURM", "TORCHELASTIC"))
    return slurm, int(launched[1]) if launched else 0, torchrun


def detect_launchers(nodes: int, procs_per_node: int, environment: Mapping[str, str] = os.environ) -> World:
    """Returns the world of the launchers, one on each of `nodes` machines. Raises UserError if that cannot be told."""
    if nodes == 1:
        detect(environment)  # refuses a rank that some other launcher half gave us
        return World(address="127.0.0.1")  # at any free port
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if name not in environment]:
        raise UserError(
            f"launch.nodes = {nodes} needs MASTER_ADDR, MASTER_PORT and NODE_RANK in the environment of every "
            f"node; missing: {', '.join(missing)}"
        )
    node, port = _number(environment, "NODE_RANK"), _number(environment, "MASTER_PORT")
    if node >= nodes:
        raise UserError(f"NODE_RANK={node}: it must be below {nodes}, which is launch.nodes")
    processes = nodes * procs_per_node
    if (size := _number(environment, "WORLD_SIZE", processes)) != processes:
        raise UserError(
            f"the environment says WORLD_SIZE={size}, but launch.nodes {nodes} × procs_per_node "
            f"{procs_per_node} = {processes}; unset it or make them agree"
        )
    return World(node, nodes, address=environment["MASTER_ADDR"], port=port)


def is_worker(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether a launcher started this process as one of several."""
    return "LOCAL_RANK" in environment


def rank_in(environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns the rank that a launcher gave to the process with this environment, if it gave one."""
    return environment.get("RANK")


def _of_group(world: World, environment: Mapping[str, str]) -> World:
    """Returns the world with the ranks of the default process group.

    Whoever made that, such as a function under torch.multiprocessing.spawn, need not have set any variables. Without
    them, ranks that meet on loopback or at an unknown address are taken to be on one machine.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    address = environment.get("MASTER_ADDR", "127.0.0.1")
    devices = size if address in LOOPBACK else torch.accelerator.device_count() or size
    local_size = _number(environment, "LOCAL_WORLD_SIZE", devices)
    return replace(
        world,
        rank=rank,
        size=size,
        local_rank=_number(environment, "LOCAL_RANK", rank % local_size),
        local_size=local_size,
        address=address,
        group="imagined" if dist.get_backend() == "fake" else "made",
        found_by="the process group that was there",
    )


def _job(environment: Mapping[str, str]) -> str:
    """Returns a name for what would start this run again. torchrun without a run id is known by its process."""
    if slurm := environment.get("SLURM_JOB_ID"):
        return f"SLURM job {slurm}"
    if launcher := environment.get("SHOAL_LAUNCHER"):
        return f"launcher {launcher} on {socket.gethostname()}"
    run_id = environment.get("TORCHELASTIC_RUN_ID")
    if run_id == "none":
        return f"torchrun {os.getppid()} on {socket.gethostname()}"
    return f"torchrun {run_id}" if run_id else ""


def _number(environment: Mapping[str, str], name: str, default: int = 0) -> int:
    text = environment.get(name, str(default))
    if not text.isdigit():
        raise UserError(f"the environment says {name}={text!r}, which is not a number")
    return int(text)
