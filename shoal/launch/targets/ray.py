"""Starts a run on the workers of Ray Train, which makes the process group and restarts workers that die."""

from __future__ import annotations

import math
import os
import re
import socket
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from shoal.config import Run
from shoal.config.yaml import format_value
from shoal.errors import UserError, one_line, printable
from shoal.launch.targets import Launch
from shoal.launch.targets.checks import check_layout_of, count_gpus, number_of_nodes
from shoal.processes.watchdog import group_timeout_seconds


def submit(run: Run, launch: Launch, dry_run: bool) -> int:
    """Trains the run on Ray workers and returns when it has ended; with `dry_run` prints Ray's settings."""
    settings = trainer_settings(run)
    if dry_run:
        print("".join(f"{key}: {format_value(value)}\n" for key, value in settings.items()), end="")
        print(f"command: {format_value(launch.command)}")
        return 0
    _check_address(run.config.launch.ray.address)
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")  # the default since Ray 2.51
    try:
        ray: Any = import_module("ray.train.torch") and import_module("ray")
    except ImportError:
        raise UserError('launch.target = ray: Ray is not installed; pip install "shoal[ray]"') from None
    from shoal.launch.targets.ray_notes import Notes
    from shoal.launch.targets.ray_worker import train_as_worker

    _connect(ray, run)
    try:
        notes = ray.remote(num_cpus=0)(Notes).remote()
        trainer = ray.train.torch.TorchTrainer(
            train_as_worker,
            train_loop_config={
                "folder": str(Path.cwd()),
                "config": str(launch.config),
                "overrides": [*launch.overrides],
                "job": f"Ray run {settings['name']}",
                "notes": notes,
            },
            torch_config=ray.train.torch.TorchConfig(timeout_s=settings["timeout_seconds"]),
            scaling_config=ray.train.ScalingConfig(
                num_workers=settings["num_workers"],
                use_gpu="GPU" in settings["resources_per_worker"],
                resources_per_worker=settings["resources_per_worker"],
            ),
            run_config=ray.train.RunConfig(
                name=settings["name"],
                storage_path=settings["storage_path"],
                failure_config=ray.train.FailureConfig(max_failures=settings["max_failures"]),
                worker_runtime_env={"env_vars": settings["env"]},
            ),
        )
        try:
            result = trainer.fit()
        except Exception as failure:
            problem = ray.get(notes.final_error.remote())
            raise UserError(problem or f"launch.target = ray: {_cause(failure)}") from None
        if problem := ray.get(notes.final_error.remote()):
            raise UserError(problem)
    finally:
        ray.shutdown()
    losses = (f"{name} {value:.4f}" for name, value in result.metrics.items() if name.endswith("/loss"))
    print(f"finished at step {result.metrics['step']}, {', '.join(losses)}")
    print("run folder  ", printable(run.config.output_dir), flush=True)
    return 0


def trainer_settings(run: Run) -> dict[str, Any]:
    """Returns what Ray is asked for: workers, their resources, restarts, and where Ray keeps its own files."""
    launch, ray, distributed = run.config.launch, run.config.launch.ray, run.config.distributed
    workers = number_of_nodes(run) * launch.procs_per_node
    check_layout_of(run)
    resources: dict[str, float] = {"CPU": ray.cpus_per_worker}
    if gpus := count_gpus(run, "launch.ray.gpus_per_worker", ray.gpus_per_worker, processes=1):
        resources["GPU"] = gpus
    return {
        # Ray goes on with an earlier run of the same name; shoal resumes from its own checkpoints.
        "name": f"{run.config.experiment.name}-{time.strftime('%Y%m%d-%H%M%S')}",
        "num_workers": workers,
        "resources_per_worker": resources,
        "max_failures": launch.max_restarts,
        "storage_path": ray.storage_path or str(Path(run.config.output_dir).absolute() / "ray"),
        "timeout_seconds": math.ceil(group_timeout_seconds(distributed.timeout, distributed.init_timeout)),
        "env": dict(launch.env),
    }


def _connect(ray: Any, run: Run) -> None:
    """Connects to the Ray cluster of the config, or starts a Ray on this machine with enough CPUs for the workers."""
    section, launch = run.config.launch.ray, run.config.launch
    if section.address is None:
        needed = math.ceil(launch.processes * section.cpus_per_worker)
        # Ray waits forever for CPUs that it does not have.
        ray.init(num_cpus=max(needed, os.cpu_count() or 1), include_dashboard=False)
        return
    try:
        ray.init(address=section.address)
    except (ConnectionError, ValueError) as error:
        raise _no_cluster(section.address, error) from None


def _check_address(address: str | None) -> None:
    """Raises UserError if nothing listens at the address of a cluster. Ray itself would try for minutes."""
    if found := re.fullmatch(r"(?:ray://)?([\w.-]+):(\d{1,5})", address or ""):
        try:
            socket.create_connection((found[1], int(found[2])), timeout=10).close()
        except (OSError, OverflowError) as error:
            raise _no_cluster(str(address), error) from None


def _no_cluster(address: str, error: Exception) -> UserError:
    return UserError(
        f"launch.ray.address = {address}: there is no Ray cluster ({one_line(error)}); start one with "
        "`ray start --head`, or leave the key out"
    )


def _cause(failure: Exception) -> str:
    """Returns the first error of a worker, in one line. Ray's own message is a page."""
    errors = getattr(failure, "worker_failures", None) or {}
    if errors:
        rank = min(errors)
        return f"rank {rank} failed: {one_line(str(errors[rank]).strip().splitlines()[-1])}"
    return one_line(failure)
