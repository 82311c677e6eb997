"""Trains the demo for an hour under faults, and checks that nothing grows, nothing is left behind and nothing is lost.

    python scripts/soak.py --seconds 3600

A fault comes after every 30 seconds of training: SIGKILL of a rank or of the launcher, SIGTERM, a rank that is stopped
for a few seconds, or a launcher that is killed while a rank is stopped. Memory and open files of all processes are
sampled meanwhile. At the end the weights are compared with those of a run that nothing disturbed. The result goes to
docs/soak.md.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from shoal.checkpoint import find_latest_checkpoint, open_checkpoint
from shoal.verify.chaos import checkpoint_problems, start_run, workers_of

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "soak.md"
CONFIG = ROOT / "shoal" / "configs" / "demo.yaml"
KEYS = [
    "training.device=cpu",
    "training.lr_scheduler=constant",  # the rate of a step must not depend on how many steps the hour had
    "training.warmup_ratio=0",
    "checkpoint.every=50",
    "training.eval_steps=500",
    "logging.tensorboard=false",
]
POLL_SECONDS = 0.5
STOP_CODE = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Sample:
    """The memory and open files of all ranks together, and of their launcher."""

    rank_mib: float
    rank_files: int
    launcher_mib: float
    launcher_files: int


def take_sample(launcher: int, ranks: Sequence[int]) -> Sample | None:
    """Returns the sample of now, or None if a process has just ended."""
    try:
        mib, files = zip(*(_usage(pid) for pid in (launcher, *ranks)), strict=True)
        return Sample(sum(mib[1:]), sum(files[1:]), mib[0], files[0])
    except (OSError, IndexError):
        return None


def _usage(pid: int) -> tuple[float, int]:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208


def first_and_last(samples: Sequence[Sample], name: str) -> tuple[float, float]:
    """Returns the medians of the first and of the last third of the samples."""
    values = [getattr(sample, name) for sample in samples]
    third = max(1, len(values) // 3)
    return median(values[:third]), median(values[-third:])


def growth_problems(samples: Sequence[Sample]) -> list[str]:
    """Returns what has grown between the first and the last third of the samples.

    A tenth more memory and a few open files more are allowed: attempts differ in what they have just opened.
    """
    if len(samples) < 6:
        return [f"only {len(samples)} samples of memory were taken"]
    problems = []
    for name, factor, extra in (("mib", 1.1, 16), ("files", 1.0, 8)):
        for who in ("rank", "launcher"):
            first, last = first_and_last(samples, f"{who}_{name}")
            if last > first * factor + extra:
                problems.append(f"{who}_{name} grew from {first:.0f} to {last:.0f}")
    return problems


class Soak:
    """A run under faults."""

    def __init__(self, start: Callable[[], subprocess.Popen[str]], folder: Path, processes: int, seed: int):
        self.start, self.folder, self.processes, self.rng = start, folder, processes, random.Random(seed)
        self._last_ranks: list[int] = []
        self._last_report = 0
        self.samples: list[Sample] = []
        self.faults: Counter[str] = Counter()
        self.starts = 0
        self.problems: list[str] = []
        self._start()

    def run(self, seconds: float, every: float) -> None:
        """Disturbs the run for so long, and then stops it."""
        faults = [self.kill_rank, self.kill_launcher, self.terminate, self.stop_rank, self.kill_launcher_of_stopped]
        began = time.monotonic()
        end = began + seconds
        order: list[Callable[[], None]] = []
        while time.monotonic() + every < end:
            self._watch(every)
            if not order:  # every fault comes equally often
                order = self.rng.sample(faults, len(faults))
            fault = order.pop()
            name = (fault.__doc__ or "").removesuffix(".")
            print(f"{end - time.monotonic():6.0f} s left: {name}", flush=True)
            fault()
            self.faults[name] += 1
        self._watch(max(0.0, end - time.monotonic()))
        os.kill(self.process.pid, signal.SIGTERM)
        self._expect_end(STOP_CODE)
        self.seconds = time.monotonic() - began

    def kill_rank(self) -> None:
        """SIGKILL of a rank."""
        os.kill(self.rng.choice(self.ranks()), signal.SIGKILL)

    def kill_launcher(self) -> None:
        """SIGKILL of the launcher."""
        self._end_launcher(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM to the launcher."""
        self._end_launcher(signal.SIGTERM)

    def stop_rank(self) -> None:
        """SIGSTOP of a rank for a few seconds."""
        rank = self.rng.choice(self.ranks())
        os.kill(rank, signal.SIGSTOP)
        time.sleep(self.rng.uniform(1, 5))
        os.kill(rank, signal.SIGCONT)

    def kill_launcher_of_stopped(self) -> None:
        """SIGKILL of the launcher while a rank is stopped."""
        os.kill(self.rng.choice(self.ranks()), signal.SIGSTOP)
        self._end_launcher(signal.SIGKILL)

    def ranks(self) -> list[int]:
        return [pid for pid, _ in workers_of(self.process.pid)]

    def _start(self) -> None:
        self.process = self.start()
        self.starts += 1

    def _end_launcher(self, number: signal.Signals) -> None:
        """Ends the launcher, waits until all ranks have ended too, and starts the run again."""
        ranks = self.ranks()
        os.kill(self.process.pid, number)
        self._expect_end(STOP_CODE if number == signal.SIGTERM else -number)
        end = time.monotonic() + 120
        while any(Path(f"/proc/{pid}").exists() for pid in ranks):
            if time.monotonic() > end:
                raise SystemExit("ranks were left behind by a launcher that had ended")
            time.sleep(0.1)
        self._start()

    def _expect_end(self, code: int) -> None:
        if self.process.wait() != code:
            raise SystemExit(f"the run ended with exit code {self.process.returncode} instead of {code}; see chaos.log")

    def _trains(self) -> bool:
        """Returns whether all ranks have taken a step: memory still grows before, and faults would only hit starts."""
        ranks, report = self.ranks(), self.folder / "report.txt"  # the report is written after the first step
        written = report.stat().st_mtime_ns if report.exists() else 0
        if ranks != self._last_ranks:
            self._last_ranks, self._last_report = ranks, written
        return len(ranks) == self.processes and written != self._last_report

    def _watch(self, seconds: float) -> None:
        """Waits until the run trains, and then samples for so many seconds."""
        self._wait_until_training()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._check_alive()
            if self._trains() and (sample := take_sample(self.process.pid, self._last_ranks)):
                self.samples.append(sample)
            time.sleep(POLL_SECONDS)

    def _wait_until_training(self) -> None:
        while not self._trains():
            self._check_alive()
            time.sleep(0.1)

    def _check_alive(self) -> None:
        if self.process.poll() is not None:
            raise SystemExit(f"the run ended by itself with exit code {self.process.returncode}; see chaos.log")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600, help="how long the run is disturbed")
    parser.add_argument("--every", type=float, default=30, help="seconds of training before each fault")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="shoal-soak-"))
    keys = [*KEYS, f"launch.procs_per_node={arguments.processes}"]
    endless = [*keys, "training.max_steps=100000000"]
    start = partial(start_run, CONFIG, endless, 1000, folder / "disturbed")
    print(f"working in {folder}", flush=True)
    soak = Soak(start, folder / "disturbed", arguments.processes, arguments.seed)
    try:
        soak.run(arguments.seconds, arguments.every)
    finally:
        if soak.process.poll() is None:
            soak.process.terminate()
            soak.process.wait()
    latest = find_latest_checkpoint(folder / "disturbed")
    assert latest is not None
    steps = int(open_checkpoint(latest).trainer["step"])
    restarts = (folder / "disturbed" / "chaos.log").read_text().count("starting again")
    print(f"{steps} steps; now the same without faults", flush=True)
    undisturbed = start_run(CONFIG, [*keys, f"training.max_steps={steps}"], 0, folder / "undisturbed")
    if undisturbed.wait():
        raise SystemExit(f"the undisturbed run failed; see {folder / 'undisturbed' / 'chaos.log'}")
    problems = growth_problems(soak.samples)
    problems += checkpoint_problems(folder / "undisturbed", folder / "disturbed", None)
    hidden = [path.name for path in (folder / "disturbed" / "checkpoints").iterdir() if path.name.startswith(".")]
    problems += [f"left behind: {name}" for name in hidden]
    text = page(arguments, soak, steps, restarts, problems)
    PAGE.write_text(text)
    print(text)
    if problems:
        raise SystemExit(f"see {folder}")
    shutil.rmtree(folder)


