"""The environments in which a process can find itself, one class each: which variables it has, and what they mean.

`ENVIRONMENTS` lists them; the first that matches decides. Only this file and `detect.py` read launchers' variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol
from zlib import crc32

from shoal.errors import UserError
from shoal.processes.slurm_lists import expand_hosts, tasks_per_node
from shoal.processes.world import World

Variables = Mapping[str, str]


class LaunchKeys(Protocol):
    """The keys of the section `launch` that decide with the environment which process this is."""

    @property
    def min_nodes(self) -> int: ...
    @property
    def max_nodes(self) -> int: ...
    @property
    def procs_per_node(self) -> int: ...
    @property
    def master_addr(self) -> str | None: ...
    @property
    def master_port(self) -> int | None: ...
    @property
    def node_rank(self) -> int | None: ...
    @property
    def detect(self) -> str: ...


class Environment(Protocol):
    """What started this process, as far as its variables tell."""

    @property
    def name(self) -> str:
        """The name for the report."""

    def matches(self, variables: Variables, keys: LaunchKeys | None) -> bool:
        """Returns whether the process is in this environment."""

    def world(self, variables: Variables, keys: LaunchKeys | None) -> World:
        """Returns which process this is. Raises UserError if variables are missing, or contradict each other or `keys`.

        `keys` is None for a script that cannot start processes.
        """


_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RankVariables:
    """torchrun, shoal's launcher, DeepSpeed's, or a script that sets the same variables: this process is a rank."""

    name: str = "RANK and LOCAL_RANK"

    def matches(self, variables: Variables, keys: LaunchKeys | None) -> bool:
        return bool({"RANK", "LOCAL_RANK"} & {*variables})

    def world(self, variables: Variables, keys: LaunchKeys | None) -> World:
        _require(variables, _RANK_VARIABLES)
        rank, size = read_number(variables, "RANK"), read_number(variables, "WORLD_SIZE")
        if rank >= size:
            raise UserError(f"RANK={rank}: it must be below WORLD_SIZE={size}; ranks count from 0")
        local_rank, local_size = (
            read_number(variables, "LOCAL_RANK"),
            read_number(variables, "LOCAL_WORLD_SIZE", size),
        )
        if local_rank >= local_size:
            raise UserError(
                f"LOCAL_RANK={local_rank}: it must be below LOCAL_WORLD_SIZE={local_size}; unset all rank variables, "
                "or start the processes by torchrun"
            )
        if size % max(1, local_size):
            raise UserError(
                f"WORLD_SIZE={size}: it is not a multiple of LOCAL_WORLD_SIZE={local_size}; "
                "start the same number of processes on every machine"
            )
        return World(
            rank,
            size,
            local_rank,
            local_size,
            variables["MASTER_ADDR"],
            read_port(variables),
            launcher_keeps_board=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )


@dataclass(frozen=True)
class ShoalLauncher(RankVariables):
    """The launcher of this package started the process."""

    name: str = "shoal's launcher"

    def matches(self, variables: Variables, keys: LaunchKeys | None) -> bool:
        return {"SHOAL_LAUNCHER", "LOCAL_RANK"} <= {*variables}

    def world(self, variables: Variables, keys: LaunchKeys | None) -> World:
        launcher = read_number(variables, "SHOAL_LAUNCHER") or None
        return replace(super().world(variables, keys), launcher_pid=launcher)


@dataclass(frozen=True)
class Torchrun(RankVariables):
    """torchrun, or another user of torch's elastic agent."""

    name: str = "torchrun"

    def matches(self, variables: Variables, keys: LaunchKeys | None) -> bool:
        return {"TORCHELASTIC_RUN_ID", "LOCAL_RANK"} <= {*variables}

    def world(self, variables: Variables, keys: LaunchKeys | None) -> World:
        world = super().world(variables, keys)
        if Slurm().matches(variables, keys) and world.local_size > 1:
            tasks = tasks_per_node(variables)[read_number(variables, "SLURM_NODEID")]
            if tasks > 1:
                raise UserError(
                    f"LOCAL_WORLD_SIZE={world.local_size}: SLURM has started {tasks} tasks on this machine, and "
                    f"torchrun {world.local_size} processes in each, {tasks * world.local_size} in all; use "
                    "--ntasks-per-node=1 with torchrun, or run `shoal train` itself in every task"
                )
        return world


