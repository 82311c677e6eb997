"""What a worker of Ray Train runs: the same training as everywhere, in the process group that Ray made.

Ray runs it in a thread, so the run handles no signals. After a failure Ray starts all workers again, and the run
resumes from its last checkpoint. The hang detection ends a worker's process, which Ray sees as a failure.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from shoal.callbacks.callback import Callback
from shoal.callbacks.run_handle import RunHandle
from shoal.checkpoint import step_folders
from shoal.config import load_run
from shoal.config.callbacks import CallbackChoice
from shoal.errors import UserError, one_line
from shoal.launch.mistakes import RecipeFailure, explained
from shoal.processes.board import connect_to_board
from shoal.processes.detect import detect
from shoal.processes.group import is_lost_peer_error
from shoal.training import train

POINTER = "checkpoint.json"
"""The file of a checkpoint that Ray knows of; it has the path of shoal's, which may be large and stays where it is."""


def train_as_worker(settings: dict[str, Any]) -> None:
    """Trains the run as one rank of the process group that Ray has made."""
    ray: Any = import_module("ray")
    notes = settings["notes"]
    if ray.get(notes.final_error.remote()):
        return  # Ray starts workers again after any error, and this one would come again
    os.chdir(settings["folder"])
    output_dir, saved_before = None, list[Path]()
    try:
        with explained():
            run = load_run(settings["config"], settings["overrides"])
        output_dir = run.config.output_dir
        saved_before = step_folders(output_dir)
        run = replace(run, callbacks=(*run.callbacks, CallbackChoice("ray", ReportToRay, None)))
        world = detect()
        board = connect_to_board(world)
        if world.rank == 0:
            board.set("starts before", str(ray.get(notes.count_start.remote())))
        world = replace(world, job=settings["job"], attempt=(int(board.get("starts before")), 0, 0))
        with explained(run):
            outcome = train(run, world)
    except Exception as error:
        if not is_lost_peer_error(error):
            is_certain = isinstance(error, UserError | PermissionError) and not isinstance(error, RecipeFailure)
            if is_certain or output_dir is None or step_folders(output_dir) == saved_before:
                ray.get(notes.end_with.remote(one_line(error, limit=10_000)))
        raise
    _report(outcome.step, outcome.metrics, outcome.last_checkpoint if world.rank == 0 else None)


class ReportToRay(Callback):
    """Passes metrics and checkpoints on to Ray. All ranks report, because Ray waits for all of them."""

    _reported: Path | None = None

    def after_log(self, run: RunHandle, metrics: Mapping[str, float]) -> None:
        newest = max(step_folders(run.output_dir), default=None) if run.strategy.is_main_process else None
        _report(run.step, metrics, newest if newest != self._reported else None)
        self._reported = newest


def _report(step: int, metrics: Mapping[str, float], checkpoint: Path | None) -> None:
    ray_train: Any = import_module("ray.train")
    numbers = {"step": step, **metrics}
    if checkpoint is None:
        ray_train.report(numbers)
        return
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        Path(folder, POINTER).write_text(json.dumps({"path": str(checkpoint.absolute()), "step": step}))
        ray_train.report(numbers, checkpoint=ray_train.Checkpoint.from_directory(folder))
