"""What watches a run: the meter, the profiler, the loggers, and the console with its warnings."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.config import Run
from shoal.errors import one_line
from shoal.observe.console import Console
from shoal.observe.loggers import Loggers, RetryingFile, open_loggers
from shoal.observe.profiler import Profiler
from shoal.training.loaders import Loaders
from shoal.training.meter import Meter
from shoal.training.resume import Progress
from shoal.training.session import Session

FOR_FILES_ALONE = {
    "train/epoch",
    "train/data_seconds",
    "train/memory_gib",
    "train/skipped_steps",
    "train/wire_bytes",
    "train/wire_bytes_uncompressed",
    "train/compression_seconds",
    "train/exchange_seconds",
    "train/slowest_rank",
    "train/slowest_ratio",
}
"""Metrics that would only make the console's line longer."""
VARYING_METRICS = ("_per_second", "seconds", "memory_gib", "mfu", "slowest_rank", "slowest_ratio")
"""Endings of metrics that differ between any two runs."""


class Warnings:
    """Shows warnings on the console, or on standard error if the console is off, and writes them to the log of rank 0.

    Those that come before there is a console wait for it; the log has them at once.
    """

    def __init__(self, log: Path | None = None) -> None:
        """`log` is the log file, which is made when the first warning comes.

        Ranks other than 0 have the same warnings and pass no log; they show nothing.
        """
        self._log_path = log
        self._log_file: RetryingFile | None = None
        self._waiting: list[str] = []
        self._console: Console | None = None

    def __call__(self, warning: str) -> None:
        text = f"warning: {one_line(warning, limit=10_000)}"
        self._write(text)
        if self._console is None:
            self._waiting.append(text)
        else:
            self._show(text)

    def show_on(self, console: Console) -> None:
        self._console = console
        for text in self._waiting:
            self._show(text)
        self._waiting.clear()

    def close(self) -> None:
        """Closes the log. Warnings that no console has shown, because the run failed before, go to standard error."""
        for text in self._waiting:
            self._show(text)
        if self._log_file is not None:
            self._log_file.close()

    def _write(self, text: str) -> None:
        with suppress(OSError):  # a full disk is no reason to end
            if self._log_path is not None and self._log_file is None:
                self._log_path.parent.mkdir(parents=True, exist_ok=True)
                self._log_file = RetryingFile(self._log_path)
        if self._log_file is not None:
            self._log_file.write(f"{text}\n")
            self._log_file.flush()

    def _show(self, text: str) -> None:
        if self._console is not None and not self._console.is_off:
            self._console.line(text, to_copy=False)
        elif self._log_path is not None:
            print(f"shoal: {text}", file=sys.stderr, flush=True)


@dataclass
class Observers:
    """Only rank 0 writes; on other ranks these are silent."""

    meter: Meter
    profiler: Profiler
    loggers: Loggers
    console: Console


def open_observers(
    run: Run, session: Session, loaders: Loaders, progress: Progress, evaluates_again: bool, resources: ExitStack
) -> Observers:
    """Opens them at the step where the run goes on. `evaluates_again`: the checkpoint has no evaluation."""
    config, strategy, folder = run.config, session.strategy, Path(run.config.output_dir)
    logging, step = config.logging, progress.step
    meter = Meter(
        session,
        config.training,
        loaders.train,
        progress.skipped_steps,
        progress.since_log,
        logging.straggler_factor,
        progress.skipped_in_a_row,
    )
    speaks, loggers = strategy.is_main_process, Loggers()
    if speaks:
        loggers = open_loggers(logging, folder, config.experiment.name, run.tree(), step, evaluates_again)
    resources.enter_context(closing(loggers))
    profiler = resources.enter_context(closing(Profiler(logging.profile if speaks else None, folder)))
    log = None
    if speaks and strategy.world_size > 1:  # the other ranks write all of their output to their own log
        log = resources.enter_context(closing(RetryingFile(folder / "logs" / "rank_0.log")))
    console = Console(logging.console if speaks else "off", step, loaders.total_steps, copy=log)
    return Observers(meter, profiler, loggers, resources.enter_context(console))