class Kubeflow:
    """A pod of a PyTorchJob or a TrainJob, where `RANK` counts pods."""

    name = "Kubeflow"

    def matches(self, variables: Variables, keys: LaunchKeys | None) -> bool:
        if "LOCAL_RANK" in variables:
            return False
        pytorchjob = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= {*variables}
        return any(name.startswith("PET_") for name in variables) or (
            pytorchjob and "KUBERNETES_SERVICE_HOST" in variables
        )

    def world(self, variables: Variables, keys: LaunchKeys | None) -> World:
        plain_names = {name.removeprefix("PET_"): value for name, value in variables.items()}
        if "RANK" in variables:
            plain_names.setdefault("NODE_RANK", variables["RANK"])
        procs = read_number(variables, "PET_NPROC_PER_NODE", 1)
        if procs < 1:
            raise UserError("PET_NPROC_PER_NODE=0: a pod needs a process; set the number of processes per node")
        nodes = read_number(
            variables, "PET_NNODES", max(1, read_number(variables, "WORLD_SIZE", procs) // procs), hint=_NO_ELASTIC_PODS
        )
        if "WORLD_SIZE" in variables and read_number(variables, "WORLD_SIZE") not in (nodes, nodes * procs):
            raise UserError(
                f"WORLD_SIZE={variables['WORLD_SIZE']}: there are PET_NNODES {nodes} × PET_NPROC_PER_NODE {procs} = "
                f"{nodes * procs} processes; correct the job, or unset WORLD_SIZE"
            )
        if nodes > 1:
            _require(plain_names, ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK"), "in the pods of a job")
        node = read_number(plain_names, "NODE_RANK")
        if node >= nodes:
            raise UserError(f"NODE_RANK={node}: it must be below the number of pods, {nodes}; pods count from 0")
        place = World(
            node,
            nodes,
            address=plain_names.get("MASTER_ADDR", "127.0.0.1"),
            port=read_port(plain_names) if nodes > 1 else 0,
        )
        if procs == 1 and (keys is None or keys.procs_per_node == 1):
            return place if nodes > 1 else World()
        wanted = procs if "PET_NPROC_PER_NODE" in variables or keys is None else keys.procs_per_node
        if keys is not None and keys.procs_per_node not in (1, wanted):
            raise UserError(
                f"launch.procs_per_node = {keys.procs_per_node}, but PET_NPROC_PER_NODE={procs}; "
                "remove the key, or correct the number of processes per node in the job"
            )
        return _launcher(place, wanted, keys, f"PET_NPROC_PER_NODE={procs}")


_NO_ELASTIC_PODS = "start an elastic job by torchrun, or give the number of pods"


class Slurm:
    """A task that srun has started. In the shell of sbatch or salloc there is no job step, and it is not one."""

    name = "SLURM"

    def matches(self, variables: Variables, keys: LaunchKeys | None) -> bool:
        return {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} <= {*variables}

    def world(self, variables: Variables, keys: LaunchKeys | None) -> World:
        _require(variables, ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NODELIST"), "in a job step")
        rank, local_rank, node = (read_number(variables, f"SLURM_{name}") for name in ("PROCID", "LOCALID", "NODEID"))
        size, tasks = read_number(variables, "SLURM_STEP_NUM_TASKS"), tasks_per_node(variables)
        if size == 1 and (keys is None or keys.procs_per_node == 1):
            return World()
        if rank >= size or node >= len(tasks) or sum(tasks) != size or local_rank >= tasks[node]:
            raise UserError(
                f"SLURM_PROCID={rank}, SLURM_LOCALID={local_rank}, SLURM_NODEID={node}: they do not fit "
                f"SLURM_STEP_NUM_TASKS={size} and SLURM_STEP_TASKS_PER_NODE="
                f"{variables.get('SLURM_STEP_TASKS_PER_NODE', '')}; do not set SLURM's variables by hand"
            )
        if len({*tasks}) > 1:
            raise UserError(
                f"SLURM_STEP_TASKS_PER_NODE={variables['SLURM_STEP_TASKS_PER_NODE']}: machines have different numbers "
                "of tasks; use srun --ntasks-per-node"
            )
        if rank // tasks[0] != node:
            raise UserError(
                f"SLURM_PROCID={rank}, SLURM_NODEID={node}: tasks are not dealt out one machine after another; use "
                "srun --distribution=block"
            )
        hosts = expand_hosts(variables["SLURM_STEP_NODELIST"])
        meeting = _with_keys(variables, keys)
        address = meeting.get("MASTER_ADDR") or (hosts[0] if len(tasks) > 1 else "127.0.0.1")
        step = f"{variables.get('SLURM_JOB_ID', '')}.{variables['SLURM_STEP_ID']}"
        port = read_port(meeting) if "MASTER_PORT" in meeting else _port_of(step)
        place = World(rank, size, local_rank, tasks[0], address, port, run_id=f"SLURM step {step}", hosts=hosts)
        starts = keys.procs_per_node if keys is not None and tasks[0] == 1 and keys.procs_per_node > 1 else 0
        processes = size * (starts or 1)
        if "WORLD_SIZE" in variables and read_number(variables, "WORLD_SIZE") != processes:
            raise UserError(
                f"WORLD_SIZE={variables['WORLD_SIZE']}: SLURM has started {size} tasks, which makes {processes} "
                "processes; unset WORLD_SIZE, or start as many tasks"
            )
        if keys is not None and tasks[0] > 1 and keys.procs_per_node not in (1, tasks[0]):
            raise UserError(
                f"launch.procs_per_node = {keys.procs_per_node}, but SLURM has started {tasks[0]} tasks on this "
                "machine; use --ntasks-per-node=1, or remove the key"
            )
        return _launcher(place, starts, keys, f"SLURM_STEP_NUM_NODES={len(tasks)}") if starts else place


class OpenMPI:
    """A process that Open MPI's mpirun has started."""

    name = "MPI"

    def matches(self, variables: Variables, keys: LaunchKeys | None) -> bool:
        return "OMPI_COMM_WORLD_SIZE" in variables

    def world(self, variables: Variables, keys: LaunchKeys | None) -> World:
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        _require(variables, tuple(f"OMPI_COMM_WORLD_{name}" for name in names), "of mpirun")
        rank, size, local_rank, local_size = (read_number(variables, f"OMPI_COMM_WORLD_{name}") for name in names)
        meeting = _with_keys(variables, keys)
        if size == 1:
            return World()
        if rank >= size or local_rank >= local_size or size % local_size:
            raise UserError(
                f"OMPI_COMM_WORLD_RANK={rank}: it does not fit OMPI_COMM_WORLD_SIZE={size} and "
                f"OMPI_COMM_WORLD_LOCAL_SIZE={local_size}; start the same number of processes on every machine"
            )
        if rank % local_size != local_rank:
            raise UserError(
                f"OMPI_COMM_WORLD_RANK={rank}, OMPI_COMM_WORLD_LOCAL_RANK={local_rank}: ranks are not dealt out one "
                "machine after another; use mpirun --map-by slot"
            )
        if size > local_size:
            _require(meeting, ("MASTER_ADDR",), "and mpirun has started processes on several machines")
        job = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid", "")
        port = read_port(meeting) if "MASTER_PORT" in meeting else _port_of(job)
        address = meeting.get("MASTER_ADDR", "127.0.0.1")
        return World(rank, size, local_rank, local_size, address, port, run_id=f"MPI job {job}")


class NodeVariables:
    """Several machines by hand: on each the user runs the same command, and says where they meet."""

    name = "MASTER_ADDR and NODE_RANK"

    def matches(self, variables: Variables, keys: LaunchKeys | None) -> bool:
        return (keys is not None and keys.max_nodes > 1) or variables.get("WORLD_SIZE", "1") != "1"

    def world(self, variables: Variables, keys: LaunchKeys | None) -> World:
        if keys is None or (keys.max_nodes == 1 and "NODE_RANK" not in variables):
            _require(variables, _RANK_VARIABLES)
        assert keys is not None  # or `_require` has raised: RankVariables comes before this environment
        procs, nodes = keys.procs_per_node, keys.max_nodes
        size = read_number(variables, "WORLD_SIZE", nodes * procs)
        if nodes == 1 and size % procs:
            raise UserError(
                f"WORLD_SIZE={size}: it counts processes, and is not a multiple of launch.procs_per_node = {procs}; "
                "make them agree"
            )
        nodes = size // procs if nodes == 1 else nodes
        if size != nodes * procs:
            raise UserError(
                f"WORLD_SIZE={size}: launch.nodes {nodes} × launch.procs_per_node {procs} = {nodes * procs}; "
                "unset WORLD_SIZE or make them agree"
            )
        place = _with_keys(variables, keys)
        if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if name not in place]:
            raise UserError(
                f"launch.nodes = {nodes}: the environment has no {', '.join(missing)}; set "
                f"{', '.join(f'launch.{name.lower()}' for name in missing)}, or the variables, on every machine"
            )
        node = read_number(place, "NODE_RANK")
        if node >= nodes:
            raise UserError(f"NODE_RANK={node}: it must be below launch.nodes = {nodes}; machines count from 0")
        return World(node, nodes, address=place["MASTER_ADDR"], port=read_port(place), starts=procs)


class Plain:
    """No launcher: this process is alone, or starts the others."""

    name = "no launcher"

    def matches(self, variables: Variables, keys: LaunchKeys | None) -> bool:
        return True

    def world(self, variables: Variables, keys: LaunchKeys | None) -> World:
        if keys is None or keys.procs_per_node == 1:
            return World()
        return World(address="127.0.0.1", starts=keys.procs_per_node)  # port 0: any free port


ENVIRONMENTS: tuple[Environment, ...] = (
    ShoalLauncher(),
    Torchrun(),
    Kubeflow(),
    RankVariables(),
    Slurm(),
    OpenMPI(),
    NodeVariables(),
    Plain(),
)
"""All environments; the first that matches decides."""


def _launcher(place: World, starts: int, keys: LaunchKeys | None, cause: str) -> World:
    """Returns the world of one launcher per machine, each of which starts processes."""
    if keys is None:
        raise UserError(
            f"{cause}: every machine needs {starts} processes, and a script cannot start them; use torchrun in it, or "
            "run `shoal train`"
        )
    if keys.max_nodes not in (1, place.size) or keys.min_nodes not in (1, place.size):
        raise UserError(f"launch.nodes = {keys.max_nodes}, but {cause}; remove the key or make them agree")
    if place.size == 1:
        return World(address="127.0.0.1", starts=starts)
    return replace(place, starts=starts)


def _with_keys(variables: Variables, keys: LaunchKeys | None) -> Variables:
    """Returns the variables, with the config's address, port and number of the machine in the place of theirs."""
    if keys is None:
        return variables
    given = {"MASTER_ADDR": keys.master_addr, "MASTER_PORT": keys.master_port, "NODE_RANK": keys.node_rank}
    return {**variables, **{name: str(value) for name, value in given.items() if value is not None}}


def _require(variables: Variables, names: tuple[str, ...], where: str = "") -> None:
    """Raises UserError if some of these variables are missing."""
    if missing := [name for name in names if name not in variables]:
        present = ", ".join(f"{name}={variables[name]}" for name in names if name in variables)
        raise UserError(
            f"{present or missing[0]}: the environment has no {', '.join(missing)}{f' {where}' if where else ''}; "
            "start the processes by `torchrun` or launch.procs_per_node, or unset all of these variables"
        )


def read_number(variables: Variables, name: str, default: int = 0, hint: str = "correct or unset it") -> int:
    text = variables.get(name, str(default))
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"{name}={text!r:.200}: the environment variable must be a number; {hint}")
    return int(text)


def read_port(variables: Variables) -> int:
    """Returns MASTER_PORT."""
    port = read_number(variables, "MASTER_PORT")
    if not 1 <= port <= 65535:
        raise UserError(f"MASTER_PORT={port}: a port is a number from 1 to 65535; correct it")
    return port


def _port_of(job: str) -> int:
    """Returns a port for a job that names none: equal in all its processes, and rarely that of another job."""
    return 20000 + crc32(job.encode()) % 10000
