"""`launch_distributed`: starts a function or a script in several processes, on one machine or on each of several."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.config.schema import LaunchConfig
from shoal.errors import UserError
from shoal.launch.spawn import run_function
from shoal.processes.detect import detect, rank_from_launcher
from shoal.processes.group import describe_exit


def launch_distributed(
    function: Callable[..., Any] | str | os.PathLike[str],
    *args: Any,
    processes: int = 2,
    start_method: str = "auto",
    config: str | os.PathLike[str] | None = None,
    num_nodes: int = 1,
    gpus_per_node: int = 8,
    master_addr: str | None = None,
    master_port: int | None = None,
) -> list[Any]:
    """Runs `function(*args)` in processes of this machine; returns its results by rank or raises the first error.

    The function may be defined in a cell of a notebook. `start_method` is `spawn`, `fork`, or `auto`: `spawn` if a new
    process can import the function, else `fork`, or `spawn` with the function sent by value if this process uses CUDA.
    On several machines, start the script on each, with MASTER_ADDR, MASTER_PORT, WORLD_SIZE (the number of all
    processes) and NODE_RANK in its environment; the results are those of this machine.

    Of a script, `launch_distributed("train.py", "run.yaml", num_nodes=1, gpus_per_node=8)` runs
    `train.py --config run.yaml` by torchrun, in `gpus_per_node` processes on this machine, and raises an error if it
    fails. With several `num_nodes`, call it on each machine, with NODE_RANK in the environment, and with `master_addr`
    and `master_port`, or MASTER_ADDR and MASTER_PORT; on one machine a free port is found.
    """
    if callable(function):
        return run_function(function, args, processes, start_method)
    if not isinstance(function, str | os.PathLike):
        raise TypeError(
            f"launch_distributed: the first argument is a {type(function).__name__}; give a function or the path of a "
            "script: launch_distributed(train, processes=2), launch_distributed('train.py', 'run.yaml')"
        )
    if len(args) > 1 or (args and config is not None):
        raise TypeError(
            "launch_distributed: a script takes its config and nothing else by position: "
            "launch_distributed(script, config, num_nodes=1, gpus_per_node=8)"
        )
    config = args[0] if args else config
    place: list[str] = ["--standalone"]  # any free port
    if num_nodes > 1:
        meeting: dict[str, Any] = {"master_addr": master_addr, "master_port": master_port}
        node = detect(launch=LaunchConfig(nodes=num_nodes, procs_per_node=gpus_per_node, **meeting))
        place = [f"--nnodes={num_nodes}", f"--node_rank={node.rank}"]
        place += [f"--master_addr={node.address}", f"--master_port={node.port}"]
    elif master_port is not None:
        place = ["--master_addr=localhost", f"--master_port={master_port}"]
    _run_script(Path(function), config, [*place, f"--nproc_per_node={gpus_per_node}"])
    return []


def _run_script(script: Path, config: str | os.PathLike[str] | None, torchrun: list[str]) -> None:
    if (rank := rank_from_launcher(os.environ)) is not None:
        raise UserError(f"launch_distributed: this process is already rank {rank} of a run; start the script alone")
    for path in (script, config):
        if path is not None and not Path(path).is_file():
            raise UserError(f"launch_distributed: {os.fspath(path)!r}: no such file")
    arguments = [] if config is None else ["--config", os.fspath(config)]
    command = [sys.executable, "-m", "torch.distributed.run", *torchrun, str(script), *arguments]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise RuntimeError(f"{script} {describe_exit(code)}")
