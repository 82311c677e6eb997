"""Kills processes of a run at random, and checks that the run ends exactly like an uninterrupted one.

The run is the user's own run, started with the same command in a new folder. The killer is outside of the run: it picks
a process, waits for a random moment in a step, an evaluation or a save, and sends SIGKILL.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint import Checkpoint, find_latest_checkpoint
from shoal.checkpoint.inspect import diff, open_step_folder
from shoal.config import Run
from shoal.errors import UserError
from shoal.processes.detect import rank_from_launcher
from shoal.training.observers import VARYING_METRICS

_POLL_SECONDS = 0.005
_DELAYS = {"in a step": 0.3, "in a save": 0.02, "in an evaluation": 0.1}
"""The kinds of moments at which a process is killed, and how many seconds after the moment began at most."""

Start = Callable[[Path], "subprocess.Popen[str]"]
Log = dict[str, list[tuple[int, object]]]
"""The (step, value) pairs of each tag."""


@dataclass(frozen=True)
class Kill:
    """A process that was killed, and where the run was."""

    victim: str
    moment: str
    after_step: int


@dataclass(frozen=True)
class Verdict:
    """The result of comparing the killed run with the uninterrupted one."""

    kills: list[Kill]
    problems: list[str]
    allowed: float | None
    """How much a tensor may differ, relative to its largest value: twice as much as between two uninterrupted runs.
    None if this hardware computes the same bits in every run, so that nothing may differ."""

    @property
    def passed(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """Returns the verdict as plain data, for JSON."""
        return {"passed": self.passed, **asdict(self)}


def chaos(
    config: Path,
    overrides: Sequence[str],
    run: Run,
    folder: Path,
    kills: int,
    seed: int = 0,
    on_line: Callable[[str], None] = lambda line: None,
) -> Verdict:
    """Trains without interruption, trains again while killing processes, and compares the two runs.

    `run` is the resolved config with its overrides. `folder` must not exist yet; all runs are inside it. Progress goes
    to `on_line`, line by line.
    """
    folder.mkdir(parents=True)
    start = partial(start_run, config, overrides, kills + 3)
    on_line("training without interruption")
    uninterrupted = _train_to_the_end(start, folder / "uninterrupted")
    allowed = None
    on_cpu = run.config.training.device == "cpu" or not torch.accelerator.is_available()
    if not on_cpu and not run.config.experiment.deterministic:
        on_line(
            "training without interruption again: this hardware is not deterministic, so some difference is allowed"
        )
        again = _train_to_the_end(start, folder / "uninterrupted_again")
        difference = diff(_last_checkpoint(uninterrupted), _last_checkpoint(again))
        allowed = 2 * max((found.relative or 0.0 for found in difference.tensors), default=0.0)
    killed = folder / "killed"
    done = _Killer(start, killed, run, random.Random(seed), on_line).kill(kills)
    problems = checkpoint_problems(uninterrupted, killed, allowed) + log_problems(uninterrupted, killed, allowed)
    return Verdict(done, problems, allowed)


def start_run(config: Path, overrides: Sequence[str], max_restarts: int, folder: Path) -> subprocess.Popen[str]:
    """Starts the user's run with this folder as its output folder. What it prints goes to `chaos.log` there."""
    keys = {
        "experiment.output_dir": folder,
        "logging.every": 1,
        "logging.console": "off",
        "logging.jsonl": "true",
        "launch.max_restarts": max_restarts,
    }
    command = [sys.executable, "-m", "shoal", "train", str(config), *overrides]
    command += [f"{key}={value}" for key, value in keys.items()]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "chaos.log").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, text=True)


def _train_to_the_end(start: Start, folder: Path) -> Path:
    if code := start(folder).wait():
        raise UserError(f"the uninterrupted run failed with exit code {code}; see {folder / 'chaos.log'}")
    return folder


class _Killer:
    """Starts a run, and kills its processes."""

    def __init__(
        self, start: Start, folder: Path, run: Run, rng: random.Random, on_line: Callable[[str], None]
    ) -> None:
        self.start, self.folder, self.rng, self.on_line = start, folder, rng, on_line
        self.eval_steps = run.config.training.eval_steps
        self.launcher_name = "the process" if run.config.launch.procs_per_node == 1 else "the launcher"
        self.process = start(folder)

    def kill(self, times: int) -> list[Kill]:
        """Kills a process `times` times, starts the run again if its launcher was killed, and waits until it ends."""
        kills: list[Kill] = []
        while len(kills) < times and (kill := self._kill_once()):
            kills.append(kill)
            self.on_line(f"kill {len(kills)} of {times}: {kill.victim} {kill.moment}, after step {kill.after_step}")
        if len(kills) < times:
            self.on_line(f"the run ended after {len(kills)} of {times} kills; raise training.max_steps for more")
        while self.process.wait() != 0:
            self._start_again()
        return kills

    def _kill_once(self) -> Kill | None:
        """Kills one process; returns None if the run ended first."""
        while self.process.poll() != 0:
            moment = self.rng.choice([moment for moment in _DELAYS if self.eval_steps or moment != "in an evaluation"])
            step_before = self._step()
            while not self._is_at(moment, step_before):
                if self.process.poll() is not None and not self._start_again():
                    return None
                time.sleep(_POLL_SECONDS)
            time.sleep(self.rng.random() * _DELAYS[moment])
            if self.process.poll() is None:
                pid, name = self.rng.choice([*workers_of(self.process.pid), (self.process.pid, self.launcher_name)])
                step = self._step()
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:  # the process has just ended
                    continue
                self._wait_until_dead(pid)
                return Kill(name, moment, step)
        return None

    def _is_at(self, moment: str, step_before: int) -> bool:
        """Returns whether the run is saving, or has made a new step after which the moment begins."""
        if moment == "in a save":
            return any((self.folder / "checkpoints").glob(".step_*.part"))
        step = self._step()
        return step > step_before and (moment == "in a step" or step % (self.eval_steps or 1) == 0)

    def _step(self) -> int:
        """Returns the last step in the log, or 0."""
        try:
            return int(json.loads((self.folder / "metrics.jsonl").read_bytes().splitlines()[-1])["step"])
        except (OSError, IndexError, ValueError, KeyError):
            return 0

    def _wait_until_dead(self, pid: int) -> None:
        """Waits until a killed process is gone; starts the run again if it was the launcher."""
        if pid == self.process.pid:
            self.process.wait()
            self._start_again()
            return
        deadline = time.monotonic() + 60
        while Path(f"/proc/{pid}").exists() and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _start_again(self) -> bool:
        """Starts the run again if its launcher was killed; returns False if the run is finished."""
        code = self.process.returncode
        if code > 0:
            raise UserError(
                f"the run failed with exit code {code} after a kill and did not resume; see {self.folder / 'chaos.log'}"
            )
        if code < 0:
            self.process = self.start(self.folder)
        return code < 0


