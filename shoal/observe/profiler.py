"""A torch.profiler trace of the steps that `logging.profile` chooses."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path

from torch.profiler import profile, record_function

from shoal.config.schema import ProfileConfig


class Profiler:
    """Records the chosen steps. Call `step(n)` when step n begins, and `close()` at the end.

    Writes `profile/trace_step_<first>-<last>.json` for chrome://tracing or Perfetto, in which each step is a span named
    `step <n>`, and `profile/summary.txt`. Without a config it does nothing.
    """

    def __init__(self, config: ProfileConfig | None, output_dir: Path):
        self._folder = output_dir / "profile"
        self._next_step: float = config.start if config else math.inf
        self._end_step = config.start + config.steps if config else 0
        self._profile: profile | None = None
        self._span = ExitStack()

    def step(self, step: int) -> None:
        """Starts, continues or ends the recording as step `step` begins."""
        if step < self._next_step:
            return
        if step >= self._end_step:  # also if a resumed run starts after the chosen steps
            self.close()
            return
        if self._profile is None:
            self._first_step = step
            # By default torch records the CPU, and the accelerator if there is one.
            self._profile = profile(record_shapes=True, acc_events=True)
            self._profile.start()
        self._span.close()
        self._span.enter_context(record_function(f"step {step}"))
        self._last_step, self._next_step = step, step + 1

    def close(self) -> None:
        """Ends the recording, if there is one, and writes the files."""
        self._next_step = math.inf
        if self._profile is None:
            return
        self._span.close()
        finished, self._profile = self._profile, None
        finished.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(self._folder / f"trace_step_{self._first_step}-{self._last_step}.json"))
        averages = finished.key_averages()
        on_device = any(event.device_time_total > 0 for event in averages)
        table = averages.table(sort_by="device_time_total" if on_device else "cpu_time_total", row_limit=50)
        (self._folder / "summary.txt").write_text(table + "\n")
