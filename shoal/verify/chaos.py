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
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shoal.checkpoint import Checkpoint, find_latest_checkpoint
from shoal.checkpoint.inspect import diff, open_step_folder
from shoal.config import Run
from shoal.errors import UserError
from shoal.processes.detect import rank_in

_LOOK_SECONDS = 0.005
_DELAYS = {"in a step": 0.3, "in a save": 0.02, "in an evaluation": 0.1}
"""The moments to kill at: how many seconds after one began, at most."""
_TIMES = ("_per_second", "seconds", "memory_gib", "mfu")
"""Metrics that no two runs share."""

Start = Callable[[Path], "subprocess.Popen[str]"]
Log = dict[str, list[tuple[int, object]]]
"""tag → steps and values."""


@dataclass(frozen=True)
class Kill:
    """One process, and where the run was then."""

    victim: str
    moment: str
    after_step: int


@dataclass(frozen=True)
class Verdict:
    kills: list[Kill]
    problems: list[str]
    allowed: float | None
    """How far apart two undisturbed runs were, where hardware does not repeat; None if it does."""

    @property
    def passed(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}


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
    start = partial(_start, config, overrides, kills + 3)
    told("undisturbed run")
    undisturbed = _to_its_end(start, folder / "undisturbed")
    allowed = None
    if not _repeats(run):
        told("undisturbed run again: this hardware does not repeat to the bit, and the difference is what is allowed")
        difference = diff(_last_checkpoint(undisturbed), _last_checkpoint(_to_its_end(start, folder / "again")))
        allowed = 2 * max((found.relative or 0.0 for found in difference.tensors), default=0.0)
    disturbed = folder / "disturbed"
    killed = _Killer(start, disturbed, run, random.Random(seed), told).kill(kills)
    problems = checkpoint_problems(undisturbed, disturbed, allowed) + log_problems(undisturbed, disturbed, allowed)
    return Verdict(killed, problems, allowed)


def _start(config: Path, overrides: Sequence[str], max_restarts: int, folder: Path) -> subprocess.Popen[str]:
    """Starts the user's run in this folder."""
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


def _to_its_end(start: Start, folder: Path) -> Path:
    if code := start(folder).wait():
        raise UserError(f"the undisturbed run failed with {code}; see {folder / 'chaos.log'}")
    return folder


class _Killer:
    def __init__(self, start: Start, folder: Path, run: Run, rng: random.Random, told: Callable[[str], None]) -> None:
        self.start, self.folder, self.rng, self.told = start, folder, rng, told
        self.eval_steps = run.config.training.eval_steps
        self.launcher_name = "the process" if run.config.launch.procs_per_node == 1 else "the launcher"
        self.process = start(folder)

    def kill(self, times: int) -> list[Kill]:
        """Kills as often, starting the run again where its launcher died, and lets it come to its end."""
        kills: list[Kill] = []
        while len(kills) < times and (kill := self._kill_once()):
            kills.append(kill)
            self.told(f"kill {len(kills)} of {times}: {kill.victim}, {kill.moment}, after step {kill.after_step}")
        if len(kills) < times:
            self.told(f"the run ended after {len(kills)} kills; give it more steps for more")
        while self.process.wait() != 0:
            self._start_again()
        return kills

    def _kill_once(self) -> Kill | None:
        """None if the run came to its end before."""
        while self.process.poll() != 0:
            moment = self.rng.choice([moment for moment in _DELAYS if self.eval_steps or moment != "in an evaluation"])
            before = self._step()
            while not self._is_at(moment, before):
                if self.process.poll() is not None and not self._start_again():
                    return None
                time.sleep(_LOOK_SECONDS)
            time.sleep(self.rng.random() * _DELAYS[moment])
            if self.process.poll() is None:
                pid, name = self.rng.choice([*_workers(self.process.pid), (self.process.pid, self.launcher_name)])
                step = self._step()
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:  # it came to its end by itself
                    continue
                self._wait_for_its_end(pid)
                return Kill(name, moment, step)
        return None

    def _is_at(self, moment: str, before: int) -> bool:
        """Whether the run has got on since the last kill, and is about to be where it is to be killed."""
        if moment == "in a save":
            return any((self.folder / "checkpoints").glob(".step_*.part"))
        step = self._step()
        return step > before and (moment == "in a step" or step % (self.eval_steps or 1) == 0)

    def _step(self) -> int:
        """The last step in the log."""
        try:
            return int(json.loads((self.folder / "metrics.jsonl").read_bytes().splitlines()[-1])["step"])
        except (OSError, IndexError, ValueError, KeyError):
            return 0

    def _wait_for_its_end(self, pid: int) -> None:
        if pid == self.process.pid:
            self.process.wait()
            self._start_again()
            return
        deadline = time.monotonic() + 60
        while Path(f"/proc/{pid}").exists() and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)

    def _start_again(self) -> bool:
        """Whether there is still something to do for the run."""
        code = self.process.returncode
        if code > 0:
            raise UserError(
                f"the disturbed run failed with {code} instead of going on; see {self.folder / 'chaos.log'}"
            )
        if code < 0:
            self.process = self.start(self.folder)
        return code < 0


