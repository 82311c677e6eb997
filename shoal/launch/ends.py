"""What a launcher and its workers agree on about the end of a process."""

from __future__ import annotations

from pathlib import Path

from shoal.config import Run

FINAL_EXIT_CODE = "final exit code"
"""The key of the board under which a worker puts the exit code of a run that would fail again if restarted."""

REFUSED = "refused"
"""The key of the board that a worker sets if the first error of a run is a refusal: its run folder is taken back."""


def log_path(run: Run, rank: int) -> Path:
    """Returns the log file of a rank in the run folder."""
    return Path(run.config.output_dir) / "logs" / f"rank_{rank}.log"