def workers_of(launcher: int) -> list[tuple[int, str]]:
    """Returns the process id and name of each rank that a launcher has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (folder / "environ").read_text().split("\0") if parent == launcher else []
        except (OSError, ValueError, IndexError):  # the process has just ended
            continue
        rank = rank_from_launcher(dict(variable.split("=", 1) for variable in variables if "=" in variable))
        if rank is not None:
            found.append((int(folder.name), f"rank {rank}"))
    return found


def _last_checkpoint(folder: Path) -> Checkpoint:
    if (path := find_latest_checkpoint(folder)) is None:
        raise UserError(f"{folder} has no valid checkpoint; see {folder / 'chaos.log'}")
    return open_step_folder(path)


def checkpoint_problems(uninterrupted: Path, killed: Path, allowed: float | None) -> list[str]:
    """Compares the last checkpoints of two runs: weights, optimizer state and position."""
    difference = diff(_last_checkpoint(uninterrupted), _last_checkpoint(killed), allowed)
    return [
        *(f"{key}: {a} in the uninterrupted run, {b} in the killed run" for key, (a, b) in difference.position.items()),
        *(f"{name} is in only one of the checkpoints" for name in (*difference.only_in_a, *difference.only_in_b)),
        *(
            f"{tensor.name}: {tensor.problem or f'differs by {tensor.relative:.1e} of its largest value'}"
            for tensor in difference.tensors
        ),
    ]


def log_problems(uninterrupted: Path, killed: Path, allowed: float | None) -> list[str]:
    """Compares metrics.jsonl and the TensorBoard files of two runs: every tag must have the same steps and values."""
    problems = []
    for name, read in (("metrics.jsonl", read_metrics), ("tensorboard", read_tensorboard)):
        if not (uninterrupted / name).exists():
            continue
        a, b = _with_previews_of_both(read(uninterrupted / name), read(killed / name))
        problems += [f"{name}: {tag} is in only one of the runs" for tag in sorted(a.keys() ^ b.keys())]
        for tag in sorted(a.keys() & b.keys()):
            if [step for step, _ in a[tag]] != [step for step, _ in b[tag]]:
                problems.append(
                    f"{name}: {len(b[tag])} values of {tag} in the killed run, {len(a[tag])} in the uninterrupted run"
                )
            elif allowed is None and not tag.endswith(VARYING_METRICS) and a[tag] != b[tag]:
                step = next(one[0] for one, other in zip(a[tag], b[tag], strict=True) if one != other)
                problems.append(f"{name}: {tag} differs at step {step}")
    return problems


def _with_previews_of_both(a: Log, b: Log) -> tuple[Log, Log]:
    """Leaves out previews that one of the runs does not have: how long they take decides how often they are shown."""
    a, b = dict(a), dict(b)
    for tag in {tag for tag in (*a, *b) if tag.startswith("preview")}:
        in_both = {step for step, _ in a.get(tag, [])} & {step for step, _ in b.get(tag, [])}
        for log in (a, b):
            log[tag] = [(step, text) for step, text in log.get(tag, []) if step in in_both]
    return a, b


def read_metrics(path: Path) -> Log:
    """Returns the values of a metrics.jsonl by tag. The tag `line` has the keys of each line."""
    log: Log = {}
    for row in map(json.loads, path.read_text().splitlines()):
        # A preview has a line of its own, and need not be in both runs.
        about = {"preview": row["preview"]} if "preview" in row else {**row, "line": [*row]}
        for tag, value in about.items():
            log.setdefault(tag, []).append((row["step"], value))
    return log


def read_tensorboard(folder: Path) -> Log:
    """Returns the numbers and texts of TensorBoard's files by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    tags = events.Tags()
    return {  # numbers become text, so that NaN equals NaN
        **{tag: [(event.step, str(event.value)) for event in events.Scalars(tag)] for tag in tags["scalars"]},
        **{
            tag: [(event.step, event.tensor_proto.SerializeToString()) for event in events.Tensors(tag)]
            for tag in tags["tensors"]
        },
    }