def _workers(launcher: int) -> list[tuple[int, str]]:
    """The processes that a launcher has started, by rank."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (folder / "environ").read_text().split("\0") if parent == launcher else []
        except (OSError, ValueError, IndexError):  # it has ended
            continue
        rank = rank_in(dict(variable.split("=", 1) for variable in variables if "=" in variable))
        if rank is not None:
            found.append((int(folder.name), f"rank {rank}"))
    return found


def _repeats(run: Run) -> bool:
    """Whether the same work gives the same bits."""
    import torch

    on_cpu = run.config.training.device == "cpu" or not torch.accelerator.is_available()
    return on_cpu or run.config.experiment.deterministic


def _last_checkpoint(folder: Path) -> Checkpoint:
    if (path := find_latest_checkpoint(folder)) is None:
        raise UserError(f"{folder} has no good checkpoint at its end")
    return open_step_folder(path)


def checkpoint_problems(undisturbed: Path, disturbed: Path, allowed: float | None) -> list[str]:
    difference = diff(_last_checkpoint(undisturbed), _last_checkpoint(disturbed), allowed)
    problems = [f"{key}: {a} undisturbed, {b} disturbed" for key, (a, b) in difference.position.items()]
    problems += [f"{name} is only in one of them" for name in (*difference.only_in_a, *difference.only_in_b)]
    return problems + [f"{found.name} differs by {found.relative} of its largest value" for found in difference.tensors]


def log_problems(undisturbed: Path, disturbed: Path, allowed: float | None) -> list[str]:
    """A killed run's log, and what TensorBoard shows of it, is the other's: each tag, each step once."""
    problems = []
    for name, read in (("metrics.jsonl", read_metrics), ("tensorboard", read_tensorboard)):
        if not (undisturbed / name).exists():
            continue
        a, b = read(undisturbed / name), read(disturbed / name)
        problems += [f"{name} has {tag} in only one of them" for tag in sorted(a.keys() ^ b.keys())]
        for tag in sorted(a.keys() & b.keys()):
            if [step for step, _ in a[tag]] != [step for step, _ in b[tag]]:
                problems.append(f"{name} has {len(b[tag])} points of {tag}, the undisturbed one {len(a[tag])}")
            elif allowed is None and not tag.endswith(_TIMES) and a[tag] != b[tag]:
                step = next(one[0] for one, other in zip(a[tag], b[tag], strict=True) if one != other)
                problems.append(f"{name} differs in {tag} at step {step}")
    return problems


def read_metrics(path: Path) -> Log:
    """The lines themselves are the tag `line`: which names each has."""
    log: Log = {}
    for row in map(json.loads, path.read_text().splitlines()):
        for tag, value in {**row, "line": [*row]}.items():
            log.setdefault(tag, []).append((row["step"], value))
    return log


def read_tensorboard(folder: Path) -> Log:
    """Numbers and texts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    tags = events.Tags()
    # Numbers as text, where NaN equals NaN.
    log: Log = {tag: [(event.step, str(event.value)) for event in events.Scalars(tag)] for tag in tags["scalars"]}
    texts = {tag: events.Tensors(tag) for tag in tags["tensors"]}
    return log | {tag: [(e.step, e.tensor_proto.SerializeToString()) for e in found] for tag, found in texts.items()}