def page(arguments: argparse.Namespace, soak: Soak, steps: int, restarts: int, problems: Sequence[str]) -> str:
    """Returns the page of the docs with the result."""

    def change(name: str) -> str:
        first, last = first_and_last(soak.samples, name) if soak.samples else (0, 0)
        return f"{first:.0f} → {last:.0f}"

    sizes = f"--seconds {arguments.seconds:g} --every {arguments.every:g} --processes {arguments.processes}"
    faults = "; ".join(f"{count} × {name}" for name, count in sorted(soak.faults.items()))
    result = (
        "; ".join(problems)
        or "the weights, the optimizer and the position equal those of an undisturbed run to the bit"
    )
    rows = {
        "command": f"`python scripts/soak.py {sizes} --seed {arguments.seed}`",
        "duration under faults": f"{soak.seconds:.0f} s, {steps} steps of `configs/demo.yaml` on the CPU",
        "faults": f"{soak.faults.total()}: {faults}",
        "restarts": f"{restarts} by the launcher, {soak.starts - 1} of the launcher",
        "memory of all ranks, MiB": change("rank_mib"),
        "open files of all ranks": change("rank_files"),
        "memory of the launcher, MiB": change("launcher_mib"),
        "open files of the launcher": change("launcher_files"),
        "samples of memory and files": str(len(soak.samples)),
        "result": result,
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        "# Soak\n\nWritten by `make soak`: a run under faults, compared with one that nothing disturbed. Memory and "
        "open files are medians of the first and of the last third of all samples, taken while all ranks trained.\n\n"
        f"| | |\n| --- | --- |\n{table}\n"
    )


if __name__ == "__main__":
    main()
