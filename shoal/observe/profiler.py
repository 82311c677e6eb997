"""A torch.profiler trace of the steps that the config names."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path

from torch.profiler import profile, record_function

from shoal.config.schema import ProfileConfig


class Profiler:
    """Call `step(n)` as step n begins, and `close()` at the end. Without a config it does nothing.

    Writes `profile/trace_step_<first>-<last>.json` for chrome://tracing or Perfetto, where each step is a
    span named `step <n>`, and `profile/summary.txt`.
    """

    def __init__(self, config: ProfileConfig | None, output_dir: Path):
        self._folder = output_dir / "profile"
        self._next_step: float = config.start if config else math.inf
        self._end_step = config.start + config.steps if config else 0
        self._profile: profile | None = None
        self._span = ExitStack()

    def step(self, step: int) -> None:
        if step < self._next_step:
            return
        if step >= self._end_step:  # also at once, when a resumed run is already past the chosen steps
            self.close()
            return
        if self._profile is None:
            self._first_step = step
            # Of the CPU, and of the accelerator if there is one.
            self._profile = profile(record_shapes=True, acc_events=True)
            self._profile.start()
        self._span.close()
        self._span.enter_context(record_function(f"step {step}"))
        self._last_step, self._next_step = step, step + 1

    def close(self) -> None:
        self._next_step = math.inf
        if self._profile is None:
            return
        self._span.close()
        done, self._profile = self._profile, None
        done.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        done.export_chrome_trace(str(self._folder / f"trace_step_{self._first_step}-{self._last_step}.json"))
        averages = done.key_averages()
        on_device = any(event.device_time_total > 0 for event in averages)
        table = averages.table(sort_by="device_time_total" if on_device else "cpu_time_total", row_limit=50)
        (self._folder / "summary.txt").write_text(table + "\n")
