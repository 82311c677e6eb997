"""Kills a run at random, again and again, and compares its end with that of a run nobody touched.

The run is the user's own, started as they would start it, in folders of its own. The killer stands outside: it picks a
process of the run, waits for a moment in a step, an evaluation or a save, and sends SIGKILL.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.checkpoint import find_latest_checkpoint
from shoal.checkpoint.inspect import Difference, diff, open_step
from shoal.config import Run
from shoal.errors import UserError
from shoal.processes.detect import rank_in

_LOOK_SECONDS = 0.005
_TIMES = ("_per_second", "seconds", "memory_gib", "mfu")
"""Metrics that no two runs share."""


@dataclass(frozen=True)
class Kill:
    """One process, and where the run was then."""

    victim: str
    moment: str
    after_step: int


@dataclass
class Verdict:
    kills: list[Kill] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    allowed: float | None = None
    """How far apart two undisturbed runs were, where hardware does not repeat; None if it does."""

    @property
    def passed(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        kills = [vars(kill) for kill in self.kills]
        return {"passed": self.passed, "kills": kills, "problems": self.problems, "allowed": self.allowed}


def chaos(
    config: Path,
    overrides: Sequence[str],
    run: Run,
    folder: Path,
    kills: int,
    seed: int = 0,
    told: Callable[[str], None] = lambda line: None,
) -> Verdict:
    """`run` is what config and overrides resolve to; `folder` has to be new, and holds all runs."""
    folder.mkdir(parents=True)
    started = _Started(config, overrides, run, kills)
    told("undisturbed run")
    undisturbed = started.to_its_end(folder / "undisturbed")
    verdict = Verdict()
    if not _repeats(run):
        told("undisturbed run again: this hardware does not repeat to the bit, and the difference is what is allowed")
        again = started.to_its_end(folder / "again")
        verdict.allowed = 2 * _largest(_difference(undisturbed, again))
    killer = _Killer(started, folder / "disturbed", run, random.Random(seed), told)
    verdict.kills = killer.kill(kills)
    difference = _difference(undisturbed, folder / "disturbed", verdict.allowed)
    verdict.problems = [*_problems(difference), *_metric_problems(undisturbed, folder / "disturbed", verdict.allowed)]
    if run.config.logging.tensorboard:
        verdict.problems += _tensorboard_problems(undisturbed, folder / "disturbed", verdict.allowed)
    return verdict


@dataclass(frozen=True)
class _Started:
    """How the user's run is started."""

    config: Path
    overrides: Sequence[str]
    run: Run
    kills: int

    def start(self, folder: Path) -> subprocess.Popen[str]:
        keys = {
            "experiment.output_dir": folder,
            "logging.every": 1,
            "logging.console": "off",
            "launch.max_restarts": self.kills + 3,
        }
        command = [sys.executable, "-m", "shoal", "train", str(self.config), *self.overrides]
        command += [f"{key}={value}" for key, value in keys.items()]
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "chaos.log").open("a") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, text=True)

    def to_its_end(self, folder: Path) -> Path:
        process = self.start(folder)
        if process.wait():
            raise UserError(f"the undisturbed run failed with {process.returncode}; see {folder / 'chaos.log'}")
        return folder


class _Killer:
    def __init__(
        self, started: _Started, folder: Path, run: Run, rng: random.Random, told: Callable[[str], None]
    ) -> None:
        self.started, self.folder, self.run, self.rng, self.told = started, folder, run, rng, told
        self.process = started.start(folder)

    def kill(self, times: int) -> list[Kill]:
        """Kills as often, starting the run again where its launcher died, and lets it come to its end."""
        kills: list[Kill] = []
        while len(kills) < times:
            kill = self._kill_once()
            if kill is None:
                self.told(f"the run ended after {len(kills)} kills; give it more steps for more")
                break
            kills.append(kill)
            self.told(f"kill {len(kills)} of {times}: {kill.victim}, {kill.moment}, after step {kill.after_step}")
        self._come_to_an_end()
        return kills

    def _kill_once(self) -> Kill | None:
        moment = self.rng.choice(["in a step", "in a save", *(["in an evaluation"] if self._evaluates() else [])])
        before = self._step()
        while not self._is_at(moment, before):
            if self.process.poll() is not None and not self._start_again():
                return None
            time.sleep(_LOOK_SECONDS)
        time.sleep(self.rng.random() * {"in a step": 0.3, "in a save": 0.02, "in an evaluation": 0.1}[moment])
        victims = self._victims()
        if not victims:
            return None if self.process.poll() == 0 else self._kill_once()
        pid, name = self.rng.choice(victims)
        step = self._step()
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it came to its end by itself
            return self._kill_once()
        self._wait_for_its_end(pid)
        return Kill(name, moment, step)

    def _is_at(self, moment: str, before: int) -> bool:
        """Whether the run has got on since the last kill, and is about to be where it is to be killed."""
        if moment == "in a save":
            return any((self.folder / "checkpoints").glob(".step_*.part"))
        step = self._step()
        every = self.run.config.training.eval_steps
        return step > before and (moment == "in a step" or (every is not None and step % every == 0))

    def _evaluates(self) -> bool:
        return self.run.config.training.eval_steps is not None

    def _step(self) -> int:
        """The last step in the log."""
        try:
            lines = (self.folder / "metrics.jsonl").read_bytes().splitlines()
            return int(json.loads(lines[-1])["step"])
        except (OSError, IndexError, ValueError, KeyError):
            return 0

    def _victims(self) -> list[tuple[int, str]]:
        """The ranks, and whoever started them."""
        if self.process.poll() is not None:
            return []
        launcher = self.process.pid
        found = [(pid, f"rank {rank}") for pid in _descendants(launcher) if (rank := _rank_of(pid)) is not None]
        alone = self.run.config.launch.procs_per_node == 1
        return [*found, (launcher, "the process" if alone else "the launcher")]

    def _wait_for_its_end(self, pid: int) -> None:
        if pid == self.process.pid:
            self.process.wait()
            self._start_again()
            return
        deadline = time.monotonic() + 60
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            if self.process.poll() is not None:
                return
            time.sleep(_LOOK_SECONDS)

    def _start_again(self) -> bool:
        """Whether there is still something to do for the run."""
        if self.process.returncode == 0:
            return False
        if self.process.returncode > 0:
            raise UserError(
                f"the disturbed run failed with {self.process.returncode} instead of going on; see "
                f"{self.folder / 'chaos.log'}"
            )
        self.process = self.started.start(self.folder)
        return True

    def _come_to_an_end(self) -> None:
        while self.process.wait() != 0:
            self._start_again()


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, left = [], [pid]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return found


def _rank_of(pid: int) -> str | None:
    """Of a worker itself, not of what it started."""
    try:
        environment = dict(
            pair.split("=", 1) for pair in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in pair
        )
        command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (OSError, ValueError):
        return None
    return rank_in(environment) if "shoal" in command and "train" in command else None


def _repeats(run: Run) -> bool:
    """Whether the same work gives the same bits."""
    import torch

    on_cpu = run.config.training.device == "cpu" or not torch.accelerator.is_available()
    return on_cpu or run.config.experiment.deterministic


def _difference(a: Path, b: Path, rtol: float | None = None) -> Difference:
    ends = [find_latest_checkpoint(folder) for folder in (a, b)]
    for folder, end in zip((a, b), ends, strict=True):
        if end is None:
            raise UserError(f"{folder} has no good checkpoint at its end")
    return diff(open_step(ends[0]), open_step(ends[1]), rtol)  # type: ignore[arg-type]


def _largest(difference: Difference) -> float:
    return max((found.relative or 0.0 for found in difference.tensors), default=0.0)


def _problems(difference: Difference) -> list[str]:
    problems = [f"{key}: {a} undisturbed, {b} disturbed" for key, (a, b) in difference.position.items()]
    problems += [f"{name} is only in one of them" for name in (*difference.only_in_a, *difference.only_in_b)]
    return problems + [f"{found.name} differs by {found.relative} of its largest value" for found in difference.tensors]


def _metric_problems(undisturbed: Path, disturbed: Path, allowed: float | None) -> list[str]:
    """A killed run's log has every step once, as the other's."""
    logs = []
    for folder in (undisturbed, disturbed):
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        logs.append([{key: value for key, value in row.items() if not key.endswith(_TIMES)} for row in rows])
    steps = [[row["step"] for row in log] for log in logs]
    if steps[0] != steps[1]:
        return [f"metrics.jsonl has {len(steps[1])} rows, the undisturbed one {len(steps[0])}"]
    if allowed is not None:
        return []
    wrong = next((row["step"] for row, other in zip(*logs, strict=True) if row != other), None)
    return [] if wrong is None else [f"metrics.jsonl differs at step {wrong}"]


def _tensorboard_problems(undisturbed: Path, disturbed: Path, allowed: float | None) -> list[str]:
    """What TensorBoard shows of a killed run is what it shows of the other: each tag, each step once."""
    a, b = (_shown_by_tensorboard(folder / "tensorboard") for folder in (undisturbed, disturbed))
    problems = [f"TensorBoard has {tag} in only one of them" for tag in sorted(a.keys() ^ b.keys())]
    for tag in sorted(a.keys() & b.keys()):
        steps = [[step for step, _ in shown[tag]] for shown in (a, b)]
        if steps[0] != steps[1]:
            problems.append(f"TensorBoard has {len(steps[1])} points of {tag}, the undisturbed one {len(steps[0])}")
        elif allowed is None and not tag.endswith(_TIMES) and a[tag] != b[tag]:
            step = next(one[0] for one, other in zip(a[tag], b[tag], strict=True) if one != other)
            problems.append(f"TensorBoard differs in {tag} at step {step}")
    return problems


def _shown_by_tensorboard(folder: Path) -> dict[str, list[tuple[int, object]]]:
    """tag → steps and values, numbers and texts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    tags = events.Tags()
    shown: dict[str, list[tuple[int, object]]] = {}
    for tag in tags["scalars"]:
        shown[tag] = [(event.step, str(event.value)) for event in events.Scalars(tag)]  # where NaN equals NaN
    for tag in tags["tensors"]:
        shown[tag] = [(event.step, event.tensor_proto.SerializeToString()) for event in events.Tensors(tag)]
    return shown
